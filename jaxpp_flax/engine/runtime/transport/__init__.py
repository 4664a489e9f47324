"""Transports, which move arrays between processes."""
