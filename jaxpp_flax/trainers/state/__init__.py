"""The train state: the sources of its values, and its place on the ranks."""
