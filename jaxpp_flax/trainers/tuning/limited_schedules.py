"""The choice of a schedule under `memory_limit=`: each candidate with its cheapest mixture of residuals that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from jaxpp_flax.assignment import AssignmentError
from jaxpp_flax.assignment.limited import LimitedPlan
from jaxpp_flax.planning import Choice, describe
from jaxpp_flax.schedules import Costs, Event, FusedTask, Schedule, Task, TaskKind, Transfer, simulate

__all__ = ["Candidate", "LimitedSchedules", "PlanWith"]

_F, _B, _I, _W = TaskKind

PlanWith = Callable[[Schedule], LimitedPlan | None]
"""Returns the plan of a schedule under the memory limit, or None without a limit; raises `AssignmentError`."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A schedule that keeps within the memory limit.

    Attributes:
      schedule: the schedule.
      origin: the name of the schedule, or the action of the search.
      seconds: the simulated step, from measured times of tasks, with recomputation and copies to the host.
      choice: what its stages do with their residuals; None without a limit.
    """

    schedule: Schedule
    origin: str
    seconds: float
    choice: Choice | None = None

    @property
    def residuals_text(self) -> str:
        """What each stage does with its residuals, or ""."""
        if self.choice is None:
            return ""
        if self.choice.residuals.is_kept:
            return "all stages keep their residuals"
        return ", ".join(f"stage {n}: {describe(of)}" for n, of in enumerate(self.choice.residuals.stages))


class LimitedSchedules:
    """Plans schedules under the memory limit, each once; notes the schedules that do not fit in `refused`."""

    def __init__(self, plan_with: PlanWith | None) -> None:
        self._plan_with = plan_with
        self._plans: dict[Schedule, LimitedPlan | None] = {}
        self.refused: dict[Schedule, AssignmentError] = {}

    def plan(self, schedule: Schedule) -> LimitedPlan | None:
        """Return the plan of a schedule; None without a limit, or if nothing fits the limit."""
        if schedule not in self._plans and schedule not in self.refused:
            try:
                self._plans[schedule] = None if self._plan_with is None else self._plan_with(schedule)
            except AssignmentError as error:
                self.refused[schedule] = error
        return self._plans.get(schedule)

    def refuse(self, schedule: Schedule, error: AssignmentError) -> None:
        """Leave a schedule out whose compiled step exceeds the limit."""
        self._plans.pop(schedule, None)
        self.refused[schedule] = error

    def candidate(
        self, schedule: Schedule, origin: str, costs: Costs, transfer: Transfer | float | None, num_microbatches: int
    ) -> Candidate | None:
        """Return a schedule with its simulated step; None if nothing fits the limit.

        Args:
          costs: measured times, without recomputation.
        """
        plan = self.plan(schedule)
        if plan is None:
            return None
        step = simulate(
            schedule,
            with_modelled_bytes(costs, plan),
            transfer,
            num_microbatches=num_microbatches,
            residuals=plan.choice.residuals,
            host_link=plan.model.hardware.host_link,
            gathers=plan.model.gathers,
        )
        return Candidate(schedule=schedule, origin=origin, seconds=step.makespan, choice=plan.choice)

    def as_kept(self, schedule: Schedule, events: Iterable[Iterable[Event]]) -> list[list[Event]]:
        """Return a measured step's events as if no stage recomputed its residuals."""
        plan, listed = self.plan(schedule), [list(rank) for rank in events]
        return listed if plan is None else _without_recomputation(listed, plan)


def with_modelled_bytes(costs: Costs, plan: LimitedPlan) -> Costs:
    """Return measured times with the bytes of a plan's model, which do not depend on what the measured step kept."""
    stages = plan.model.stages
    table = costs.table(len(stages))
    loads = [load.with_times(*times) for load, *times in zip(stages, table.times[_F], table.times[_B], strict=True)]
    return replace(
        replace(plan.model, stages=loads).costs,
        backward=table.times[_B],
        backward_input=table.times[_I],
        backward_weight=table.times[_W],
    )


def _without_recomputation(events: Sequence[Sequence[Event]], plan: LimitedPlan) -> list[list[Event]]:
    kept, table = plan.model.costs, plan.model.costs.table(len(plan.model.stages), plan.choice.residuals)
    ahead: dict[int, list[float]] = {}
    for event in (event for rank in events for event in rank):
        if isinstance(event.task, Task) and event.task.kind is TaskKind.FORWARD:
            ahead.setdefault(event.task.stage, []).append(event.end - event.start)
    backward = kept.table(len(plan.model.stages)).times[_B]
    found: list[list[Event]] = []
    for rank in events:
        row: list[Event] = []
        for event in rank:
            stage = event.task.stage
            recomputes = not isinstance(event.task, FusedTask) and event.task.kind in (
                TaskKind.BACKWARD,
                TaskKind.BACKWARD_INPUT,
            )
            again = table.times[_B][stage] - backward[stage] if recomputes and stage in ahead else 0.0
            # The model knows the share of a forward that runs again; the measured forward gives its seconds.
            seconds = again / table.times[_F][stage] * median(ahead[stage]) if again else 0.0
            row.append(replace(event, end=max(event.start, event.end - seconds)))
        found.append(row)
    return found
