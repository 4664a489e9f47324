"""What a step keeps in the memory of its devices: passes that recompute values, or move them to the host."""
