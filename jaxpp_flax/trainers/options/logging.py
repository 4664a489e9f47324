"""The options of metrics and of the progress display."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from jaxpp_flax.trainers.loop.progress import Meter
from jaxpp_flax.trainers.loop.tracked_run import as_config
from jaxpp_flax.trainers.loop.trackers import Tracker
from jaxpp_flax.trainers.options.base import Options
from jaxpp_flax.trainers.setup import check_count

__all__ = ["Logging"]


@dataclass(frozen=True, kw_only=True)
class Logging(Options):
    """The options of metrics and of the progress display: `logging=`.

    A boolean alone means `Logging(progress=...)`: `logging=False` shows nothing.

    Args:
      tracker: gets the configuration and the metrics; with several processes, in process 0.
      config: a mapping or a dataclass, for the tracker beside the number of stages and the like.
      every: steps between two rows of metrics.
      progress: True for a bar on a terminal and lines elsewhere, False for nothing, or a `Meter`.

    Raises:
      TypeError, ValueError: naming the field that does not fit.

    Example:
      >>> Logging(every=100, progress=False).every
      100
    """

    tracker: Tracker | None = None
    config: Any = None
    every: int = 10
    progress: bool | Meter = True

    def __post_init__(self) -> None:
        check_count("every", self.every)
        as_config(self.config)
        if not isinstance(self.progress, (bool, Meter)):
            kind = type(self.progress).__name__
            raise TypeError(f"progress={self.progress!r} ({kind}): it must be True, False or a Meter.")

    @classmethod
    def of(cls, value: Logging | bool | None) -> Logging:
        """Convert the trainer's `logging=`."""
        return cls(progress=value) if isinstance(value, bool) else super().of(cast(Any, value))
