"""`trainer.profile_step`: one real training step with the time of each task, and the costs of tasks from it.

The engine measures the tasks (`engine/runtime/profile.py`); their medians are the costs of the simulation.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from jaxpp_flax.engine.runtime.profile import TaskTiming
from jaxpp_flax.engine.summary import StageSummary
from jaxpp_flax.planning.predicted.blocks import Work
from jaxpp_flax.schedules import (
    Costs,
    Event,
    Schedule,
    TaskKind,
    Timeline,
    Units,
    draw,
    replay,
    simulate,
)

__all__ = ["StepProfile", "profile_of", "task_costs"]

_F, _B, _I, _W, _ = TaskKind


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """A real training step with the times of its tasks, in seconds and bytes.

    `measured` is the timeline of the measured tasks. `simulated` is the same schedule in the simulator, with the median
    times of these tasks and with transfers that take no time. `measured` is longer, because transfers take time and the
    times of tasks vary. `examples` is the number of examples of a microbatch, divided by the devices of a rank.
    """

    metrics: dict[str, Any]  # as from `train_step`
    schedule: Schedule
    measured: Timeline
    simulated: Timeline
    stages: Sequence[StageSummary]
    examples: float = 1.0

    def work_of(self, names: Sequence[str], estimated: Sequence[Work], examples: float) -> list[Work]:
        """Return the seconds of each block: its stage's measured seconds, shared in proportion to the estimates.

        Args:
          names, estimated: the names and the estimated work of the model's blocks, and of the work after the last mark.
          examples: the number of examples of a microbatch on each device, for which the seconds are wanted: they are
            proportional to it.

        Raises:
          ValueError: if the measured step has other blocks.
        """
        found, costs = list[Work](), self.simulated.costs.table(len(self.stages)).times
        scale = examples / self.examples
        place = {name: row.stage for row in self.stages for name in row.blocks}
        if missing := [name for name in names[:-1] if name not in place]:
            raise ValueError(f"the measured step has no block {missing[0]!r}. Measure a step of the same model.")
        stages = [place.get(name, len(self.stages) - 1) for name in names]

        def share(of: str, block: int) -> float:
            here = [getattr(work, of) for work, stage in zip(estimated, stages, strict=True) if stage == stages[block]]
            return getattr(estimated[block], of) / sum(here) if sum(here) else 1 / len(here)

        for block, stage in enumerate(stages):
            forward, backward = costs[_F][stage] * share("forward", block), costs[_B][stage] * share("backward", block)
            found.append(Work(forward * scale, backward * scale))
        return found

    @property
    def panels(self) -> list[tuple[str, Timeline]]:
        """Both timelines with titles, for `jaxpp_flax.schedules.draw`."""
        return [("measured", self.measured), ("simulated", self.simulated)]

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
        return draw(self.panels, path, width=width, microseconds=1e6, units=Units("s", "B"))


def profile_of(
    metrics: dict[str, Any],
    timings: Iterable[TaskTiming],
    stages: Sequence[StageSummary],
    schedule: Schedule,
    num_microbatches: int,
    examples: float,
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
        examples=examples,
    )


def task_costs(steps: Iterable[Iterable[Iterable[Event]]], stages: Sequence[StageSummary]) -> Costs:
    """Return median costs over the events of several steps, of one schedule or several on the same stages.

    `steps` has each rank's events of each step. A fused task of the last stage is split in two. If the last stage's
    forward was also measured alone, the split is at that time; else at a third. A whole backward that was not measured
    is the sum of its halves, and halves that were not measured are half of the whole each. A stage without a kind of
    gradient (all its parameters are frozen, say) has zero cost for that kind.

    Example:
      >>> from types import SimpleNamespace
      >>> from jaxpp_flax.schedules import Std1F1B
      >>> step = simulate(Std1F1B(2), Costs(forward=[1.0, 3.0], backward=[2.0, 6.0]), num_microbatches=3)
      >>> stage = SimpleNamespace(activation_bytes=8, weight_bytes=8, sent_bytes=1)
      >>> costs = task_costs([step.events], [stage] * 2)
      >>> costs.forward, costs.backward
      ((1.0, 3.0), (2.0, 6.0))
    """
    times: defaultdict[tuple[TaskKind, int], list[float]] = defaultdict(list)
    fused: list[tuple[int, float]] = []
    for event in (event for step in steps for rank in step for event in rank):
        task, seconds = event.task, event.end - event.start
        if task.kind is TaskKind.FUSED:
            fused.append((task.stage, seconds))
        else:
            times[task.kind, task.stage].append(seconds)
    alone = {stage: median(times[_F, stage]) for stage in range(len(stages)) if (_F, stage) in times}
    for stage, seconds in fused:
        if stage not in alone:
            times[_F, stage].append(seconds / 3)
        times[_B, stage].append(seconds - min(alone.get(stage, seconds / 3), seconds))
    halves: list[tuple[float, float]] = []
    whole: list[float] = []
    for stage in range(len(stages)):
        b, i, w = (median(times.get((kind, stage), [0.0])) for kind in (_B, _I, _W))
        is_split = (_I, stage) in times or (_W, stage) in times
        whole.append(b if (_B, stage) in times else i + w)
        halves.append((i, w) if is_split else (b / 2, b / 2))
    return Costs(
        forward=[median(times.get((_F, stage), [0.0])) for stage in range(len(stages))],
        backward=whole,
        backward_input=[i for i, _ in halves],
        backward_weight=[w for _, w in halves],
        activation=[float(of.activation_bytes) for of in stages],
        weight_activation=[float(of.weight_bytes) for of in stages],
        sent=[float(of.sent_bytes) for of in stages],
    )
