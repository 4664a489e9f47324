"""The named schedules, one file for each family."""
