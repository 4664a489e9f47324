"""The training loop and what happens beside it."""
