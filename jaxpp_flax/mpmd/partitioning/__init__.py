"""From a traced step of named computations to a program: placed, fused to fragments, in order."""
