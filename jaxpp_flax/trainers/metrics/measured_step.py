"""The metrics of the latest step, for its checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

__all__ = ["MeasuredStep"]


class MeasuredStep:
    """Holds the metrics of the latest step and of an evaluation after it.

    Example:
      >>> measured = MeasuredStep()
      >>> measured.add(3, {"loss": np.float32(0.5)})
      >>> measured.add(3, {"eval_loss": 0.75})
      >>> measured.at(3), measured.at(4)
      ({'loss': 0.5, 'eval_loss': 0.75}, None)
    """

    def __init__(self) -> None:
        self._step, self._metrics = -1, dict[str, Any]()
        self.on_save: Callable[[int, Collection[str]], None] | None = None  # called after a save to the directory

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Note metrics of a step, which may not be ready yet."""
        if step != self._step:
            self._step, self._metrics = step, {}
        self._metrics = {**self._metrics, **metrics}

    def clear(self) -> None:
        """Forget the metrics: the state is another one now, perhaps of the same step."""
        self._step, self._metrics = -1, {}

    def names(self, step: int) -> list[str]:
        """Return the names of the scalars of this step, without waiting for them."""
        return [name for name, value in self._metrics.items() if np.ndim(value) == 0] if step == self._step else []

    def saved(self, step: int) -> None:
        """Tell `on_save` that the trainer's directory gets a checkpoint of this step."""
        if self.on_save is not None:
            self.on_save(step, self.names(step))

    def at(self, step: int) -> dict[str, float] | None:
        """Wait for the scalars of this step, and return them as floats; None if no metrics of it are known."""
        if step != self._step:
            return None
        arrays = {name: np.asarray(value) for name, value in self._metrics.items() if np.ndim(value) == 0}
        return {name: float(array) for name, array in arrays.items()}
