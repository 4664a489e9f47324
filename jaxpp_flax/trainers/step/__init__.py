"""The step functions: loss rule, update, tracing and compiling."""
