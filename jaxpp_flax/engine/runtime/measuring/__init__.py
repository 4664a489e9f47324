"""Measuring a step: the times of its tasks, and their names in a profile."""
