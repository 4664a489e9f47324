"""An assignment and the residuals of its stages, found together under a memory limit.

A block may move to another rank, or a stage may recompute or offload its residuals: the simulated step decides. The
candidates are the best assignments that keep all residuals within the limit, that know no limit, and that fit if each
rank holds the residuals of one microbatch at a time. Each gets its cheapest mixture, and the shortest step wins.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from jaxpp_flax.assignment.balancing import Balance, balance, leanest, rank_loads
from jaxpp_flax.assignment.memory import MemoryModel
from jaxpp_flax.assignment.policies import AssignmentError
from jaxpp_flax.assignment.simulated_step import StepTime, both_passes
from jaxpp_flax.messages import amount
from jaxpp_flax.planning import Choice, Hardware, StageLoad, StepModel, best_mixture, describe

__all__ = ["LimitedPlan", "LimitedStep", "balance_within", "too_large"]

_LESS = 1e-9  # relative: a step that is shorter by less counts as equal


@dataclass(frozen=True, kw_only=True)
class LimitedStep:
    """A step whose ranks have memory limits, for any assignment of its blocks.

    Args:
      time: the schedule and the cost of each block; the costs are in any unit.
      seconds: the seconds of one unit of cost.
      memory: the bytes that blocks need, and the limits.
      sent: bytes on each device that cross a cut before each block (the first is not used).
      hardware: the devices and their links.
      passing: those of them that the block before the cut does not keep; None: it keeps all.
      with_effects: the blocks that may not run twice.

    Example:
      >>> from jaxpp_flax.assignment.memory import Held, live_counts
      >>> from jaxpp_flax.schedules import Std1F1B
      >>> time = StepTime(schedule=Std1F1B(2), num_microbatches=4, forward=[1, 1, 1], backward=[2, 2, 2])
      >>> held = [Held(kind="activations", nbytes=10.0, blocks=(block,)) for block in range(3)]
      >>> memory = MemoryModel(
      ...     held=held, num_blocks=3, rank_of=(0, 1), live=live_counts(time.schedule, 4), limits=(30.0, 30.0))
      >>> step = LimitedStep(time=time, seconds=1.0, memory=memory, sent=[0.0, 1.0, 1.0],
      ...                    hardware=Hardware(flops=1.0, host_bandwidth=10.0))
      >>> step.model([2, 1]).stages[0].residual_bytes, step.choose([2, 1]).prediction.peak_bytes
      (20.0, (21.0, 11.0))
    """

    time: StepTime
    seconds: float
    memory: MemoryModel
    sent: Sequence[float]
    hardware: Hardware
    passing: Sequence[float] | None = None
    with_effects: Collection[int] = ()

    def model(self, sizes: Sequence[int]) -> StepModel:
        """Return the model of the step for the sizes of its stages."""
        forward, backward = both_passes(self.time.forward, self.time.backward)
        stages: list[StageLoad] = []
        left_out = dict(enumerate(self.memory.left_out))
        for rank, size, end in zip(self.memory.rank_of, sizes, itertools.accumulate(sizes), strict=True):
            start = end - size
            stages.append(
                StageLoad(
                    forward=sum(forward[start:end]) * self.seconds,
                    backward=sum(backward[start:end]) * self.seconds,
                    residual_bytes=sum(self.memory.values(start, end)),
                    weight_bytes=sum(self.memory.values(start, end, "kept")),
                    values=self.memory.values(start, end),
                    saved_bytes=sum(self.memory.values(start, end, "saved")),
                    has_effects=any(start <= block < end for block in self.with_effects),
                    input_bytes=self.sent[start] if start else 0.0,
                    sent_bytes=self.sent[end] if end < len(self.sent) else 0.0,
                    passing_bytes=self.passing[end] if self.passing and end < len(self.sent) else 0.0,
                    # The first stage of a rank has what the rank holds besides.
                    fixed_bytes={**self.memory.fixed_parts(start, end), "other arrays": left_out.pop(rank, 0.0)},
                    gathered=self.memory.gathered(start, end),
                    streamed=self.memory.streamed(start, end),
                )
            )
        return StepModel(
            schedule=self.time.schedule,
            num_microbatches=self.time.num_microbatches,
            stages=stages,
            hardware=self.hardware,
            fsdp=self.memory.fsdp,
            stream_window=self.memory.stream_window,
        )

    def choose(self, sizes: Sequence[int]) -> Choice:
        """Return the cheapest mixture of keep, recompute and offload for these sizes; see `best_mixture`."""
        return best_mixture(self.model(sizes), self.memory.limits)


@dataclass(frozen=True, kw_only=True)
class LimitedPlan:
    """The stages of one schedule under a memory limit, and what they do with their residuals.

    Attributes:
      model: the step with these stages.
      choice: the residuals that fit.
      limits: the bytes that each rank's devices may hold.
    """

    model: StepModel
    choice: Choice
    limits: tuple[float, ...]

    @property
    def room(self) -> tuple[float, ...]:
        """The bytes of each rank that are left for residuals."""
        return tuple(limit - fixed for limit, fixed in zip(self.limits, self.model.rank_fixed, strict=True))


def balance_within(step: LimitedStep, even: Sequence[int]) -> tuple[Balance, Choice]:
    """Return the assignment and the residuals with the shortest step within the limits.

    If nothing was found that fits, the choice has an `excess` above 0 and is the closest one; `exact` then tells
    whether nothing can fit.

    Args:
      step: the step.
      even: the sizes of an even assignment; see `balance`.
    """
    time, memory = step.time, step.memory
    costs = [f + b for f, b in zip(time.forward, time.backward, strict=True)]
    ranks = memory.rank_of
    kept = balance(costs, ranks, memory, step.sent, even, time)
    free = balance(costs, ranks, None, step.sent, even, time)
    if kept is not None and (free is None or kept.sizes == free.sizes):
        choice = step.choose(kept.sizes)
        if choice.residuals.is_kept:  # arrays between stages may leave too little room
            return kept, choice
    lean = memory.with_one_in_flight()
    leaner = balance(costs, ranks, lean, step.sent, even, time)
    candidates = [kept, free, leaner]
    nothing_fits = kept is None and leaner is None and len(set(ranks)) == len(ranks)  # then the search is exact
    if kept is None and leaner is None:
        sizes = leanest(len(costs), len(ranks), lean)
        candidates.append(Balance(sizes=sizes, slowest=max(rank_loads(costs, sizes, ranks)), exact=False))
    tried = {found.sizes: found for found in reversed(candidates) if found is not None}
    best: tuple[Balance, Choice] | None = None
    for found in reversed(tried.values()):
        choice = step.choose(found.sizes)
        if best is None or _is_better(choice, best[1]):
            best = found, choice
    if best is None:
        raise ValueError(f"no assignment of {len(costs)} blocks to {len(ranks)} stages was tried.")
    exact = nothing_fits if best[1].excess else best[0].exact
    return replace(best[0], exact=exact), best[1]


def _is_better(one: Choice, other: Choice) -> bool:
    if one.excess or other.excess:
        return one.excess < other.excess
    return one.prediction.seconds < other.prediction.seconds * (1 - _LESS)


def too_large(
    names: Sequence[str], sizes: Sequence[int], step: LimitedStep, choice: Choice, exact: bool | None
) -> AssignmentError:
    """Return the error: it names the rank furthest above its limit, its contents, and possible changes.

    `names` are those of the blocks. `exact` is None if the assignment was given, and False if the search has not tried
    all assignments.
    """
    held, memory = choice.prediction.peak_bytes, step.memory
    rank = max(range(len(held)), key=lambda r: held[r] - memory.limits[r])
    ends = list(itertools.accumulate(sizes))
    stages = ", ".join(
        f"stage {s}: {_span(names[ends[s] - sizes[s] : ends[s]])}, {describe(choice.residuals.of(s))}"
        for s in memory.stages_of(rank)
    )
    kinds = step.model(sizes).bytes_by_kind(rank, choice.residuals)
    parts = ", ".join(f"{kind} {amount(n, 'B')}" for kind, n in kinds.items() if n)
    if exact is None:
        text = "the assignment does not keep within memory_limit"
    else:
        keeps = "keeps" if exact else "was found that keeps"
        text = f"no assignment of {len(names)} blocks to {len(sizes)} stages {keeps} within memory_limit"
    changes = "more stages or devices, a schedule with fewer microbatches in flight, smaller microbatches"
    return AssignmentError(
        f"{text}, whatever its stages keep, recompute or offload: in the closest plan found, rank {rank} holds "
        f"{held[rank]:,.0f} bytes on each device, but may hold {memory.limits[rank]:,.0f} ({stages}; {parts}). Use "
        f"{changes}, or a higher limit.",
        choice.excess,
    )


def _span(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
