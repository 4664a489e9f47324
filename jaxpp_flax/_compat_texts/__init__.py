"""What JAX tells in texts alone: the errors of JAX and XLA, and the scopes of traced equations."""
