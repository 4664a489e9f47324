"""Passes that let several ranks run one program, so that XLA compiles it once."""
