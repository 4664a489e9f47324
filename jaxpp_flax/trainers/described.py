"""One docstring for a method of the trainer and for the method of its part that does the work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["described_by"]

_F = TypeVar("_F", bound=Callable[..., Any])


def described_by(method: Callable[..., Any]) -> Callable[[_F], _F]:
    """Give a function the docstring of `method`. The function only calls `method`.

    Example:
      >>> def work(): "Work hard."
      >>> @described_by(work)
      ... def hand_on(): work()
      >>> hand_on.__doc__
      'Work hard.'
    """

    def describe(function: _F) -> _F:
        function.__doc__ = method.__doc__
        return function

    return describe
