"""What each microbatch of a step costs, by the tasks that the step's program runs for it."""

from __future__ import annotations

from collections import defaultdict

from jaxpp_flax.engine.analyses.work import work_of
from jaxpp_flax.engine.program.program import Program, Run
from jaxpp_flax.schedules.simulation.costs import Costs
from jaxpp_flax.schedules.task import TaskKind

__all__ = ["microbatch_costs"]

_F, _B, _I, _W, _FUSED = TaskKind


def microbatch_costs(program: Program, num_stages: int, flops_per_byte: float = 0.0) -> list[Costs]:
    """Return the work of each microbatch on each stage, forward and backward, in FLOPs (see `work_of`).

    A forward that is one task with its backward counts a third of the task.
    """
    works = [sum(work_of(equation, flops_per_byte) for equation in task.graph.equations) for task in program.tasks]
    of_microbatch: dict[int, dict[tuple[TaskKind, int], float]] = defaultdict(lambda: defaultdict(float))
    for instruction in program.instructions:
        if not isinstance(instruction, Run):
            continue
        task = program.tasks[instruction.task]
        if task.kind is None or task.stage is None:  # outside of loops
            continue
        of_microbatch[instruction.microbatch][task.kind, task.stage] += works[instruction.task]
    return [_costs(of_microbatch[microbatch], num_stages) for microbatch in sorted(of_microbatch)]


def _costs(work: dict[tuple[TaskKind, int], float], num_stages: int) -> Costs:
    forward, inputs, weights, whole = ([0.0] * num_stages for _ in range(4))
    for stage in range(num_stages):
        f, b, i, w, fused = (work[kind, stage] for kind in TaskKind)
        forward[stage] = f + fused / 3
        whole[stage] = b + i + w + 2 * fused / 3
        # A backward that is not split runs where the schedule has the part for the inputs.
        inputs[stage], weights[stage] = (i, w) if i or w else (whole[stage], 0.0)
    return Costs(forward=forward, backward_input=inputs, backward_weight=weights, backward=whole)
