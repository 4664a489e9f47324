"""Microbatches of several shapes in one loop: their container, and a loop's body for each shape."""
