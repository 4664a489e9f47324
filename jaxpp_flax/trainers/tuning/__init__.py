"""Measuring steps, and changing the schedule."""
