"""Callbacks: small classes with hooks that `fit` calls during training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["Callback", "OnMetrics", "named"]


class Callback:
    """Hooks into `fit`; override the hooks you need.

    Args:
      every: steps between two calls of the hooks of a step (`on_step`, `on_metrics`).

    Raises:
      ValueError: if `every` is below 1.

    Example:
      >>> class Remember(Callback):
      ...     def on_metrics(self, trainer, step, metrics):
      ...         self.last = (step, metrics["loss"])
      >>> Remember(every=10).wants(20)
      True
    """

    def __init__(self, *, every: int = 1) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"{type(self).__name__}(every={every!r}): it must be a whole number of at least 1.")
        self.every = every

    def wants(self, step: int) -> bool:
        """Return True if the hooks run at `step`."""
        return step % self.every == 0

    def get_state(self) -> Any:
        """Return this callback's state for a checkpoint, as JSON; None for no state."""
        return None

    def set_state(self, state: Any) -> None:
        """Restore a state from `get_state`, or begin again with None. `fit` calls this before `on_fit_start`."""

    def on_fit_start(self, trainer: Any) -> None:
        """Called before the first step; `trainer.stop` here ends `fit` without a step."""

    def on_step(self, trainer: Any, step: int) -> None:
        """Called right after `step` was dispatched: `trainer.state` is the state after `step`, without a wait."""

    def on_metrics(self, trainer: Any, step: int, metrics: Mapping[str, Any]) -> None:
        """Called with the metrics of `step` on the host, one step late, so that devices never wait for metrics."""

    def on_evaluate(self, trainer: Any, step: int, metrics: Mapping[str, Any]) -> None:
        """Called after an evaluation at `step`."""

    def on_fit_end(self, trainer: Any) -> None:
        """Called after the last step, and after an error or interruption too."""


def named(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """Name callbacks by class, with a number if a class occurs several times: another run gives the same names.

    Example:
      >>> list(named([OnMetrics(print), OnMetrics(print), Callback()]))
      ['OnMetrics', 'OnMetrics_2', 'Callback']
    """
    found: dict[str, Callback] = {}
    count = Counter[str]()
    for callback in callbacks:
        name = type(callback).__name__
        count[name] += 1
        found[name if count[name] == 1 else f"{name}_{count[name]}"] = callback
    return found


class OnMetrics(Callback):
    """Calls a function with `(step, metrics)`.

    Example:
      >>> losses = {}
      >>> callback = OnMetrics(lambda step, metrics: losses.update({step: metrics["loss"]}), every=5)
    """

    def __init__(self, function: Callable[[int, Mapping[str, Any]], None], *, every: int = 1) -> None:
        super().__init__(every=every)
        self._function = function

    def on_metrics(self, trainer: Any, step: int, metrics: Mapping[str, Any]) -> None:
        """Call the function."""
        self._function(step, metrics)
