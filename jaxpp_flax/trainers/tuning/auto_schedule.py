"""`schedule="auto"`: measure tasks for a few steps, search a schedule, continue with it, and report its gain."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Protocol, TypeVar

from jaxpp_flax.assignment import AssignmentError
from jaxpp_flax.counts import is_whole
from jaxpp_flax.planning import Choice, Found, search
from jaxpp_flax.schedules import Costs, Schedule, ScheduleError, Transfer, by_name, names, simulate
from jaxpp_flax.trainers.data.batch import signature
from jaxpp_flax.trainers.tuning.limited_schedules import Candidate, LimitedSchedules, PlanWith, with_modelled_bytes
from jaxpp_flax.trainers.tuning.step_profile import StepProfile, task_costs

_R = TypeVar("_R")

# Schedules with split backwards that run to measure their tasks, by stages on a rank.
_SPLIT = {1: "zero_bubble", 2: "zbv"}


@dataclass(frozen=True, kw_only=True)
class AutoSchedule:
    """The options of `schedule="auto"`; `PipelineTrainer(schedule=AutoSchedule(...))` changes them.

    The first steps are ordinary training steps, and their times are measured. They run 1F1B, and a schedule that splits
    the backward, so that input and weight gradients are timed apart. Then the same two schedules run with more stages
    on each rank, if the model has marks for them. Each schedule is compiled. Then `jaxpp_flax.planning.search` looks
    for the best schedule, and the training continues with it. The results of the training do not depend on the choice.

    With the `memory_limit=` of an assignment, the candidates are the named schedules and those that the search finds.
    Each gets its cheapest mixture of keep, recompute and offload; those that no mixture lets fit are left out.

    Args:
      steps: measured steps for each schedule, after one that is not counted; the medians over these steps are used.
      stages_per_rank: the numbers of stages on each rank to try. A number that the model, its marks or the assignment
        do not allow is left out.
      split_backward: True if input and weight gradients may run apart.
      minimum_gain: keep the first schedule unless the predicted step is shorter by this share.
      memory_limit: bytes of activations that a rank may hold (one number, or one for each rank).
      transfer: the links between ranks, in seconds and bytes, as `jaxpp_flax.schedules.simulate` takes them; free
        if None.
      evaluations: schedules that the search tries.
      seed: the seed of the search; equal measurements give equal schedules.
    """

    steps: int = 3
    stages_per_rank: Sequence[int] = (1, 2)
    split_backward: bool = True
    minimum_gain: float = 0.02
    memory_limit: float | Sequence[float] | None = None
    transfer: Transfer | float | None = None
    evaluations: int = 2000
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in (("steps", self.steps), *(("stages_per_rank", of) for of in self.stages_per_rank)):
            if not is_whole(value) or value < 1:
                raise ValueError(f"AutoSchedule: {name} has {value!r}; it must be a whole number of at least 1.")
        if not 0.0 <= self.minimum_gain < 1.0:
            raise ValueError(f"AutoSchedule: minimum_gain={self.minimum_gain!r} is a share of a step: 0 to 1, less 1.")

    def first(self, num_stages: int, num_ranks: int) -> str:
        """Return the name of the schedule that training begins with."""
        return "1f1b" if num_stages // num_ranks == 1 else "interleaved_1f1b"

    def trials(self, num_stages: int, num_ranks: int) -> list[tuple[int, str]]:
        """List the schedules to measure, as (number of stages, name), the first schedule first."""
        base = num_stages // num_ranks
        trials: list[tuple[int, str]] = []
        for per_rank in dict.fromkeys((base, *sorted(self.stages_per_rank))):
            trials.append((per_rank * num_ranks, self.first(per_rank * num_ranks, num_ranks)))
            if self.split_backward and per_rank in _SPLIT and num_ranks > 1:
                trials.append((per_rank * num_ranks, _SPLIT[per_rank]))
        return trials


@dataclass(frozen=True, kw_only=True)
class ScheduleReport:
    """The result of `schedule="auto"`. Times are seconds of a step, without the work before and after the pipeline."""

    first: Schedule  # the training began with this one
    chosen: Schedule  # the training continues with this one
    origin: str  # of the chosen schedule: the name of a schedule, or the action of the search
    costs: Costs = field(repr=False)  # measured times of the tasks of the chosen schedule's stages
    found: Mapping[int, Found] = field(repr=False)  # the result of the search, for each measured number of stages
    predicted: tuple[float, float]  # of the first schedule and of the best one found, from measured times of tasks
    measured: tuple[float, float | None]  # of the first schedule and, once it ran, of the best one found
    skipped: Mapping[int, str] = field(default_factory=dict)  # numbers of stages left out, each with the reason
    candidates: tuple[Candidate, ...] = field(default=(), repr=False)  # under `memory_limit=`: those that fit
    refused: Mapping[Schedule, str] = field(default_factory=dict, repr=False)  # and those that do not, with the reason

    @property
    def choice(self) -> Choice | None:
        """What the chosen schedule's stages do with their residuals; None without a `memory_limit=`."""
        return next((of.choice for of in self.candidates if of.schedule == self.chosen), None)

    @property
    def predicted_gain(self) -> float:
        """The predicted share of the first schedule's step that the best schedule found saves."""
        return 1.0 - self.predicted[1] / self.predicted[0]

    @property
    def measured_gain(self) -> float | None:
        """The measured share; None if the first schedule was kept without a trial."""
        return None if self.measured[1] is None else 1.0 - self.measured[1] / self.measured[0]

    def __str__(self) -> str:
        first, best = (1e3 * seconds for seconds in self.predicted)
        text = (
            f"schedule: {self.chosen!r} ({self.origin}); predicted {first:.3g} ms a step for the first one, "
            f"{best:.3g} ms for the best found: {self.predicted_gain:.1%} gained"
        )
        chosen = next((of for of in self.candidates if of.schedule == self.chosen), None)
        if chosen is not None:
            count = len(self.candidates)
            text += (
                f"; {count} of {count + len(self.refused)} schedules fit within memory_limit; {chosen.residuals_text}"
            )
        if self.measured[1] is None or self.measured_gain is None:
            return text
        first, best = 1e3 * self.measured[0], 1e3 * self.measured[1]
        return f"{text}; measured {first:.3g} and {best:.3g} ms: {self.measured_gain:.1%} gained"


class Tunable(Protocol):
    """The attributes of a trainer that the tuner uses."""

    @property
    def num_microbatches(self) -> int: ...
    @property
    def schedule(self) -> Schedule | None: ...
    def use_schedule(self, schedule: Any, num_stages: int | None = None) -> None: ...
    def compile(self, batch: Any, *, global_batch_size: int | None = None) -> Any: ...
    def profile_step(self, batch: Any, *, global_batch_size: int | None = None) -> StepProfile: ...
    def message(self, text: str) -> None: ...


class ScheduleTuner:
    """Runs the first steps of a training in place of `train_step`, until `done`; the trainer begins with `first`."""

    def __init__(self, options: AutoSchedule, first: Schedule) -> None:
        self.options, self.first = options, first
        self.report: ScheduleReport | None = None
        self.done = self._begun = False
        self._trials = options.trials(first.num_stages, first.num_ranks)
        self._profiles: dict[tuple[int, str], list[StepProfile]] = {}
        self._limited = LimitedSchedules(None)
        self._skipped: dict[int, str] = {}
        self._shapes: Any = None
        self._size: dict[str, int] = {}
        self._warm = False
        self._final: list[StepProfile] = []

    def begin(self, trainer: Tunable, run: Callable[[], _R]) -> _R:
        """Return `run()`, which compiles; while nothing has run, leave schedules that exceed the memory limit.

        Raises:
          AssignmentError: if none of the schedules to measure fits within the memory limit; it has the closest plan.
        """
        refused: list[tuple[AssignmentError, Schedule | None]] = []
        while not self._begun:
            try:
                result = run()
            except AssignmentError as error:
                if not error.excess and not refused:
                    raise
                refused += [(error, trainer.schedule)] if error.excess else []
                self._trials.pop(0)
                if not self._trials:
                    raise _nothing_fits(refused) from error
                trainer.use_schedule(self._trials[0][1], self._trials[0][0])
            else:
                self._begun, self.first = True, trainer.schedule or self.first
                return result
        return run()

    def step(
        self,
        trainer: Tunable,
        batch: Any,
        global_batch_size: int | None = None,
        plan_with: PlanWith | None = None,
    ) -> dict[str, Any]:
        """Run one training step; change to the next schedule when the current one has been measured.

        All processes get equal times, so all choose the same schedule. `plan_with` plans a schedule under the memory
        limit; it may depend on the batch of the step before.
        """
        self._size = {} if global_batch_size is None else {"global_batch_size": global_batch_size}
        profile = self.begin(trainer, lambda: trainer.profile_step(batch, **self._size))
        self._shapes = self._shapes or signature(batch)
        if signature(batch) != self._shapes:  # a batch of another size has other times
            return profile.metrics
        if not self._warm:  # the first run of an executable takes longer
            self._warm = True
            return profile.metrics
        if self.report is not None:
            self._final.append(profile)
            if len(self._final) == self.options.steps:
                self._finish(trainer, self.report)
            return profile.metrics
        measured = self._profiles.setdefault(self._trials[0], [])
        measured.append(profile)
        if len(measured) == self.options.steps:
            self._next(trainer, batch, plan_with)
        return profile.metrics

    def _next(self, trainer: Tunable, batch: Any, plan_with: PlanWith | None) -> None:
        self._trials.pop(0)
        self._warm = False
        while self._trials:
            num_stages, name = self._trials[0]
            try:
                trainer.use_schedule(name, num_stages)
                trainer.compile(batch, **self._size)
                return
            except AssignmentError as error:  # not enough marks, another number of stages, or the memory limit
                if error.excess:
                    self._trials.pop(0)
                else:
                    self._skipped[num_stages] = str(error)
                    self._trials = [trial for trial in self._trials if trial[0] != num_stages]
        self._limited = LimitedSchedules(plan_with)
        self._decide(trainer, batch)

    def _decide(self, trainer: Tunable, batch: Any) -> None:
        costs = {stages: self._costs(stages) for stages in {stages: None for stages, _ in self._profiles}}
        found = self._search(costs, trainer.num_microbatches)
        while not self._choose(trainer, batch, costs, found):
            pass  # one schedule fewer to choose from

    def _choose(self, trainer: Tunable, batch: Any, costs: Mapping[int, Costs], found: Mapping[int, Found]) -> bool:
        """Change to the best schedule; return False, and refuse it, if its compiled step holds more than its plan."""
        options, first, count = self.options, self.first, trainer.num_microbatches
        is_limited = self._limited.plan(first) is not None
        if is_limited:
            candidates = self._limited_candidates(costs, found, count)
            now = next(of.seconds for of in candidates if of.schedule == first)
            fits = True
        else:
            candidates = [_as_named(of, stages, first.num_ranks) for stages, of in found.items()]
            step = simulate(first, costs[first.num_stages], options.transfer, num_microbatches=count)
            now, fits = step.makespan, _fits(step.peak_memory, options.memory_limit)
        best = min(candidates, key=lambda of: of.seconds)
        keep = fits and best.seconds > now * (1.0 - options.minimum_gain)
        chosen, origin = (first, "kept") if keep else (best.schedule, best.origin)
        measured = median(profile.measured.makespan for profile in next(iter(self._profiles.values())))
        self.report = ScheduleReport(
            first=first,
            chosen=chosen,
            origin=origin,
            costs=costs[chosen.num_stages],
            found=found,
            predicted=(now, best.seconds),
            measured=(measured, None),
            skipped=self._skipped,
            candidates=tuple(candidates) if is_limited else (),
            refused={of: str(error) for of, error in self._limited.refused.items()},
        )
        trainer.use_schedule(chosen)
        if not keep:
            try:
                trainer.compile(batch, **self._size)
            except AssignmentError as error:
                if not (is_limited and error.excess):
                    raise
                self._limited.refuse(chosen, error)
                return False
        trainer.message(str(self.report))
        self.done = keep
        return True

    def _search(self, costs: Mapping[int, Costs], count: int) -> dict[int, Found]:
        """Return the best schedule for each number of stages, within the options' limit of activations."""
        found: dict[int, Found] = {}
        refused: ScheduleError | None = None
        for stages, of in costs.items():
            try:
                found[stages] = self._found(stages, of, self.options.memory_limit, count)
            except ScheduleError as error:  # the memory limit
                refused, self._skipped[stages] = error, str(error)
        if refused is not None and not found:
            raise refused
        return found

    def _found(self, stages: int, costs: Costs, memory_limit: float | Sequence[float] | None, count: int) -> Found:
        options, num_ranks = self.options, self.first.num_ranks
        return search(
            num_ranks,
            count,
            stages // num_ranks,
            costs,
            options.transfer,
            memory_limit,
            split_backward=options.split_backward,
            evaluations=options.evaluations,
            seed=options.seed,
        )

    def _limited_candidates(
        self, costs: Mapping[int, Costs], found: Mapping[int, Found], count: int
    ) -> list[Candidate]:
        """Return the schedules that fit within the memory limit with some mixture of residuals, the first one first."""
        num_ranks, limited = self.first.num_ranks, self._limited
        tried: dict[Schedule, tuple[str, Costs]] = {self.first: ("kept", costs[self.first.num_stages])}
        for stages, of in costs.items():
            for name in names(stages, num_ranks):
                schedule = by_name(name, stages, num_ranks)
                if self.options.split_backward or not schedule.splits_backward:
                    tried.setdefault(schedule, (name, of))
            tried.setdefault(found[stages].schedule, (found[stages].origin, of))
            plan = next((p for s in tried if s.num_stages == stages and (p := limited.plan(s)) is not None), None)
            if plan is None:
                continue
            with suppress(ScheduleError):  # one microbatch alone holds more: stages must recompute or offload
                kept = self._found(stages, with_modelled_bytes(of, plan), plan.room, count)
                tried.setdefault(kept.schedule, (f"{kept.origin} within the limit", of))
        transfer = self.options.transfer
        listed = [limited.candidate(s, origin, of, transfer, count) for s, (origin, of) in tried.items()]
        return [candidate for candidate in listed if candidate is not None]

    def _finish(self, trainer: Tunable, report: ScheduleReport) -> None:
        """Measure the gain; if it is a loss, go back to the first schedule, unless that takes too much memory."""
        measured = median(profile.measured.makespan for profile in self._final)
        chosen, origin = report.chosen, report.origin
        costs, count = self._costs(report.first.num_stages), trainer.num_microbatches
        step = simulate(report.first, costs, self.options.transfer, num_microbatches=count)
        if measured > report.measured[0] and _fits(step.peak_memory, self.options.memory_limit):
            chosen, origin = report.first, "the best one found was not faster"
            trainer.use_schedule(chosen)
        costs = self._costs(chosen.num_stages)
        times = report.measured[0], measured
        self.report = replace(report, chosen=chosen, origin=origin, costs=costs, measured=times)
        self.done = True
        trainer.message(str(self.report))

    def _costs(self, num_stages: int) -> Costs:
        profiles = [p for (stages, _), listed in self._profiles.items() if stages == num_stages for p in listed]
        # The last profile is of a split schedule, if any is: such a profile shows the last stage's activations too.
        steps = [self._limited.as_kept(profile.schedule, profile.measured.events) for profile in profiles]
        return task_costs(steps, profiles[-1].stages)


def _fits(peaks: Sequence[float], limit: float | Sequence[float] | None) -> bool:
    if limit is None:
        return True
    limits = limit if isinstance(limit, Sequence) else [limit] * len(peaks)
    return all(peak <= most * (1 + 1e-9) for peak, most in zip(peaks, limits, strict=True))


def _nothing_fits(refused: Sequence[tuple[AssignmentError, Schedule | None]]) -> AssignmentError:
    closest, schedule = min(refused, key=lambda pair: pair[0].excess)
    return AssignmentError(
        f"schedule='auto' measures {len(refused)} schedule{'s'[: len(refused) != 1]}, and none of them fits within "
        f"memory_limit. The closest is {schedule!r}: {closest}",
        closest.excess,
    )


def _as_named(found: Found, num_stages: int, num_ranks: int) -> Candidate:
    """Return the found schedule, or a named schedule that is as good: a named one runs any number of microbatches."""
    best = found.best_named
    if best is not None and best.makespan <= found.makespan * (1 + 1e-9):
        named = by_name(best.name, num_stages, num_ranks)
        return Candidate(schedule=named, origin=best.name, seconds=found.makespan)
    return Candidate(schedule=found.schedule, origin=found.origin, seconds=found.makespan)
