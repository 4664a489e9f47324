"""The train state, and its place: in memory, on disk or on the ranks."""
