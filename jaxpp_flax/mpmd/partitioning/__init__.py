"""Turn a traced step of named computations into a program: place it, join it to fragments, order these."""
