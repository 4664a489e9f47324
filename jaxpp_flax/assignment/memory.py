"""The memory of a rank under an assignment: parameters and optimizer state once, activations for each microbatch.

A stage holds a value once, even if several blocks of the stage need it (a tied weight, an activation of two blocks).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from jaxpp_flax.planning.model import update_window
from jaxpp_flax.schedules import Schedule
from jaxpp_flax.schedules.gathers import Fsdp
from jaxpp_flax.schedules.memory import fullest_moments

__all__ = ["Held", "MemoryModel", "live_counts"]

_IN_FLIGHT = ("activations", "kept", "saved")


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes on each device of a rank that runs any of `blocks`.

    Attributes:
      kind: "parameters", "gathered", "optimizer", "streamed", "gradients", "data", "activations", "kept" or "saved".
        Activations count once for each microbatch in flight, until the input gradient, and what is "kept" from there to
        the weight gradient; "saved" are those that a policy saves from recomputation. "streamed" is on the host, and
        counts in windows after the loop.
      nbytes: the number of bytes.
      blocks: the blocks that need these bytes, in increasing order.
    """

    kind: str
    nbytes: float
    blocks: tuple[int, ...]


def live_counts(schedule: Schedule, num_microbatches: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Return, for each rank, the microbatches that each stage (in increasing order) holds at the fullest moments.

    Activations count from their forward to the end of their last backward, as in `Schedule.max_live_microbatches`.
    A moment is left out if each stage holds at least as many microbatches at another moment.

    Example:
      >>> from jaxpp_flax.schedules import Interleaved1F1B, Std1F1B
      >>> live_counts(Std1F1B(3), 8)
      (((3,),), ((2,),), ((1,),))
      >>> live_counts(Interleaved1F1B(4, 2), 4)[0]
      ((3, 2), (4, 1))
    """
    return tuple(
        fullest_moments(schedule.rank_tasks(rank, num_microbatches), schedule.stages_of(rank))
        for rank in range(schedule.num_ranks)
    )


@dataclass(frozen=True, kw_only=True)
class MemoryModel:
    """Bytes of each rank for any assignment.

    Args:
      held: the bytes that blocks need.
      num_blocks: the number of blocks.
      rank_of: the rank of each stage.
      live: from `live_counts`.
      limits: bytes that each device of a rank may hold, for each rank.
      fsdp: how often parameters are gathered; see `MeshOptions`.
      stream_window: bytes of optimizer state on the host that an update fetches at one time.
      left_out: for each rank, bytes besides: those that a compiled step held above its prediction.

    Example:
      >>> held = [Held(kind="parameters", nbytes=10, blocks=(0, 1)), Held(kind="activations", nbytes=1, blocks=(1,))]
      >>> memory = MemoryModel(held=held, num_blocks=2, rank_of=(0, 1), live=(((2,),), ((1,),)), limits=(12.0, 12.0))
      >>> memory.stage_bytes(0, 0, 2), memory.rank_bytes([1, 1])  # the tied weight counts once, or once on each rank
      (12.0, [10.0, 11.0])
    """

    held: Sequence[Held]
    num_blocks: int
    rank_of: tuple[int, ...]
    live: tuple[tuple[tuple[int, ...], ...], ...]
    limits: tuple[float, ...]
    fsdp: Fsdp = "step"
    stream_window: float = math.inf
    left_out: tuple[float, ...] = ()

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages of a rank, in increasing order."""
        return [stage for stage, of in enumerate(self.rank_of) if of == rank]

    def stage_bytes(self, stage: int, start: int, end: int) -> float:
        """Return the bytes of a stage with blocks `start` to `end` (exclusive), at the stage's own fullest moment."""
        return self._fixed(start, end) + max(self._most[stage] * self._active(start, end), self._update_bytes)

    def rank_bytes(self, sizes: Sequence[int]) -> list[float]:
        """Return the bytes of each rank at its fullest moment."""
        held = self.nothing
        start = 0
        for stage, size in enumerate(sizes):
            held = self.with_stage(held, stage, start, start + size)
            start += size
        slices = self.slices
        return [max(held[slices[rank]]) for rank in range(len(self.limits))]

    def excess(self, sizes: Sequence[int]) -> float:
        """Return the bytes by which the worst rank exceeds its limit."""
        return max(b - limit for b, limit in zip(self.rank_bytes(sizes), self.limits, strict=True))

    def values(self, start: int, end: int, kind: str = "activations") -> tuple[float, ...]:
        """Return the bytes of each value of a kind of one microbatch of a stage with blocks `start` to `end`."""
        return tuple(item.nbytes for item in self.held if _is_in(item, kind, start, end))

    def fixed_parts(self, start: int, end: int) -> dict[str, float]:
        """Return the bytes of such a stage that are held for the whole step, by kind."""
        kinds = dict.fromkeys(item.kind for item in self.held if item.kind not in (*_IN_FLIGHT, "gathered", "streamed"))
        return {kind: _needed([h for h in self.held if h.kind == kind], start, end) for kind in kinds}

    def gathered(self, start: int, end: int) -> dict[str, float]:
        """Return the bytes of such a stage's gathered parameters, each under a name of its own."""
        return {str(n): item.nbytes for n, item in enumerate(self.held) if _is_in(item, "gathered", start, end)}

    def streamed(self, start: int, end: int) -> tuple[float, ...]:
        """Return the bytes of optimizer state on the host for each parameter of such a stage."""
        return tuple(item.nbytes for item in self.held if _is_in(item, "streamed", start, end))

    def with_one_in_flight(self) -> MemoryModel:
        """Return the memory if each rank holds the activations of one microbatch of one of its stages at a time.

        No mixture of keep, recompute and offload holds less.
        """
        moments: list[tuple[tuple[int, ...], ...]] = []
        for rank in range(len(self.limits)):
            count = len(self.stages_of(rank))
            moments.append(tuple(tuple(int(i == at) for i in range(count)) for at in range(count)))
        return replace(self, live=tuple(moments))

    # ------------------------------------------------------------ for the search: a vector, one entry for each moment

    @cached_property
    def slices(self) -> list[slice]:
        """The entries of each rank."""
        ends = list(itertools.accumulate(len(moments) for moments in self._moments))
        return [slice(a, b) for a, b in zip([0, *ends], ends, strict=False)]

    @cached_property
    def _moments(self) -> list[tuple[tuple[int, ...], ...]]:
        """The microbatches in flight at each moment of each rank; an update is a moment without microbatches."""
        if not self._update_bytes:
            return list(self.live)
        return [(*moments, (0,) * len(moments[0])) for moments in self.live]

    @cached_property
    def _update_bytes(self) -> float:
        """What an update fetches from the host at one time, at most."""
        return update_window(self.streamed(0, self.num_blocks), self.stream_window)

    @cached_property
    def _position(self) -> list[int]:
        """The position of each stage among the stages of its rank."""
        return [self.rank_of[:stage].count(rank) for stage, rank in enumerate(self.rank_of)]

    @cached_property
    def _most(self) -> list[int]:
        """The maximum number of microbatches in flight of each stage."""
        at = self._position
        return [max(moment[at[stage]] for moment in self.live[rank]) for stage, rank in enumerate(self.rank_of)]

    @cached_property
    def nothing(self) -> tuple[float, ...]:
        """The vector of empty ranks: what was left out, and what the update fetches."""
        left_out = self.left_out or (0.0,) * len(self.limits)
        return tuple(
            more + (0.0 if any(moment) else self._update_bytes)
            for more, moments in zip(left_out, self._moments, strict=True)
            for moment in moments
        )

    def with_stage(self, held: tuple[float, ...], stage: int, start: int, end: int) -> tuple[float, ...]:
        """Return `held` plus the bytes of a stage with blocks `start` to `end`."""
        rank, position = self.rank_of[stage], self._position[stage]
        fixed, active = self._fixed(start, end), self._active(start, end)
        here = self.slices[rank]
        added = [
            h + fixed + moment[position] * active for h, moment in zip(held[here], self._moments[rank], strict=True)
        ]
        return (*held[: here.start], *added, *held[here.stop :])

    def within_limits(self, held: tuple[float, ...]) -> bool:
        """Return True if no rank exceeds its limit at any moment."""
        return all(max(held[here]) <= limit for here, limit in zip(self.slices, self.limits, strict=True))

    def _fixed(self, start: int, end: int) -> float:
        return self._sums[0][start][end - start]

    def _active(self, start: int, end: int) -> float:
        """Return the most that one microbatch holds at any time of its life."""
        return max(sums[start][end - start] for sums in self._sums[1:])

    @cached_property
    def _sums(self) -> tuple[list[list[float]], ...]:
        """For (fixed, activations, kept): the bytes of the n blocks from each start on."""
        fixed = [h for h in self.held if h.kind not in (*_IN_FLIGHT, "streamed")]
        groups = fixed, *([h for h in self.held if h.kind == kind] for kind in ("activations", "kept"))
        return tuple(_range_sums(group, self.num_blocks) for group in groups)


def _is_in(item: Held, kind: str, start: int, end: int) -> bool:
    return item.kind == kind and any(start <= block < end for block in item.blocks)


def _needed(held: Iterable[Held], start: int, end: int) -> float:
    return sum(item.nbytes for item in held if any(start <= block < end for block in item.blocks))


def _range_sums(held: Iterable[Held], count: int) -> list[list[float]]:
    """Return the bytes of the n blocks from `start` on as entry [start][n]; each item counts once."""
    # An item counts at a block if no earlier block of the range needs it.
    appearing: list[list[tuple[int, float]]] = [[] for _ in range(count)]
    for item in held:
        for previous, block in itertools.pairwise((-1, *item.blocks)):
            appearing[block].append((previous, item.nbytes))
    rows: list[list[float]] = []
    for start in range(count):
        row: Any = [0.0]
        for block in range(start, count):
            row.append(row[-1] + sum(nbytes for previous, nbytes in appearing[block] if previous < start))
        rows.append(row)
    return rows
