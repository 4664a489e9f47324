"""Let the backward of a stage compute its residuals again, from the inputs of the stage's forward.

The residuals of a stage are the values that its forward makes and its backward reads. A stage that recomputes them
keeps the forward's inputs instead: the first backward task that reads residuals starts with a copy of the forward's
equations that make them. A split backward computes them once: the task hands them on to the later one. Parameters and
the batch are inputs of the loop, so they are not kept twice. A carry is read as the forward has read it, and is not
written again. A value that a `jax.checkpoint` policy saves stays saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace

from jaxpp_flax.engine.analyses.data_flow import makers_of
from jaxpp_flax.engine.passes.loop.loop import Labels, TaskKey, TaskOf, by_task
from jaxpp_flax.engine.tracing.ir import Atom, Equation, Value, values
from jaxpp_flax.schedules.residuals import ResidualPlan

__all__ = ["recompute", "saved_by_policies"]


def recompute(task_of: TaskOf, labels: Labels, plan: ResidualPlan, fused: TaskKey | None) -> TaskOf:
    """Return the tasks of a body, in which the stages for which a plan asks compute their residuals again.

    `fused` is the task whose forward and backward are one: it keeps no residuals.

    Raises:
      ValueError: if an operation with side effects would run twice.
    """
    tasks = by_task(task_of)
    again: dict[Equation, TaskKey] = {}  # the equations that run once more, and the task that runs them
    copies: dict[int, dict[Atom, Value]] = {}  # what a backward reads in place of its residuals, by its phase
    for stage, entry in enumerate(plan.stages):
        phase = 2 * labels.num_stages - 1 - stage
        backward = [key for key in tasks if key.phase == phase]
        if not entry.recompute or TaskKey(stage) == fused:
            continue
        saved = saved_by_policies((tasks[key] for key in backward), labels.marked)
        forward = tasks.get(TaskKey(stage), ())
        # With JAX_REMAT3, JAX saves a copy of a value, and other work reads the value itself.
        held = {e.inputs[0]: v for e in forward for v in e.outputs if v in saved and e.name == "reduce_precision"}
        kept = {*saved, *values(held)}
        recomputed = {v for e in forward for v in e.outputs} - kept
        residuals = {key: recomputed.intersection(v for e in tasks[key] for v in values(e.inputs)) for key in backward}
        chosen = makers_of(forward, set[Value]().union(*residuals.values()), kept)
        again.update((e, min(key for key in backward if residuals[key])) for e in chosen)
        copies[phase] = {**held, **{v: Value(v.aval) for e in chosen for v in e.outputs if v not in kept}}
    changed = TaskOf()
    for equation, key in task_of.items():
        if key is not None and key.phase in copies:
            changed[_reading(equation, copies[key.phase])] = key
            continue
        changed[equation] = key
        if equation in again:
            _refuse_effects(equation, labels.stage_of(again[equation].phase))
            names = copies[again[equation].phase]
            outputs = tuple(names.get(v) or Value(v.aval) for v in equation.outputs)
            changed[replace(_reading(equation, names), outputs=outputs, late=True)] = again[equation]
    return changed


def _reading(equation: Equation, names: Mapping[Atom, Value]) -> Equation:
    return equation.reading(tuple(names.get(atom, atom) for atom in equation.inputs))


def saved_by_policies(tasks: Iterable[Sequence[Equation]], marked: Set[Value]) -> set[Value]:
    """Return what backward tasks of a stage read because a policy of the user's `jax.checkpoint` has saved it.

    A region inside a block is an equation, and an opened region is many: what they read besides the values that pass
    marks was saved.
    """
    saved: set[Value] = set()
    for equations in tasks:
        read = set[Value]()
        for equation in equations:
            closed = equation.params.get("differentiated") and equation.params["policy"] is not None
            opened = equation.region is not None and equation.region.saves
            if closed or opened:
                read.update(values(equation.inputs))
        saved |= read.difference(v for equation in equations for v in equation.outputs)
    return saved - marked


def _refuse_effects(equation: Equation, stage: int) -> None:
    if equation.effects:
        raise ValueError(
            f"the ResidualPlan recomputes the residuals of stage {stage}, but {equation.name} at {equation.where} has "
            f"side effects ({', '.join(sorted(map(str, equation.effects)))}), which would happen twice. Keep or "
            "offload the residuals of this stage, or take the operation out of what its backward needs."
        )
