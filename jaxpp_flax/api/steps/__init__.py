"""The steps of this front: their arrays and their text."""
