"""Drawing and showing schedules, and their files."""
