"""The step function: its update, and its compilation."""
