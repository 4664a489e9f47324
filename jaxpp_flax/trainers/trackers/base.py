"""The interface of trackers, and those that keep metrics in memory or pass them on."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

__all__ = ["CompositeTracker", "DictTracker", "Tracker"]


class Tracker(abc.ABC):
    """Receives metrics that are already on the host. For your own tracker, write a subclass with `log`.

    With several processes, the tracker of process 0 alone is called: open files and connections at the first call. If
    `log` raises, `fit` warns and goes on; an error of `log_config`, before the first step, ends it. What a callback of
    yours raises ends it too, also by `trainer.tracker.log`.

    Example:
      >>> class Printer(Tracker):
      ...     def log(self, metrics, *, step):
      ...         print(step, metrics)
      >>> Printer().log({"loss": 1.5}, step=3)
      3 {'loss': 1.5}
    """

    @abc.abstractmethod
    def log(self, metrics: Mapping[str, Any], *, step: int) -> None:
        """Record `metrics` (floats, NumPy arrays or texts) of `step`."""

    def log_config(self, config: Mapping[str, Any]) -> None:  # noqa: B027 (optional)
        """Record the configuration of the run; by default, do nothing."""

    def close(self, error: BaseException | None = None) -> None:  # noqa: B027 (optional)
        """Write the remaining metrics; a loop calls this at its end, also after an error. A later `log` opens it again.

        Args:
          error: the exception that ended the loop, or None.
        """

    def get_state(self) -> Any:
        """Return the state that a resumed run needs to continue this run, as JSON for a checkpoint; None: no state."""
        return None

    def set_state(self, state: Any) -> None:  # noqa: B027 (optional)
        """Continue the run that `state`, from `get_state`, belongs to; a resumed `fit` calls this before `log`."""


class DictTracker(Tracker):
    """Keeps everything in memory, which makes tests easy.

    Example:
      >>> tracker = DictTracker()
      >>> tracker.log({"loss": 2.0}, step=1)
      >>> tracker.log({"loss": 1.0}, step=2)
      >>> tracker["loss"]
      {1: 2.0, 2: 1.0}
      >>> "accuracy" in tracker
      False
    """

    def __init__(self) -> None:
        self.metrics: dict[str, dict[int, Any]] = {}
        self.config: dict[str, Any] = {}

    def log(self, metrics: Mapping[str, Any], *, step: int) -> None:
        for name, value in metrics.items():
            self.metrics.setdefault(name, {})[step] = value

    def log_config(self, config: Mapping[str, Any]) -> None:
        self.config.update(config)

    def __getitem__(self, name: str) -> dict[int, Any]:
        return self.metrics[name]

    def __contains__(self, name: object) -> bool:
        return name in self.metrics


class CompositeTracker(Tracker):
    """Passes everything on to several trackers.

    Example:
      >>> first, second = DictTracker(), DictTracker()
      >>> CompositeTracker(first, second).log({"loss": 2.0}, step=1)
      >>> first["loss"] == second["loss"]
      True
    """

    def __init__(self, *trackers: Tracker) -> None:
        self.trackers = trackers

    def log(self, metrics: Mapping[str, Any], *, step: int) -> None:
        for tracker in self.trackers:
            tracker.log(metrics, step=step)

    def log_config(self, config: Mapping[str, Any]) -> None:
        for tracker in self.trackers:
            tracker.log_config(config)

    def close(self, error: BaseException | None = None) -> None:
        errors: list[Exception] = []
        for tracker in self.trackers:
            try:
                tracker.close(error)
            except Exception as failed:  # the others close all the same
                errors.append(failed)
        if errors:
            raise ExceptionGroup("trackers did not close", errors)

    def get_state(self) -> Any:
        states = [tracker.get_state() for tracker in self.trackers]
        return states if any(state is not None for state in states) else None

    def set_state(self, state: Any) -> None:
        for tracker, of in zip(self.trackers, state, strict=False):  # a run may add trackers
            if of is not None:
                tracker.set_state(of)
