"""Searching, drawing and showing schedules."""
