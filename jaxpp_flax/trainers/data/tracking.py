"""The trainer's position in its data: the position after the step in memory, in the batches of the current loop."""

from __future__ import annotations

from typing import Any, Literal

from jaxpp_flax.trainers.data.position import DataPosition, Drawn
from jaxpp_flax.trainers.data.stream import Batches
from jaxpp_flax.trainers.state.holder import StateHolder

__all__ = ["DataTracking"]


class DataTracking:
    """Tracks the position in the data that belongs to the step in memory, for checkpoints.

    Args:
      held: counts the steps.
    """

    def __init__(self, held: StateHolder) -> None:
        self._held = held
        self._source: Batches | None = None
        self._last_source: Batches | None = None  # the source of the last loop; a restore does not change it
        self._source_begin = 0
        self._position: tuple[int, DataPosition] | None = None  # a step, and the position after it

    def enter(self, source: Batches) -> Batches:
        """Note that batches come from `source` from now on."""
        self._source = self._last_source = source
        self._source_begin = self._held.step
        return source

    def leave(self, source: Batches) -> None:
        """Note that batches do not come from `source` any more: later steps do not belong to `source`."""
        if self._source is source:
            position = self.position()
            self._source, self._position = None, None if position is None else (self._held.step, position)

    def drawn_from(self, data: Any) -> Drawn | Literal[0]:
        """Return the batches that the last loop has drawn from `data`, if `data` is the same iterator; else 0."""
        return 0 if self._last_source is None else self._last_source.drawn_from(data)

    def restored(self, position: DataPosition | None) -> None:
        """Note that the step in memory comes from a checkpoint with this position in the data."""
        self._source = None
        self._position = None if position is None else (self._held.step, position)

    def position(self) -> DataPosition | None:
        """Return the position in the data after the step in memory, if known."""
        if self._source is not None:
            # If the user took steps with other batches, there is no position. A drawn batch may wait for its step.
            return self._source.position(self._held.step - self._source_begin)
        at_step, position = self._position or (None, None)
        return position if at_step == self._held.step else None
