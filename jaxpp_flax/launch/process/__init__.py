"""A process of a run: how it connects to the others, and how it ends."""
