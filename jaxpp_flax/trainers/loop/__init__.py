"""The training loop, its hooks, saves and progress."""
