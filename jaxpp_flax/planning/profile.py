"""`trainer.profile_step`: one real training step with the time of each task, and the costs that follow from it.

The engine measures the tasks (`engine/runtime/profile.py`); their medians are the costs of the simulation.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from jaxpp_flax.engine.blocks import Work
from jaxpp_flax.engine.runtime.profile import TaskTiming
from jaxpp_flax.engine.summary import StageSummary
from jaxpp_flax.schedules import (
    Costs,
    Event,
    FusedTask,
    Schedule,
    Task,
    TaskKind,
    Timeline,
    draw,
    replay,
    simulate,
)
from jaxpp_flax.schedules.errors import ScheduleError
from jaxpp_flax.schedules.simulation.costs import PerStage

__all__ = ["StepProfile", "measured_costs", "profile_of", "task_costs"]

_F, _B, _I, _W = TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.BACKWARD_INPUT, TaskKind.BACKWARD_WEIGHT


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """A real training step with the times of its tasks, in seconds and bytes.

    `simulated` is the same schedule in the simulator, with the median times of this step's tasks and free transfers.
    `measured` takes longer because of transfers, and tasks with varying times.
    """

    metrics: dict[str, Any]  # as from `train_step`
    schedule: Schedule
    measured: Timeline
    simulated: Timeline
    stages: Sequence[StageSummary]

    def work_of(self, names: Sequence[str], estimated: Sequence[Work]) -> list[Work]:
        """Return the seconds of each block: those of its measured stage, divided as the blocks' estimates are.

        Args:
          names, estimated: of the model's blocks, and of the work after the last mark.

        Raises:
          ValueError: if the measured step has other blocks.
        """
        found, costs = list[Work](), self.simulated.costs.table(len(self.stages)).times
        place = {name: row.stage for row in self.stages for name in row.blocks}
        if missing := [name for name in names[:-1] if name not in place]:
            raise ValueError(f"the measured step has no block {missing[0]!r}. Measure a step of the same model.")
        stages = [place.get(name, len(self.stages) - 1) for name in names]

        def share(of: str, block: int) -> float:
            here = [getattr(work, of) for work, stage in zip(estimated, stages, strict=True) if stage == stages[block]]
            return getattr(estimated[block], of) / sum(here) if sum(here) else 1 / len(here)

        for block, stage in enumerate(stages):
            found.append(Work(costs[_F][stage] * share("forward", block), costs[_B][stage] * share("backward", block)))
        return found

    @property
    def panels(self) -> list[tuple[str, Timeline]]:
        """Both timelines with titles, for `jaxpp_flax.schedules.draw`."""
        return [("measured (seconds)", self.measured), ("simulated (seconds)", self.simulated)]

    def draw(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        width: int = 120,
    ) -> str:
        """Draw the measured and the simulated timeline, one below the other, with one time scale; return the text.

        Args:
          path: a `.svg`, `.json` (Chrome trace, for Perfetto) or `.txt` file to write too.
          width: columns of the text.
        """
        return draw(self.panels, path, width=width, microseconds=1e6)


def profile_of(
    metrics: dict[str, Any],
    timings: Iterable[TaskTiming],
    stages: Sequence[StageSummary],
    schedule: Schedule,
    num_microbatches: int,
) -> StepProfile:
    """Make the profile of a step from the engine's measured times and its summary of the stages."""
    ranks: list[list[Event]] = [[] for _ in range(schedule.num_ranks)]
    for timing in timings:
        ranks[timing.rank].append(Event(timing.task, timing.rank, timing.start, timing.end))
    costs = task_costs([ranks], stages)
    return StepProfile(
        metrics=metrics,
        schedule=schedule,
        measured=replay(ranks, costs),
        simulated=simulate(schedule, costs, num_microbatches=num_microbatches),
        stages=stages,
    )


def task_costs(steps: Iterable[Iterable[Iterable[Event]]], stages: Sequence[StageSummary]) -> Costs:
    """Return median costs over the events of several steps, of one schedule or several on the same stages.

    `steps` has each rank's events of each step. A fused task of the last stage is split in two. If the last stage's
    forward was also measured alone, the split is at that time; else at a third. A stage without a kind of gradient (all
    its parameters are frozen, say) has zero cost for that kind.
    """
    events = [event for step in steps for rank in step for event in rank]
    seen = {(task.kind, task.stage) for task in (e.task for e in events) if isinstance(task, Task)}
    ahead: dict[int, list[float]] = {}
    for event in events:
        if isinstance(event.task, Task) and event.task.kind is _F:
            ahead.setdefault(event.task.stage, []).append(event.end - event.start)
    plain: list[Event] = []
    for event in events:
        stage = event.task.stage
        if isinstance(event.task, FusedTask) and stage in ahead:
            middle = min(event.start + median(ahead[stage]), event.end)
            plain.append(Event(Task(_B, stage, event.task.microbatch), event.rank, middle, event.end))
        else:
            plain.append(event)
            if isinstance(event.task, FusedTask):
                seen |= {(_F, stage), (_B, stage)}
    for stage in range(len(stages)):
        kinds = {kind for kind, of in seen if of == stage}
        missing = [kind for kind in (_I, _W) if kind not in kinds] if kinds & {_I, _W} else [_B]
        plain += [Event(Task(kind, stage, 0), 0, 0.0, 0.0) for kind in missing if kind not in kinds]
    held, sent = [float(of.activation_bytes) for of in stages], [float(of.sent_bytes) for of in stages]
    costs = measured_costs([plain], activation=held, sent=sent)
    return replace(costs, weight_activation=[float(of.weight_bytes) for of in stages])


def measured_costs(
    measured: Timeline | Iterable[Iterable[Event]], *, activation: PerStage = 1.0, sent: PerStage = 0.0
) -> Costs:
    """The median time of each kind of pass of each stage.

    A whole backward that was not measured apart is taken as the sum of its two halves; halves that
    were not measured, as half of the whole each; a fused task as one third forward.

    Args:
        measured: a timeline, or each rank's events.
        activation: memory held per microbatch, by stage, as in :class:`Costs`.
        sent: bytes sent, by stage, as in :class:`Costs`.

    >>> from jaxpp_flax.schedules import Costs, Std1F1B, simulate
    >>> step = simulate(Std1F1B(2), Costs(forward=[1.0, 3.0], backward=[2.0, 6.0]), num_microbatches=3)
    >>> costs = measured_costs(step)
    >>> costs.forward, costs.backward
    ((1.0, 3.0), (2.0, 6.0))
    """
    events = measured.events if isinstance(measured, Timeline) else measured
    times: defaultdict[tuple[TaskKind, int], list[float]] = defaultdict(list)
    for listed in events:
        for event in listed:
            task, long = event.task, event.end - event.start
            if isinstance(task, FusedTask):
                times[_F, task.stage].append(long / 3)
                times[_B, task.stage].append(2 * long / 3)
            else:
                times[task.kind, task.stage].append(long)
    if not times:
        raise ScheduleError("no task was measured: run at least one step")
    num_stages = 1 + max(stage for _, stage in times)

    def of(kind: TaskKind, stage: int) -> float | None:
        return median(times[kind, stage]) if (kind, stage) in times else None

    forward: list[float] = []
    whole: list[float] = []
    inputs: list[float] = []
    weights: list[float] = []
    for stage in range(num_stages):
        ahead, b, i, w = (of(kind, stage) for kind in (_F, _B, _I, _W))
        if ahead is None or (b is None and (i is None or w is None)):
            raise ScheduleError(f"stage {stage} has no measured {'forward' if ahead is None else 'backward'}")
        b = (i or 0.0) + (w or 0.0) if b is None else b
        forward.append(ahead)
        whole.append(b)
        inputs.append(b / 2 if i is None else i)
        weights.append(b / 2 if w is None else w)
    return Costs(
        forward=forward,
        backward=whole,
        backward_input=inputs,
        backward_weight=weights,
        activation=_sequence(activation),
        sent=_sequence(sent),
    )


def _sequence(value: PerStage) -> PerStage:
    return tuple(value) if isinstance(value, Sequence) else value
