"""Callbacks: what happens beside training, in small classes with hooks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["Callback", "OnMetrics", "named"]


class Callback:
    """Hooks into `fit`; override those you need.

    Args:
      every: run the hooks of a step (`on_step`, `on_metrics`) at every so many steps.

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
        """Whether the hooks run at `step`."""
        return step % self.every == 0

    def get_state(self) -> Any:
        """What a checkpoint keeps of this callback, as JSON; None for nothing."""
        return None

    def set_state(self, state: Any) -> None:
        """Go on from what `get_state` gave, or begin anew with None. `fit` calls it before `on_fit_start`."""

    def on_fit_start(self, trainer: Any) -> None:
        """Before the first step; `trainer.stop` here ends `fit` without one."""

    def on_step(self, trainer: Any, step: int) -> None:
        """Right after `step` was dispatched: `trainer.state` is that after `step`; nothing has been waited for."""

    def on_metrics(self, trainer: Any, step: int, metrics: Mapping[str, Any]) -> None:
        """The metrics of `step` on the host. They come one step late, so that devices never wait for them."""

    def on_evaluate(self, trainer: Any, step: int, metrics: Mapping[str, Any]) -> None:
        """After an evaluation at `step`."""

    def on_fit_end(self, trainer: Any) -> None:
        """After the last step, and after an error or interruption too."""


def named(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """Callbacks by names that another run gives them too: their classes, counted where there are several.

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
        """Call it."""
        self._function(step, metrics)
