"""A run's calls of its tracker: a row that it cannot write ends no training, and its state goes to its own kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxpp_flax.messages import warn_user
from jaxpp_flax.trainers.trackers.base import CompositeTracker, Tracker

__all__ = ["GuardedTracker"]


@dataclass
class _Failures:
    """Rows that a tracker has lost by one kind of error."""

    first: int
    last: int
    count: int = 1


class GuardedTracker:
    """Calls each tracker of a trainer. The trainer's callbacks log by it; a user's own callback may call the tracker.

    An error of `log` or `close` is a warning: once for each tracker and kind of error, and a count at the end. The
    other trackers get the row. An error of `log_config`, before the first step, is raised: a tracker that cannot begin
    is to be mended. Ctrl-C and `SystemExit` are always raised.

    Example:
      >>> from jaxpp_flax.trainers.trackers.base import DictTracker
      >>> kept = DictTracker()
      >>> GuardedTracker(CompositeTracker(kept)).log({"loss": 1.0}, step=3)
      >>> kept["loss"]
      {3: 1.0}
    """

    def __init__(self, tracker: Tracker) -> None:
        self._trackers = list(_single(tracker))
        self._failures: dict[tuple[int, str], _Failures] = {}
        self._states: dict[int, Any] = {}  # the last one of each tracker
        self._stateless: set[int] = set()  # trackers whose `get_state` has failed
        self._left_out: list[Any] = []  # states of a checkpoint that no tracker of this run has: a later run may

    def log(self, metrics: Mapping[str, Any], *, step: int) -> None:
        """Log a row to each tracker."""
        for index, tracker in enumerate(self._trackers):
            try:
                tracker.log(metrics, step=step)
            except Exception as error:
                self._note(index, step, error)

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Log the configuration to each tracker."""
        for tracker in self._trackers:
            tracker.log_config(config)

    def close(self, error: BaseException | None) -> None:
        """Close each tracker, and tell how many rows were lost."""
        for tracker in self._trackers:
            try:
                tracker.close(error)
            except Exception as failed:  # an error of the loop must not be hidden by one of its tracker
                warn_user(
                    f"{_name(tracker)} did not close, so its last metrics may be missing: {failed!r}", RuntimeWarning
                )
        failures, self._failures = self._failures, {}
        for (index, kind), lost in failures.items():
            if lost.count > 1:
                warn_user(
                    f"{_name(self._trackers[index])}.log failed {lost.count} times by {kind}, at steps {lost.first} to "
                    f"{lost.last}: it lacks these rows.",
                    RuntimeWarning,
                )

    def get_state(self) -> list[dict[str, Any]] | None:
        """Return the states of the trackers for a checkpoint, each with the name of its tracker's class."""
        for index, tracker in enumerate(self._trackers):
            try:
                self._states[index] = tracker.get_state()
            except Exception as error:  # a save must not fail by it
                if index not in self._stateless:
                    text = f"{_name(tracker)}.get_state failed: {error!r}. Checkpoints keep its last state, if any."
                    warn_user(text, RuntimeWarning)
                self._stateless.add(index)
        states = [
            {"tracker": _name(tracker), "state": state}
            for index, tracker in enumerate(self._trackers)
            if (state := self._states.get(index)) is not None
        ]
        return [*states, *self._left_out] or None

    def set_state(self, states: Any, tell: Callable[[str], None]) -> None:
        """Give each tracker the state of a tracker of its class; `tell` those that none takes."""
        self._left_out, free = [], list(self._trackers)
        for saved in _named(states, self._trackers):
            taker = next((tracker for tracker in free if _name(tracker) == saved["tracker"]), None)
            reason = "this run has no such tracker; later checkpoints keep it"
            if taker is not None:
                free.remove(taker)
                try:
                    taker.set_state(saved["state"])
                    continue
                except Exception as error:
                    reason = f"it does not take it: {error!r}"
            self._left_out.append(saved)
            tell(f"the checkpoint's state of {saved['tracker']} is left out: {reason}")

    def _note(self, index: int, step: int, error: Exception) -> None:
        key = (index, type(error).__name__)
        if (known := self._failures.get(key)) is not None:
            known.last, known.count = step, known.count + 1
            return
        self._failures[key] = _Failures(first=step, last=step)
        warn_user(
            f"{_name(self._trackers[index])}.log failed at step {step}: {error!r}. Training goes on, and this tracker "
            "lacks the row. Further errors of this kind are counted, and told at the end.",
            RuntimeWarning,
        )


def _single(tracker: Tracker) -> Iterator[Tracker]:
    """Yield the trackers that a tracker passes its rows on to, or itself."""
    if isinstance(tracker, CompositeTracker) and type(tracker).log is CompositeTracker.log:
        for inner in tracker.trackers:
            yield from _single(inner)
    else:
        yield tracker


def _name(tracker: Tracker) -> str:
    return type(tracker).__name__


def _named(states: Any, trackers: Sequence[Tracker]) -> list[dict[str, Any]]:
    """Return states with the names of their trackers; older checkpoints have the states of all trackers in order."""
    if isinstance(states, list) and all(isinstance(of, dict) and of.keys() == {"tracker", "state"} for of in states):
        return states
    older = states if isinstance(states, list) else [states]
    names = [_name(tracker) for tracker in trackers] + ["a tracker"] * len(older)
    return [{"tracker": name, "state": state} for name, state in zip(names, older, strict=False) if state is not None]
