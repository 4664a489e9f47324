"""One training step as a user writes it with Flax and Optax alone: it shares nothing with the step that is verified."""
