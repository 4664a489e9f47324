"""Let the backward of a stage compute its residuals again, from the inputs of the stage's forward.

The residuals of a stage are the values that its forward makes and its backward reads. A stage that recomputes them
keeps the forward's inputs instead: the first backward task that reads residuals starts with a copy of the forward's
equations that make them. A split backward computes them once: the task hands them on to the later one. Parameters and
the batch are inputs of the loop, so they are not kept twice. A carry is read as the forward has read it, and is not
written again. A value that a `jax.checkpoint` policy saves stays saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import replace

from jaxpp_flax.engine.analyses.data_flow import makers_of
from jaxpp_flax.engine.passes.loop.task_drafts import Key, TaskDrafts
from jaxpp_flax.engine.tracing.ir import Atom, Equation, Graph, Value, values
from jaxpp_flax.schedules.residuals import ResidualPlan

__all__ = ["recompute", "saved_by_policies"]


def recompute(drafts: TaskDrafts, plan: ResidualPlan) -> None:
    """Let the stages for which a plan asks compute their residuals again.

    Raises:
      ValueError: if an operation with side effects would run twice.
    """
    tasks, graphs = drafts.by_task(), drafts.graphs()
    again: dict[Equation, Key] = {}  # the equations that run once more, and the task that runs them
    copies: dict[int, dict[Atom, Value]] = {}  # what a backward reads in place of its residuals, by its phase
    for stage, entry in enumerate(plan.stages):
        phase = 2 * drafts.stages - 1 - stage
        backward = [key for key in tasks if key[0] == phase]
        if not entry.recompute or (stage, 0) == drafts.fused:
            continue
        saved = saved_by_policies((graphs[key] for key in backward), drafts.labels.marked)
        forward = tasks.get((stage, 0), ())
        # With JAX_REMAT3, JAX saves a copy of a value, and other work reads the value itself.
        held = {e.inputs[0]: v for e in forward for v in e.outputs if v in saved and e.name == "reduce_precision"}
        kept = {*saved, *values(held)}
        made = {v for e in forward for v in e.outputs} - kept
        residuals = {key: made.intersection(graphs[key].inputs) for key in backward}
        chosen = makers_of(forward, set[Value]().union(*residuals.values()), kept)
        again.update((e, min(key for key in backward if residuals[key])) for e in chosen)
        copies[phase] = {**held, **{v: Value(v.aval) for e in chosen for v in e.outputs if v not in kept}}
    equations = list[Equation]()
    for equation in drafts.equations:
        key = drafts.key_of.get(equation)
        if key is not None and key[0] in copies:
            reading = _reading(equation, copies[key[0]])
            drafts.key_of[reading] = drafts.key_of.pop(equation)
            equations.append(reading)
            continue
        equations.append(equation)
        if equation in again:
            _refuse_effects(equation, drafts.stage_of(again[equation]))
            names = copies[again[equation][0]]
            outputs = tuple(names.get(v) or Value(v.aval) for v in equation.outputs)
            copy = replace(_reading(equation, names), outputs=outputs, late=True)
            drafts.key_of[copy] = again[equation]
            equations.append(copy)
    drafts.equations[:] = equations
    drafts.drop_unneeded()  # what the forwards made for the backwards alone


def _reading(equation: Equation, names: Mapping[Atom, Value]) -> Equation:
    return equation.reading(tuple(names.get(atom, atom) for atom in equation.inputs))


def saved_by_policies(graphs: Iterable[Graph], marked: Set[Value]) -> set[Value]:
    """Return what backwards of a stage read because a policy of the user's `jax.checkpoint` has saved it.

    A region inside a block is an equation, and an opened region is many: what they read besides the values that pass
    marks was saved.
    """
    found: set[Value] = set()
    for graph in graphs:
        closed = [e for e in graph.equations if e.params.get("differentiated") and e.params["policy"] is not None]
        opened = [e for e in graph.equations if e.region is not None and e.region.saves]
        found |= {v for e in (*closed, *opened) for v in values(e.inputs)}.intersection(graph.inputs) - marked
    return found


def _refuse_effects(equation: Equation, stage: int) -> None:
    if equation.effects:
        raise ValueError(
            f"the ResidualPlan recomputes the residuals of stage {stage}, but {equation.name} at {equation.where} has "
            f"side effects ({', '.join(sorted(map(str, equation.effects)))}), which would happen twice. Keep or "
            "offload the residuals of this stage, or take the operation out of what its backward needs."
        )
