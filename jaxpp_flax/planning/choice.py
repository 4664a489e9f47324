"""The cheapest mixture of keep, recompute and offload within a memory limit, by the simulated step.

The memory of a rank follows from the order of its tasks and from its own stages. So each rank alone takes the mixture
with the least added work that fits: of all mixtures, of those without recomputation, of those without offload. The
simulated step decides between these candidates. Nothing is random: equal inputs give equal choices.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxpp_flax.error_codes import documented
from jaxpp_flax.messages import amount
from jaxpp_flax.planning.loads import limits_of
from jaxpp_flax.planning.model import Prediction, StepModel
from jaxpp_flax.schedules.errors import ScheduleError
from jaxpp_flax.schedules.residuals import KEEP, ResidualPlan, StageResiduals
from jaxpp_flax.schedules.task import TaskKind

__all__ = [
    "Choice",
    "LimitError",
    "best_mixture",
    "choose_residuals",
    "describe",
    "mixture_within",
    "nothing_fits",
    "why_chosen",
]

_SHARES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
OPTIONS = (
    KEEP,
    *(StageResiduals(offload=share) for share in _SHARES),
    StageResiduals(recompute=True),
    StageResiduals(recompute=True, offload=0.5),
    StageResiduals(recompute=True, offload=1.0),
)
"""The options of a stage, in the order of preference among equals."""

_COARSE = 0.25  # the step of the shares on a rank with several stages, which has many more mixtures

_WINDOWS = (1, 2, 4)
"""Tasks beside which an offload runs after its forward, and a fetch before its backward."""

_TOLERANCE = 1e-9  # relative: sums of the same floats in another order count as equal
_OTHERS = "other arrays"

_CANDIDATES: tuple[Callable[[StageResiduals], bool], ...] = (
    lambda option: True,
    lambda option: not option.recompute,
    lambda option: not option.offload,
)
"""What the stages of a candidate may do."""


@documented("JPF302")
class LimitError(ScheduleError):
    """No mixture of keeping, recomputing and offloading residuals stays within the memory limit.

    Attributes:
      closest: the choice that exceeds the limit by the fewest bytes; None where many layouts were tried.
    """

    def __init__(self, text: str, closest: Choice | None = None) -> None:
        super().__init__(text)
        self.closest: Any = closest


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The chosen residual plan, and the predicted step with it.

    Attributes:
      residuals: what each stage does with its residuals.
      prediction: the predicted step with this residual plan.
      keep: the predicted step if all residuals stay on the devices.
      excess: the bytes by which the fullest rank exceeds its limit; 0 if the choice fits.
    """

    residuals: ResidualPlan
    prediction: Prediction
    keep: Prediction
    excess: float

    @property
    def slowdown(self) -> float:
        """The time of the step divided by the time of a step that keeps all residuals on the devices."""
        return self.prediction.seconds / self.keep.seconds if self.keep.seconds else 1.0


def choose_residuals(model: StepModel, memory_limit: float | Sequence[float] | None = None) -> Choice:
    """Return the fastest mixture of keeping, recomputing and offloading residuals that stays within the limit.

    If there is no limit, or if all residuals fit, every stage keeps its residuals on the devices. Among mixtures with
    equally long steps, the one with the least recomputation is chosen, then the one that moves the fewest bytes. The
    search is not exhaustive.

    Args:
      model: the model of the step.
      memory_limit: the bytes that each device may hold (one number, or one for each rank); None: no limit.

    Raises:
      LimitError: if no mixture fits; it names the closest one, and the bytes of the fullest rank by kind.
      ScheduleError: if `memory_limit` is not a number above 0, or not one such number for each rank.

    Example:
      >>> from jaxpp_flax.schedules import Std1F1B
      >>> from jaxpp_flax.planning.model import Hardware, StageLoad
      >>> load = StageLoad(forward=1.0, backward=2.0, residual_bytes=10.0, input_bytes=1.0)
      >>> model = StepModel(schedule=Std1F1B(4), num_microbatches=8, stages=[load] * 4,
      ...                   hardware=Hardware(flops=1.0, host_bandwidth=10.0))
      >>> choose_residuals(model).prediction.peak_bytes
      (40.0, 30.0, 20.0, 10.0)
      >>> choice = choose_residuals(model, memory_limit=30.0)
      >>> choice.prediction.peak_bytes, choice.slowdown, describe(choice.residuals.of(0))
      ((30.0, 30.0, 20.0, 10.0), 1.0, 'offload 62%')
    """
    choice = best_mixture(model, memory_limit)
    if choice.excess > 0:
        raise nothing_fits(model, choice, limits_of(memory_limit, model.schedule.num_ranks))
    return choice


def best_mixture(model: StepModel, memory_limit: float | Sequence[float] | None = None) -> Choice:
    """Return what `choose_residuals` returns; if nothing fits, return the mixture that exceeds the limit least."""
    return mixture_within(model, limits_of(memory_limit, model.schedule.num_ranks))


def mixture_within(model: StepModel, limits: Sequence[float]) -> Choice:
    """Return what `best_mixture` returns for the limit of each rank; a planner's may be below 0."""
    kept = model.predict(ResidualPlan.keep(model.schedule.num_stages))

    def judged(residuals: ResidualPlan, prediction: Prediction) -> Choice:
        excess = max(map(_over, prediction.peak_bytes, limits))
        return Choice(residuals=residuals, prediction=prediction, keep=kept, excess=excess)

    choice = judged(ResidualPlan.keep(model.schedule.num_stages), kept)
    if choice.excess == 0:
        return choice
    ranks = [_Rank(model, rank, limit) for rank, limit in enumerate(limits)]
    plans = dict.fromkeys(
        _joined(ranks, allowed, window) for window, allowed in itertools.product(_WINDOWS, _CANDIDATES)
    )
    return min((judged(plan, model.predict(plan)) for plan in plans), key=_worth)


def _over(held: float, limit: float) -> float:
    return held - limit if held > limit + _TOLERANCE * abs(limit) else 0.0


def _worth(choice: Choice) -> tuple[float, ...]:
    """Return the bytes above the limit, the seconds, those of recomputation, the bytes moved: less is better."""
    found = choice.prediction
    rounded = (float(f"{value:.9g}") for value in (found.seconds, found.recomputation, found.moved))
    return choice.excess, *rounded


def describe(stage: StageResiduals) -> str:
    """Return a few words that say what a stage does with its residuals.

    Example:
      >>> describe(KEEP), describe(StageResiduals(offload=0.5)), describe(StageResiduals(recompute=True, offload=0.5))
      ('keep', 'offload 50%', 'recompute, offload inputs 50%')
    """
    again = "recompute" if stage.recompute else ""
    moved = f"offload{' inputs' if stage.recompute else ''} {stage.offload:.0%}" if stage.offload else ""
    return ", ".join(part for part in (again, moved) if part) or "keep"


_Mixture = tuple[StageResiduals, ...]  # of the stages of one rank, in increasing order


def why_chosen(choice: Choice) -> str:
    """Return one line that says why this choice was made.

    Example:
      >>> from jaxpp_flax.planning.model import Prediction
      >>> fits = Prediction(seconds=1.0, peak_bytes=(8.0,), host_bytes=(0.0,), moved=0.0, recomputation=0.0)
      >>> why_chosen(Choice(residuals=ResidualPlan([KEEP]), prediction=fits, keep=fits, excess=0.0))
      'all residuals fit within memory_limit: predicted step 1 s'
    """
    seconds = amount(choice.prediction.seconds, "s")
    if choice.residuals.is_kept:
        return f"all residuals fit within memory_limit: predicted step {seconds}"
    most = amount(max(choice.keep.peak_bytes), "B")
    return (
        f"all residuals together would take {most}; the best mixture found of keep, recompute and offload: predicted "
        f"step {seconds}, {choice.slowdown - 1:.1%} longer than with all kept"
    )


class _Rank:
    """The mixtures of one rank, those with the least added work first, and the bytes with each."""

    def __init__(self, model: StepModel, rank: int, limit: float) -> None:
        self.model, self.rank, self.limit = model, rank, limit
        self.stages = [stage for stage, owner in enumerate(model.rank_of) if owner == rank]
        shares = [option for option in OPTIONS if len(self.stages) == 1 or option.offload % _COARSE == 0]
        options = [_options(model, stage, shares) for stage in self.stages]

        def added(mixture: _Mixture) -> float:
            return sum(_added_work(model, *pair) for pair in zip(self.stages, mixture, strict=True))

        self.mixtures = sorted(_first_and_rest(options), key=added)
        self._over: dict[tuple[_Mixture, int], float] = {}

    def over(self, mixture: _Mixture, window: int) -> float:
        """Return the bytes by which the rank exceeds its limit."""
        if (mixture, window) not in self._over:
            stages = [KEEP] * self.model.schedule.num_stages
            for stage, option in zip(self.stages, mixture, strict=True):
                stages[stage] = option
            plan = ResidualPlan(stages, fetch_ahead=window, offload_within=window)
            held = self.model.rank_fixed[self.rank] + self.model.ordered_peak(self.rank, plan)
            self._over[mixture, window] = _over(held, self.limit)
        return self._over[mixture, window]

    def first_that_fits(self, allowed: Callable[[StageResiduals], bool], window: int) -> _Mixture:
        """Return the first allowed mixture that fits, else the first of all; if none fits, that with fewest bytes."""
        wanted = [mixture for mixture in self.mixtures if all(map(allowed, mixture))]
        for mixture in (*wanted, *self.mixtures):
            if not self.over(mixture, window):
                return mixture
        return min(self.mixtures, key=lambda mixture: self.over(mixture, window))


def _joined(ranks: Sequence[_Rank], allowed: Callable[[StageResiduals], bool], window: int) -> ResidualPlan:
    """Return the plan in which each rank takes its first mixture that fits."""
    stages: dict[int, StageResiduals] = {}
    for rank in ranks:
        stages.update(zip(rank.stages, rank.first_that_fits(allowed, window), strict=True))
    return ResidualPlan([stages[stage] for stage in sorted(stages)], fetch_ahead=window, offload_within=window)


def _options(model: StepModel, stage: int, options: Sequence[StageResiduals]) -> Sequence[StageResiduals]:
    """Return the options that differ for a stage: shares that move the same microbatches are one option."""
    tasks, load = model.tasks[model.rank_of[stage]], model.stages[stage]
    if any(task.kind is TaskKind.FUSED and task.stage == stage for task in tasks) or not load.residual_bytes:
        return (KEEP,)
    found: dict[tuple[object, ...], StageResiduals] = {}
    for option in options:
        moves_nothing = option.offload and not load.kept_bytes(option)
        # An operation with side effects may not run twice, and policies save values.
        saves_nothing = option.recompute and (load.has_effects or 0 < load.saved_bytes >= load.residual_bytes)
        if not moves_nothing and not saves_nothing:
            moved = tuple(m for m in range(model.num_microbatches) if option.offloads(m))
            found.setdefault((option.recompute, moved), option)
    return tuple(found.values())


def _first_and_rest(options: Sequence[Sequence[StageResiduals]]) -> list[_Mixture]:
    """Return mixtures in which a rank's first stages do one thing, and its other stages another."""
    known = list(dict.fromkeys(option for of in options for option in of))
    found: dict[_Mixture, None] = {}
    for one, other in itertools.product(known, repeat=2):
        for cut in range(len(options) + 1):
            wanted = [one] * cut + [other] * (len(options) - cut)
            found[tuple(w if w in of else of[0] for w, of in zip(wanted, options, strict=True))] = None
    return list(found)


def _added_work(model: StepModel, stage: int, option: StageResiduals) -> float:
    """Estimate the seconds that an option adds to each microbatch: a guess for the order of the search."""
    load = model.stages[stage]
    moved = option.offload * model.hardware.host_link.time(load.kept_bytes(option)) if option.offload else 0.0
    # The tasks hide a copy up to their own time; of two hidden ones, the shorter is better.
    exposed = max(moved - load.forward - load.backward, 0.0)
    return load.seconds_again(option) + exposed + 1e-3 * moved


def nothing_fits(
    model: StepModel, choice: Choice, limits: Sequence[float], held: Sequence[float] | None = None
) -> LimitError:
    """Return the error: it names the rank furthest above its limit, its contents, and possible changes.

    `held` are the bytes of the ranks, where more is known than the model's prediction.
    """
    peaks = choice.prediction.peak_bytes if held is None else held
    rank = max(range(len(peaks)), key=lambda r: peaks[r] - limits[r])
    stages = [stage for stage, of in enumerate(model.rank_of) if of == rank]
    does = ", ".join(f"stage {stage}: {describe(choice.residuals.of(stage))}" for stage in stages)
    kinds = model.bytes_by_kind(rank, choice.residuals)
    kinds[_OTHERS] = peaks[rank] - choice.prediction.peak_bytes[rank]
    parts = ", ".join(f"{kind} {amount(n, 'B')}" for kind, n in kinds.items() if n > 0)
    return LimitError(
        f"no mixture of keep, recompute and offload keeps within memory_limit: in the closest plan found, rank {rank} "
        f"holds {peaks[rank]:,.0f} bytes on each device, but may hold {limits[rank]:,.0f} ({does}; {parts}). Use more "
        "stages or devices, a schedule with fewer microbatches in flight, smaller microbatches, or a higher limit.",
        replace(choice, excess=peaks[rank] - limits[rank]),
    )
