"""The error for a schedule that cannot be built or is wrong."""

from jaxpp_flax.error_codes import documented


@documented("JPF301")
class ScheduleError(ValueError):
    """A schedule does not fit its numbers of stages, ranks or microbatches, or its tasks are not a legal schedule."""
