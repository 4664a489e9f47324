"""The training steps for `Microbatches`, of which a long run draws any number of patterns."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Any

import jax

from jaxpp_flax.engine.arrays.ambient_mesh import trace_settings
from jaxpp_flax.engine.jit import MpmdFunction
from jaxpp_flax.engine.patterns import keep_newest
from jaxpp_flax.engine.tracing.bodies.microbatches import StackedMicrobatches
from jaxpp_flax.schedules import Schedule
from jaxpp_flax.trainers.data.batch import dtype_of, signature

__all__ = ["PatternSteps"]


class PatternSteps:
    """What the training steps for all patterns of some shapes share, and the newest of these steps.

    Args:
      compiled: all compiled steps of a trainer by their key; the oldest patterns are taken away from there.
    """

    def __init__(self, compiled: dict[Any, Any]) -> None:
        self._compiled = compiled
        self._newest = deque[Any]()  # the newest last
        self._functions: dict[Hashable, MpmdFunction] = {}
        self._shapes: dict[Hashable, set[Hashable]] = {}  # of the microbatches that are compiled

    def shapes(self, schedule: Schedule | None, batch: StackedMicrobatches) -> tuple[set[Hashable], set[Hashable]]:
        """Return the shapes of microbatches like these that are compiled, and those of this batch that are new."""
        trained = self._shapes.get(_shared(schedule, batch), set[Hashable]())
        shapes: set[Hashable] = {*map(signature, batch.items)}
        return trained, shapes - trained

    def compile(self, schedule: Schedule | None, step: MpmdFunction, state: Any, batch: StackedMicrobatches) -> Any:
        """Compile a step, by the function that serves all patterns; its shapes count from then on."""
        key = _shared(schedule, batch)
        compiled = self._functions.setdefault(key, step).compile(state, batch)
        self._shapes.setdefault(key, set()).update(map(signature, batch.items))
        return keep_newest(self._compiled, self._newest, compiled)


def _shared(schedule: Schedule | None, batch: StackedMicrobatches) -> Hashable:
    """Return what the steps for patterns of some shapes share: the schedule, and what a microbatch is."""
    leaves, tree = jax.tree.flatten(batch.items[0])
    kinds = [(dtype_of(leaf), len(leaf.shape)) for leaf in leaves]
    return schedule, tree, tuple(kinds), trace_settings()
