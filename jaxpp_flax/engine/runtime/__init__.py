"""Run a program: executables, the instruction loop, transport between processes."""
