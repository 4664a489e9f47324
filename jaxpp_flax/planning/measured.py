"""Costs from measured tasks, so that a search can start from the real times of a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median

from jaxpp_flax.schedules.errors import ScheduleError
from jaxpp_flax.schedules.simulation.costs import Costs, PerStage
from jaxpp_flax.schedules.simulation.simulate import Event, Timeline
from jaxpp_flax.schedules.task import FusedTask, TaskKind

_F, _B, _I, _W = TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.BACKWARD_INPUT, TaskKind.BACKWARD_WEIGHT


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
