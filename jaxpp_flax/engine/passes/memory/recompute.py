"""Let the backward of a stage compute its residuals again, from the inputs of the stage's forward.

The residuals of a stage are the values that its forward makes and its backward reads. A stage that recomputes them
keeps the forward's inputs instead: the first backward task that reads residuals starts with a copy of the forward's
equations that make them. A split backward computes them once: the task hands them on to the later one. Parameters and
the batch are inputs of the loop, so they are not kept twice. A carry is read as the forward has read it, and is not
written again. A value that a `jax.checkpoint` policy saves stays saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from jaxpp_flax.engine.analyses.data_flow import makers_of
from jaxpp_flax.engine.passes.loop.loop_tasks import LoopTask, Partition
from jaxpp_flax.engine.passes.loop.open_loops import OpenLoop
from jaxpp_flax.engine.tracing.ir import Atom, Equation, Graph, Value, prune, values
from jaxpp_flax.engine.tracing.loop_body import LoopBody
from jaxpp_flax.schedules.errors import ScheduleError
from jaxpp_flax.schedules.residuals import ResidualPlan
from jaxpp_flax.schedules.task import TaskKind

__all__ = ["recompute", "saved_by_policies"]


def recompute(loop: OpenLoop, plan: ResidualPlan | None) -> OpenLoop:
    """Return the loop with the tasks that a plan of residuals asks for; the loop is cut into tasks.

    Raises:
      ScheduleError: if the plan has entries for another number of stages than the loop.
      ValueError: if an operation with side effects would run twice.
    """
    if plan is None or loop.partition is None:
        return loop
    try:
        plan.check(loop.schedule.num_stages)
    except ScheduleError as error:
        raise ScheduleError(f"residuals= of the treduce at {loop.equation.where}: {error}") from error
    part = loop.partition
    for stage, entry in enumerate(plan.stages):
        if entry.recompute:
            part = _recompute_stage(part, stage, loop.body)
    return replace(loop, partition=part)


def _recompute_stage(part: Partition, stage: int, body: LoopBody) -> Partition:
    numbers = [i for i, task in enumerate(part.tasks) if task.stage == stage]
    forwards = [i for i in numbers if part.tasks[i].kind is TaskKind.FORWARD and not part.tasks[i].fused]
    backwards = [i for i in numbers if part.tasks[i].kind is not TaskKind.FORWARD]
    if not forwards or not backwards:
        return part
    (number,) = forwards
    forward, tasks = part.tasks[number], list(part.tasks)
    saved = saved_by_policies((tasks[i].graph for i in backwards), body)
    made = [v for v in values(forward.graph.outputs) if v not in saved]
    readers = [i for i in backwards if not set(made).isdisjoint(tasks[i].graph.inputs)]
    if not readers:
        return part
    read = {v for i in readers for v in tasks[i].graph.inputs}
    again = _Again(forward, [v for v in made if v in read], saved)
    first, *later = readers
    handed_on = [v for v in again.residuals if any(v in tasks[i].graph.inputs for i in later)]
    tasks[first] = replace(tasks[first], graph=again.before(tasks[first].graph, handed_on))
    for i in later:
        tasks[i] = replace(tasks[i], graph=again.read_by(tasks[i].graph))
    elsewhere = {v for i, task in enumerate(tasks) if i != number for v in task.graph.inputs}
    going_round = {turn.result for turn in (*part.accumulators, *part.carries)}
    results = dict.fromkeys([*values(forward.graph.outputs), *again.saved])
    outputs = [v for v in results if v in elsewhere or v in going_round]
    tasks[number] = replace(forward, graph=_with_outputs(forward.graph, outputs))
    return replace(part, tasks=tuple(tasks))


def saved_by_policies(graphs: Iterable[Graph], body: LoopBody) -> set[Value]:
    """Return what backwards of a stage read because a policy of the user's `jax.checkpoint` has saved it.

    A region inside a block is an equation, which reads what the policy saves. A region around marks, such as the
    trainer's `remat=`, is divided among the stages: its recomputed equations stand in the backward, and what this reads
    besides the values of marks was saved.
    """
    found: set[Value] = set()
    marked = {v for marker in body.markers for v in (*values(marker.inputs), *marker.outputs)}
    for graph in graphs:
        regions = [e for e in graph.equations if e.params.get("differentiated")]
        found |= {v for e in regions if e.params.get("policy") is not None for v in values(e.inputs)}
        if any(e.late and e not in regions for e in graph.equations):
            found |= set(graph.inputs) - marked
    return found


class _Again:
    """A copy of the forward's equations that make `residuals`, over values of its own; `saved` is read, not made."""

    def __init__(self, forward: LoopTask, residuals: Sequence[Value], saved: set[Value]) -> None:
        self.residuals = tuple(residuals)
        equations = forward.graph.equations
        chosen = makers_of(equations, residuals, saved)
        for equation in chosen:
            _refuse_effects(equation, forward.stage)
        self.copies: dict[Atom, Value] = {v: Value(v.aval) for e in chosen for v in e.outputs if v not in saved}
        self.equations = tuple(
            replace(
                e,
                inputs=tuple(self.copies.get(a, a) for a in e.inputs),
                outputs=tuple(self.copies.get(v) or Value(v.aval) for v in e.outputs),
            )
            for e in chosen
        )
        read = {v for e in self.equations for v in values(e.inputs)}
        self.saved = tuple(v for e in equations for v in e.outputs if v in saved and v in read)
        self.inputs = (*(v for v in forward.graph.inputs if v in read), *self.saved)

    def before(self, graph: Graph, handed_on: Sequence[Value]) -> Graph:
        """Return a task that computes the residuals first, and also returns those that later tasks read."""
        reader = self.read_by(graph)
        kept = [v for v in graph.inputs if v not in self.copies]
        inputs = (*kept, *(v for v in self.inputs if v not in kept))
        outputs = (*reader.outputs, *(self.copies[v] for v in handed_on))
        return Graph(inputs, tuple(dict.fromkeys(outputs)), (*self.equations, *reader.equations))

    def read_by(self, graph: Graph) -> Graph:
        """Return a task that reads the residuals as the earlier task hands them on."""
        # A task may define a value itself, by a clone of the forward's equation: that value keeps its name.
        names: dict[Atom, Value] = {v: self.copies[v] for v in graph.inputs if v in self.copies}

        def renamed(atoms: Iterable[Any]) -> tuple[Any, ...]:
            return tuple(names.get(a, a) for a in atoms)

        equations = tuple(e.reading(renamed(e.inputs)) for e in graph.equations)
        return Graph(renamed(graph.inputs), renamed(graph.outputs), equations)


def _refuse_effects(equation: Equation, stage: int) -> None:
    if equation.effects:
        raise ValueError(
            f"the ResidualPlan recomputes the residuals of stage {stage}, but {equation.name} at {equation.where} has "
            f"side effects ({', '.join(sorted(map(str, equation.effects)))}), which would happen twice. Keep or "
            "offload the residuals of this stage, or take the operation out of what its backward needs."
        )


def _with_outputs(graph: Graph, outputs: Sequence[Value]) -> Graph:
    """Return the graph with fewer outputs, without equations and inputs for the others."""
    smaller = prune(Graph(graph.inputs, tuple(outputs), graph.equations))
    read = {v for e in smaller.equations for v in values(e.inputs)}.union(outputs)
    return replace(smaller, inputs=tuple(v for v in graph.inputs if v in read))
