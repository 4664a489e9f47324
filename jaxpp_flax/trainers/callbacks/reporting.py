"""The callback that passes metrics to a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jaxpp_flax.trainers.callbacks.base import Callback

__all__ = ["OnMetrics"]


class OnMetrics(Callback):
    """Calls a function with `(step, metrics)`.

    Args:
      function: the function to call; `metrics` has floats and NumPy arrays.
      every: steps between two calls.

    Example:
      >>> losses = {}
      >>> callback = OnMetrics(lambda step, metrics: losses.update({step: metrics["loss"]}), every=5)
      >>> printing = OnMetrics(lambda step, metrics: print(f"step {step}  loss {metrics['loss']:.5f}"), every=5)
    """

    def __init__(self, function: Callable[[int, Mapping[str, Any]], None], *, every: int = 1) -> None:
        super().__init__(every=every)
        self._function = function

    def on_metrics(self, trainer: Any, step: int, metrics: Mapping[str, Any]) -> None:
        self._function(step, metrics)
