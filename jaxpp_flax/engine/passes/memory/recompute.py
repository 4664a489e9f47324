"""Let the backward of a stage compute its residuals again, from the inputs of the stage's forward.

The residuals of a stage are the values that its forward makes and its backward reads. A stage that recomputes them
keeps the forward's inputs instead: the first backward task that reads residuals starts with a copy of the forward's
equations that make them. A split backward computes them once: the task hands them on to the later one. Parameters and
the batch are inputs of the loop, so they are not kept twice. A carry is read as the forward has read it, and is not
written again. A value that a `jax.checkpoint` policy saves stays saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import replace

from jaxpp_flax.engine.analyses.data_flow import makers_of
from jaxpp_flax.engine.passes.loop.task_drafts import TaskDrafts
from jaxpp_flax.engine.tracing.ir import Atom, Equation, Graph, Value, values
from jaxpp_flax.schedules.residuals import ResidualPlan

__all__ = ["recompute", "saved_by_policies"]


def recompute(drafts: TaskDrafts, plan: ResidualPlan) -> None:
    """Let the stages for which a plan asks compute their residuals again.

    Raises:
      ValueError: if an operation with side effects would run twice.
    """
    stages = [stage for stage, entry in enumerate(plan.stages) if entry.recompute]
    graphs = drafts.graphs() if stages else {}
    for stage in stages:
        forward, phase = (stage, 0), 2 * drafts.stages - 1 - stage
        if forward != drafts.fused:
            saved = saved_by_policies((g for key, g in graphs.items() if key[0] == phase), drafts.labels.marked)
            _recompute_stage(drafts, stage, phase, saved)
    drafts.drop_unneeded()  # what the forwards made for the backwards alone


def _recompute_stage(drafts: TaskDrafts, stage: int, phase: int, saved: Set[Value]) -> None:
    tasks = drafts.by_task()
    forward = tasks.get((stage, 0), [])
    made = {v for e in forward for v in e.outputs} - saved
    read = {key: {v for e in tasks[key] for v in values(e.inputs)} & made for key in tasks if key[0] == phase}
    first = min((key for key, residuals in read.items() if residuals), default=None)
    if first is None:
        return
    again = set(makers_of(forward, set[Value]().union(*read.values()), saved))
    copies: dict[Atom, Value] = {v: Value(v.aval) for e in again for v in e.outputs if v not in saved}
    equations = list[Equation]()
    for equation in drafts.equations:
        reading = equation.reading(tuple(copies.get(a, a) for a in equation.inputs))
        if drafts.key_of.get(equation) in read:
            drafts.key_of[reading] = drafts.key_of.pop(equation)
            equations.append(reading)
            continue
        equations.append(equation)
        if equation in again:
            _refuse_effects(equation, stage)
            copy = replace(reading, outputs=tuple(copies.get(v) or Value(v.aval) for v in equation.outputs))
            drafts.key_of[copy] = first
            equations.append(copy)
    drafts.equations[:] = equations


def saved_by_policies(graphs: Iterable[Graph], marked: Set[Value]) -> set[Value]:
    """Return what backwards of a stage read because a policy of the user's `jax.checkpoint` has saved it.

    A region inside a block is an equation, which reads what the policy saves. A region around marks, such as the
    trainer's `remat=`, is divided among the stages: its recomputed equations stand in the backward, and what this reads
    besides the values that pass marks was saved.
    """
    found: set[Value] = set()
    for graph in graphs:
        regions = [e for e in graph.equations if e.params.get("differentiated")]
        found |= {v for e in regions if e.params.get("policy") is not None for v in values(e.inputs)}
        if any(e.late and e not in regions for e in graph.equations):
            found |= set(graph.inputs) - marked
    return found


def _refuse_effects(equation: Equation, stage: int) -> None:
    if equation.effects:
        raise ValueError(
            f"the ResidualPlan recomputes the residuals of stage {stage}, but {equation.name} at {equation.where} has "
            f"side effects ({', '.join(sorted(map(str, equation.effects)))}), which would happen twice. Keep or "
            "offload the residuals of this stage, or take the operation out of what its backward needs."
        )
