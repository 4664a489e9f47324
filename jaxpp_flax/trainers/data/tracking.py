"""Where a trainer stands in its data: after the step in memory, in the batches that its loop draws."""

from __future__ import annotations

from typing import Any, Literal

from jaxpp_flax.trainers.data.position import DataPosition, Drawn
from jaxpp_flax.trainers.data.stream import Batches
from jaxpp_flax.trainers.state.holder import StateHolder

__all__ = ["DataTracking"]


class DataTracking:
    """Knows the position in the data that belongs to the step in memory, for checkpoints.

    Args:
      held: counts the steps.
    """

    def __init__(self, held: StateHolder) -> None:
        self._held = held
        self._source: Batches | None = None
        self._last_source: Batches | None = None  # of the last loop, whatever was restored since
        self._source_begin = 0
        self._position: tuple[int, DataPosition] | None = None  # with the step that it belongs to

    def enter(self, source: Batches) -> Batches:
        """From now on, batches come from `source`."""
        self._source = self._last_source = source
        self._source_begin = self._held.step
        return source

    def leave(self, source: Batches) -> None:
        """Batches come from `source` no longer: a step that follows is none of its."""
        if self._source is source:
            position = self.position()
            self._source, self._position = None, None if position is None else (self._held.step, position)

    def drawn_from(self, data: Any) -> Drawn | Literal[0]:
        """What the last loop has drawn of `data`, if that is an iterator that goes on."""
        return 0 if self._last_source is None else self._last_source.drawn_from(data)

    def restored(self, position: DataPosition | None) -> None:
        """The step in memory is a checkpoint's, whose data stood at `position`."""
        self._source = None
        self._position = None if position is None else (self._held.step, position)

    def position(self) -> DataPosition | None:
        """Where the data stands after the step in memory, as far as that is known."""
        if self._source is not None:
            # Steps that the user took with other batches leave no position; a batch may wait for its step.
            return self._source.position(self._held.step - self._source_begin)
        at_step, position = self._position or (None, None)
        return position if at_step == self._held.step else None
