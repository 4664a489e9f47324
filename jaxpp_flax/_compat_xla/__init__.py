"""What XLA's compilers say as text; only these files read it."""
