"""`trainer.profile_step`: one real training step with the time of each task, beside a simulation of the step.

The engine measures the tasks (`engine/runtime/profile.py`); their medians are the costs of the simulation.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from jaxpp_flax.engine.runtime.profile import TaskTiming
from jaxpp_flax.engine.summary import StageSummary
from jaxpp_flax.planning import measured_costs
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
