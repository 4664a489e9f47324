"""The train state, and where it is."""
