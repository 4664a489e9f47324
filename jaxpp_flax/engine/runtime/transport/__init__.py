"""What moves arrays between processes."""
