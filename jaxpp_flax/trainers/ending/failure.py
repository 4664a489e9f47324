"""Whether an error ends a run: for trackers and callbacks, whose `close` and `on_fit_end` are not told."""

from __future__ import annotations

import sys

from jaxpp_flax.processes.failures import PREEMPTED_STATUS

__all__ = ["FailureCheck"]


class FailureCheck:
    """Make it when the run begins; an error that is being handled later ends the run.

    Example:
      >>> check = FailureCheck()
      >>> try:
      ...     raise ValueError
      ... except ValueError:
      ...     print(check.has_failed(), FailureCheck().has_failed())
      True False
    """

    def __init__(self) -> None:
        self._before = sys.exc_info()[1]  # `fit` may run in the handler of an older error

    def has_failed(self) -> bool:
        """Return True if an error is being handled that is newer than this object.

        `sys.exit` without an error, and the exit after SIGTERM, are no failure.
        """
        error = sys.exc_info()[1]
        if isinstance(error, SystemExit) and error.code in (None, 0, PREEMPTED_STATUS):
            return False
        return error not in (None, self._before)
