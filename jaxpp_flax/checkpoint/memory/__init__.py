"""Copies of a state in memory that outlives the processes of a host."""
