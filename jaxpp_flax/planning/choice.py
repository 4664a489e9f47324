"""The cheapest mixture of keep, recompute and offload within a memory limit, by the simulated step.

The memory of a rank follows from the order of its tasks and from its own stages, so each rank alone finds its mixtures
that fit. A greedy plan takes the mixture with the least added work on each rank, and a local search then changes one
stage at a time. Nothing is random: equal inputs give equal choices.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxpp_flax.error_codes import documented
from jaxpp_flax.messages import amount
from jaxpp_flax.planning.loads import limits_of
from jaxpp_flax.planning.model import BESIDE, Prediction, StepModel
from jaxpp_flax.schedules.errors import ScheduleError
from jaxpp_flax.schedules.residuals import KEEP, ResidualPlan, StageResiduals
from jaxpp_flax.schedules.task import TaskKind

__all__ = ["Choice", "LimitError", "best_mixture", "choose_residuals", "describe", "nothing_fits", "why_chosen"]

_SHARES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
OPTIONS = (
    KEEP,
    *(StageResiduals(offload=share) for share in _SHARES),
    StageResiduals(recompute=True),
    StageResiduals(recompute=True, offload=0.5),
    StageResiduals(recompute=True, offload=1.0),
)
"""The options of a stage, in the order of preference among equals."""

_WINDOWS = (1, 2, 4)
"""Tasks beside which an offload runs after its forward, and a fetch before its backward."""

_MOST_TASKS = 200_000  # that all simulations of one choice run together: a few seconds
_MOST_WALKED = (
    30_000  # tasks that the mixtures of one rank walk together to find those that fit; beyond, in coarser shares
)
_TOLERANCE = 1e-9  # relative: sums of the same floats in another order count as equal

_Worth = tuple[float, ...]


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
    limits = limits_of(memory_limit, model.schedule.num_ranks)
    search = _Search(model, limits)
    keep = ResidualPlan.keep(model.schedule.num_stages)
    if search.excess(keep) == 0:
        return search.choice(keep)
    fitting = search.all_fitting()
    if not fitting:
        leanest = (search.joined([search.leanest(r, w) for r in range(len(search.limits))], w) for w in _WINDOWS)
        return search.choice(min(leanest, key=search.excess))
    starts = [plan for window, ranks in fitting.items() for plan in _greedy(search, ranks, window)]
    return search.choice(_climb(search, search.best(starts), fitting))


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


class _Search:
    """Judges plans: their memory without a simulation, their time with one, each once."""

    def __init__(self, model: StepModel, limits: Sequence[float]) -> None:
        self.model, self.limits = model, limits
        self.left = max(_MOST_TASKS // sum(map(len, model.tasks)), 16)  # simulations
        ranks, num_stages = range(model.schedule.num_ranks), model.schedule.num_stages
        self.stages = [[s for s in range(num_stages) if model.rank_of[s] == rank] for rank in ranks]
        self._mixtures = [self._all_mixtures(rank) for rank in ranks]
        self._peaks: dict[tuple[int, _Mixture, int], float] = {}
        self._found: dict[ResidualPlan, tuple[_Worth, Prediction]] = {}

    def joined(self, mixtures: Sequence[_Mixture], window: int) -> ResidualPlan:
        """Return the plan of the mixtures of all ranks."""
        stages = [KEEP] * self.model.schedule.num_stages
        for here, mixture in zip(self.stages, mixtures, strict=True):
            for stage, option in zip(here, mixture, strict=True):
                stages[stage] = option
        return ResidualPlan(stages, fetch_ahead=window, offload_within=window)

    def mixture(self, plan: ResidualPlan, rank: int) -> _Mixture:
        return tuple(plan.of(stage) for stage in self.stages[rank])

    # ------------------------------------------------------------ memory

    def over(self, rank: int, mixture: _Mixture, window: int) -> float:
        """Return the bytes by which a rank exceeds its limit."""
        key = rank, mixture, window
        if key not in self._peaks:
            alone = [(KEEP,) * len(here) for here in self.stages]
            alone[rank] = mixture
            self._peaks[key] = self.model.ordered_peak(rank, self.joined(alone, window))
        held = self.model.rank_fixed[rank] + self._peaks[key]
        return held - self.limits[rank] if held > self.limits[rank] * (1 + _TOLERANCE) else 0.0

    def excess(self, plan: ResidualPlan) -> float:
        """Return the bytes above the limits of all ranks."""
        return sum(self.over(r, self.mixture(plan, r), plan.fetch_ahead) for r in range(len(self.limits)))

    def fitting(self, window: int) -> list[list[_Mixture]]:
        """Return each rank's mixtures that fit, those with the least added work first."""
        return [[m for m in mixtures if not self.over(rank, m, window)] for rank, mixtures in enumerate(self._mixtures)]

    def all_fitting(self) -> dict[int, list[list[_Mixture]]]:
        """Return the mixtures that fit by window, for windows in which every rank has some."""
        found = {window: self.fitting(window) for window in _WINDOWS}
        return {window: ranks for window, ranks in found.items() if all(ranks)}

    def leanest(self, rank: int, window: int) -> _Mixture:
        """Return the rank's mixture that holds the fewest bytes."""
        return min(self._mixtures[rank], key=lambda mixture: self.over(rank, mixture, window))

    def _all_mixtures(self, rank: int) -> list[_Mixture]:
        options = [_options(self.model, stage) for stage in self.stages[rank]]
        mixtures = _first_and_rest(options)
        for part in (0.25, 0.5):
            if len(mixtures) > _MOST_WALKED // len(self.model.tasks[rank]):
                mixtures = _first_and_rest([[option for option in of if option.offload % part == 0] for of in options])
        here = self.stages[rank]
        return sorted(mixtures, key=lambda m: sum(_added_work(self.model, *pair) for pair in zip(here, m, strict=True)))

    # ------------------------------------------------------------ time

    def worth(self, plan: ResidualPlan) -> _Worth:
        """Return the seconds of a step, those of recomputation, the bytes moved: less is better, in this order."""
        if plan not in self._found:
            self.left -= 1
            found = self.model.predict(plan)
            self._found[plan] = (found.seconds, found.recomputation, found.moved), found
        return self._found[plan][0]

    def best(self, plans: Iterable[ResidualPlan]) -> ResidualPlan:
        """Return the best plan; the first one among equals."""
        plans = iter(plans)
        best = next(plans)
        for plan in plans:
            if _less(self.worth(plan), self.worth(best)):
                best = plan
        return best

    def choice(self, plan: ResidualPlan) -> Choice:
        """Return the result of the search."""
        keep = ResidualPlan.keep(len(plan.stages))
        for needed in (plan, keep):
            self.worth(needed)
        return Choice(
            residuals=plan,
            prediction=self._found[plan][1],
            keep=self._found[keep][1],
            excess=max(self.over(r, self.mixture(plan, r), plan.fetch_ahead) for r in range(len(self.limits))),
        )


def _less(one: _Worth, other: _Worth) -> bool:
    for a, b in zip(one, other, strict=True):
        if abs(a - b) > _TOLERANCE * max(abs(a), abs(b)):
            return a < b
    return False


def _options(model: StepModel, stage: int) -> Sequence[StageResiduals]:
    """Return the options that differ for a stage: shares that move the same microbatches are one option."""
    tasks, load = model.tasks[model.rank_of[stage]], model.stages[stage]
    if any(task.kind is TaskKind.FUSED and task.stage == stage for task in tasks) or not load.residual_bytes:
        return (KEEP,)
    found: dict[tuple[object, ...], StageResiduals] = {}
    for option in OPTIONS:
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


def _greedy(search: _Search, ranks: Sequence[Sequence[_Mixture]], window: int) -> Iterator[ResidualPlan]:
    """Yield plans with the least added work on each rank: of any mixtures, without recomputation, without offload."""
    allowed: tuple[Callable[[StageResiduals], bool], ...] = (
        lambda option: True,
        lambda option: not option.recompute,
        lambda option: not option.offload,
    )
    for is_allowed in allowed:
        yield search.joined([next((m for m in of if all(map(is_allowed, m))), of[0]) for of in ranks], window)


def _climb(search: _Search, plan: ResidualPlan, fitting: Mapping[int, Sequence[Sequence[_Mixture]]]) -> ResidualPlan:
    """Change one rank at a time while that helps and simulations are left."""
    ranks, in_vain = fitting.get(plan.fetch_ahead, ()), 0
    for rank in itertools.cycle(range(len(ranks))):
        in_vain += 1
        now = search.mixture(plan, rank)
        near = [m for m in ranks[rank] if sum(a != b for a, b in zip(m, now, strict=True)) == 1]
        for mixture in near:
            if search.left <= 0:
                return plan
            mixtures = [search.mixture(plan, r) for r in range(len(ranks))]
            mixtures[rank] = mixture
            moved = search.joined(mixtures, plan.fetch_ahead)
            if _less(search.worth(moved), search.worth(plan)):
                plan, in_vain = moved, 0
                break
        if in_vain == len(ranks):
            return plan
    return plan


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
    kinds[BESIDE] = kinds.get(BESIDE, 0.0) + peaks[rank] - choice.prediction.peak_bytes[rank]
    parts = ", ".join(f"{kind} {amount(n, 'B')}" for kind, n in kinds.items() if n > 0)
    return LimitError(
        f"no mixture of keep, recompute and offload keeps within memory_limit: in the closest plan found, rank {rank} "
        f"holds {peaks[rank]:,.0f} bytes on each device, but may hold {limits[rank]:,.0f} ({does}; {parts}). Use more "
        "stages or devices, a schedule with fewer microbatches in flight, smaller microbatches, or a higher limit.",
        replace(choice, excess=peaks[rank] - limits[rank]),
    )
