"""Search for stages within the memory of their ranks, if ranks have several stages and little free memory.

`balancing` uses this search if the local search finds nothing: if almost no assignment fits, single moves do not lead
from one fitting assignment to the next. This search is a dynamic program over the stages. For each number of blocks
dealt so far, it keeps the states of the ranks (bytes at their fullest moments) that no other state dominates.

Source: label setting with dominance, as in multi-objective shortest paths (Martins, 1984).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from jaxpp_flax.assignment.memory import MemoryModel

__all__ = ["sizes_within_limits"]

_KEPT_LABELS = 256  # for each number of stages and blocks
_MAX_LABELS = 400_000  # in all: a few seconds


@dataclass(frozen=True, slots=True)
class _Label:
    """One way to fill the first stages.

    Attributes:
      held: bytes of the ranks that have stages to come, at each of their fullest moments.
      end: the number of blocks in these stages.
      before: the label without the last of these stages; None for no stage.
    """

    held: tuple[float, ...]
    end: int
    before: _Label | None


def sizes_within_limits(memory: MemoryModel) -> tuple[int, ...] | None:
    """Sizes of contiguous, non-empty stages within the limits; None if none is found.

    None is certain where the states stay few, as they do for some tens of blocks.

    Example:
      >>> from jaxpp_flax.assignment.memory import Held
      >>> held = [Held(kind="parameters", nbytes=4, blocks=(block,)) for block in range(4)]
      >>> memory = MemoryModel(held=held, num_blocks=4, rank_of=(0, 1), live=(((2,),), ((1,),)), limits=(4.0, 12.0))
      >>> sizes_within_limits(memory)
      (1, 3)
    """
    count, num_stages, made = memory.num_blocks, len(memory.rank_of), 0
    states: dict[int, list[_Label]] = {0: [_Label(memory.nothing, 0, None)]}
    for stage, rank in enumerate(memory.rank_of):
        left, here = num_stages - stage - 1, memory.slices[rank]
        is_last = rank not in memory.rank_of[stage + 1 :]
        grown: dict[int, list[_Label]] = {}
        for start, label in ((start, label) for start, labels in states.items() for label in labels):
            for end in range(start + 1, count - left + 1) if left else [count]:
                held = memory.with_stage(label.held, stage, start, end)
                if not memory.within_limits(held) or made > _MAX_LABELS:
                    break  # longer stages hold no less
                if is_last:  # how full it is does not matter any more
                    held = (*held[: here.start], *memory.nothing[here], *held[here.stop :])
                grown.setdefault(end, []).append(_Label(held, end, label))
                made += 1
        states = {end: _undominated(labels) for end, labels in grown.items()}
    label = next(iter(states.get(count, [])), None)
    ends: list[int] = []
    while label is not None:
        ends.append(label.end)
        label = label.before
    return tuple(b - a for a, b in itertools.pairwise(ends[::-1])) if ends else None


def _undominated(labels: list[_Label]) -> list[_Label]:
    """Return the labels that no other label dominates with as little or less on every rank at every moment."""
    # Those that leave most room on the fullest rank first, should they be too many to keep.
    labels.sort(key=lambda label: (max(label.held), sum(label.held)))
    rows = np.array([label.held for label in labels])
    kept: list[int] = []
    for i in range(len(labels)):
        if len(kept) == _KEPT_LABELS:
            break
        if not kept or not (rows[kept] <= rows[i]).all(axis=1).any():
            kept.append(i)
    return [labels[i] for i in kept]
