"""The error for a schedule that cannot be built or is wrong."""


class ScheduleError(ValueError):
    """A schedule does not fit its counts, or a list of tasks is not a legal schedule."""
