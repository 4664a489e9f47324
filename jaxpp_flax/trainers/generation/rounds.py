"""The loop of a generation: the groups of sequences take turns, and nobody waits for a result that is just begun."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.engine.runtime.reshard import on_every_process
from jaxpp_flax.trainers.generation.prompts import Group

__all__ = ["GroupRun", "run_in_turn"]


class GroupRun:
    """A group on its way: its cache and progress on the devices, and the calls that are left.

    Args:
      group: the sequences.
      calls: the number of tokens of each call.
      carried, fixed: as `DecodingStep` takes them, on their devices.
    """

    def __init__(self, group: Group, calls: Sequence[int], carried: Any, fixed: Any) -> None:
        self.group, self.has_ended = group, False
        self._calls, self._position = deque(calls), 0
        self._carried, self._fixed = carried, fixed
        self._next: Any = None  # the tokens that the last call has chosen, on the devices of the first stage

    @property
    def is_complete(self) -> bool:
        """True if no call is left to begin."""
        return self.has_ended or not self._calls

    def advance(self, steps: Mapping[int, Callable[..., Any]], state: Any) -> Any:
        """Begin the next call; return whether all sequences have ended then: a scalar that is not ready yet."""
        taken = self._calls.popleft()
        end = self._position + taken
        inside = end <= int(self.group.lengths[self.group.sequences >= 0].min())  # no token of it is to be chosen
        tokens = self.group.tokens[:, self._position : end] if inside or self._next is None else self._next
        self._carried, self._next, ended = steps[taken](state, self._carried, tokens, self._fixed)
        self._position = end
        if not self._calls:
            self._drop_cache()
        return ended

    def end(self) -> None:
        """Begin no further call."""
        if not self.has_ended:
            self.has_ended = True
            self._drop_cache()

    def _drop_cache(self) -> None:
        self._carried = (None, self._carried[1])

    def sequences(self, end_tokens: Sequence[int]) -> dict[int, np.ndarray]:
        """Return the new tokens of each sequence, by its number; every process must call this."""
        known = self._carried[1]["tokens"]
        several = isinstance(known, MpmdArray) and known.sharding.mpmd_mesh.jax_mesh.is_multi_process
        rows, found = np.asarray(on_every_process(known) if several else known), dict[int, np.ndarray]()
        group = self.group
        for row, number, begin, limit in zip(rows, group.sequences, group.lengths, group.limits, strict=True):
            if number >= 0:
                new = row[begin:limit]
                ends = np.flatnonzero(np.isin(new, end_tokens))
                found[int(number)] = new[: ends[0] + 1].copy() if ends.size else new.copy()
        return found


def run_in_turn(
    runs: Sequence[GroupRun], steps: Mapping[int, Callable[..., Any]], state: Any, most_under_way: int
) -> None:
    """Begin the calls of all groups in turn; wait only for the oldest of more than `most_under_way` calls.

    A group that has ended early is known by a call that began some turns ago.

    Args:
      runs: the groups.
      steps: the compiled step for each number of tokens.
      state: the first argument of the steps.
      most_under_way: how many calls may be unfinished.
    """
    waiting, under_way = deque(runs), deque[tuple[GroupRun, Any]]()
    while waiting:
        run = waiting.popleft()
        if run.is_complete:
            continue
        under_way.append((run, run.advance(steps, state)))
        waiting.append(run)
        if len(under_way) > most_under_way:
            oldest, ended = under_way.popleft()
            if bool(np.asarray(ended)):
                oldest.end()
    jax.block_until_ready([ended for _, ended in under_way])
