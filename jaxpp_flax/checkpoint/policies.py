"""The policies to save and to keep checkpoints: numbers, or Orbax policies."""

from __future__ import annotations

from typing import TypeAlias

from orbax.checkpoint import checkpoint_managers as policies

__all__ = ["KeepPolicy", "SavePolicy", "check_interval"]

SavePolicy: TypeAlias = int | policies.SaveDecisionPolicy
"""An interval in steps, or an Orbax save decision policy."""
KeepPolicy: TypeAlias = int | policies.PreservationPolicy
"""The number of latest checkpoints to keep, or an Orbax preservation policy."""


def check_interval(name: str, value: object) -> None:
    """Refuse a number that is not a count.

    Raises:
      ValueError: the message names the argument.
    """
    if isinstance(value, (bool, float)) or (isinstance(value, int) and value < 1):
        raise ValueError(f"{name}={value!r}: it must be a whole number of at least 1, a policy, or None.")
