"""The step functions: update, and compiling."""
