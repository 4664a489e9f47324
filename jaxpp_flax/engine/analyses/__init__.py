"""Facts that passes ask for: pure functions of a graph."""
