"""The steps of this front: their arrays, their text, and what they say of the environment."""
