"""Find the state that a loss moves in each microbatch, but plain Flax once a step.

A loss that is called with one microbatch after another leaves a variable as one call with the whole batch does, if it
only adds sums over the examples to it, or keeps the largest value of any example, and does not read it.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence

from jaxpp_flax.trainers.loss.growth import EXAMPLES, Growth, is_same, read
from jaxpp_flax.trainers.loss.joined_examples import Joins

__all__ = ["INDEX", "moved_by_microbatches", "read_states"]

INDEX = "index of the microbatch"
"""The name of the input that differs from microbatch to microbatch, beside the examples."""


def read_states(states: Mapping[int, Growth], loss: Sequence[Growth]) -> set[int]:
    """Return which of the states that a loss writes are read: by the loss itself, or for the next value of a state.

    Args:
      states: the growth of each state that the loss writes, by position; this is the name of its value before, too.
      loss: the growths of the terms of the loss.
    """
    found = frozenset[Hashable]().union(*(read(growth).reads for growth in loss))
    for position, growth in states.items():
        below = growth.onto is not None and growth.onto[0] == position
        found |= growth.reads if below else read(growth).reads
    return {position for position in states if position in found}


def moved_by_microbatches(
    states: Mapping[int, Growth], joins: Sequence[Joins], is_read: Collection[int], *, compared: bool
) -> list[int]:
    """Return the positions of the states whose value, after all microbatches, is not that of one call.

    Args:
      states: as in `read_states`.
      joins: how the new value of each state joins the examples.
      is_read: the states that are read.
      compared: whether the factors of the growths are known.
    """
    return [
        position
        for position, growth in states.items()
        if position in is_read or not _composes(position, growth, joins[position], {*states}, compared=compared)
    ]


def _composes(position: int, growth: Growth, joins: Joins, written: set[int], *, compared: bool) -> bool:
    """Return whether calls with parts of a batch leave a state as one call does; the call does not read it."""
    if not (written | {EXAMPLES, INDEX}).intersection(read(growth).reads):
        return True  # each microbatch writes the same
    if growth.onto is None or growth.onto[0] != position:
        return False
    kind = growth.onto[1]
    if kind != "add":
        return True
    linear = not (joins.divided or joins.mixed or growth.divided or growth.uneven)
    return linear and (not compared or growth.factor == 0 or is_same(growth.factor, 2))
