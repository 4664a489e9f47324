"""Cut a labelled loop body into tasks, one for each stage and kind, and its reductions into accumulators.

Every task is a `Graph` of its own over shared `Value`s: a value that one task defines and another reads is an edge
between them. Reductions belong to the loop: each task updates the accumulators of its results. A sum over several
stages has an accumulator for each stage's part; the parts are added up once after the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxpp_flax.engine.analyses.data_flow import ancestors, split_backward
from jaxpp_flax.engine.passes.loop.loop import (
    Accumulator,
    Carry,
    CutLoop,
    LabelledLoop,
    Labels,
    Partition,
    TaskKey,
    TaskOf,
    advanced,
    by_task,
    each_loop,
)
from jaxpp_flax.engine.passes.loop.open_loops import refuse_ordered_effects
from jaxpp_flax.engine.passes.loop.recompute import recompute
from jaxpp_flax.engine.program.program import LoopTask
from jaxpp_flax.engine.tracing.ir import (
    Atom,
    Equation,
    Graph,
    Value,
    applied,
    producers,
    struct_of,
    values,
    with_outputs,
)
from jaxpp_flax.engine.tracing.primitives import facts_of
from jaxpp_flax.engine.tracing.regions import shielded
from jaxpp_flax.engine.tracing.treduce import AddOp, Concat, MaxOp, Op, state_type
from jaxpp_flax.error_codes import documented
from jaxpp_flax.schedules.errors import ScheduleError
from jaxpp_flax.schedules.residuals import ResidualPlan
from jaxpp_flax.schedules.task import MEANING, RUN_FORWARD, TaskKind

__all__ = ["CarryError", "partition", "partition_loops", "residuals_of"]

_UNNUMBERED = -1  # the task of an accumulator or a carry while the loop is cut: tasks get their numbers last


@documented("JPF602")
class CarryError(ValueError):
    """A leaf of the carry flows against the pipeline."""


def partition_loops(step: Graph, residuals: ResidualPlan | None) -> Graph:
    """Cut each labelled loop of a step into the tasks that its schedule runs.

    Raises:
      CarryError, ValueError: see `partition`.
      ScheduleError: if the plan of residuals has entries for another number of stages than a loop.
    """
    return each_loop(step, LabelledLoop, lambda loop: _cut(loop, residuals))


def _cut(loop: LabelledLoop, residuals: ResidualPlan | None) -> CutLoop:
    schedule, last = loop.schedule, loop.schedule.num_stages - 1
    try:
        if residuals is not None:
            residuals.check(schedule.num_stages)
    except ScheduleError as error:
        raise ScheduleError(f"residuals= of the treduce at {loop.where}: {error}") from error
    tasks = [t for rank in schedule.tasks(loop.body.length) for t in rank if t.stage == last]
    fuse_last = all(t.kind is TaskKind.FUSED for t in tasks)
    part = partition(
        loop.labels,
        fuse_last=fuse_last,
        splits_backward=schedule.splits_backward,
        residuals=residuals,
        rank_of=schedule.rank_of,
    )
    has_backward = any(task.kind is not TaskKind.FORWARD for task in part.tasks)
    return advanced(CutLoop, loop, partition=part, schedule=schedule.with_backward() if has_backward else schedule)


def partition(
    labels: Labels,
    *,
    fuse_last: bool,
    splits_backward: bool,
    residuals: ResidualPlan | None = None,
    rank_of: Callable[[int], int] = int,
) -> Partition:
    """Build the tasks of a labelled body.

    Args:
      labels: the result of `label`.
      fuse_last: run the last stage's forward and backward as one task.
      splits_backward: split each backward task but the first stage's into input and weight gradients.
      residuals: the stages that compute their residuals again; None for none.
      rank_of: returns the rank of a stage; by default each stage has a rank of its own.

    Raises:
      CarryError: if a phase reads a leaf of the carry, and a later phase writes it.
      ValueError: if an operation with side effects would run twice.
    """
    last = labels.num_stages - 1
    fused = TaskKey(last) if fuse_last else None
    task_of = TaskOf()
    for equation in labels.body.equations:
        phase = labels.phase.get(equation)
        key = None if phase is None else TaskKey(phase)
        task_of[equation] = fused if fuse_last and phase == last + 1 else key
    if splits_backward:
        _split(labels, task_of)
    accumulators = _accumulators(labels, task_of)
    results = [accumulator.result for accumulator in accumulators]
    task_of = _read(task_of, {*results, *labels.body.next_carry})  # without sums over several stages that were split
    carries = _write_carries(labels, task_of)
    results += [carry.result for carry in carries]
    if residuals is not None:
        task_of = recompute(task_of, labels, residuals, fused)
        task_of = _read(task_of, results)  # without what the forwards made for the backwards alone
    makers = producers(task_of)
    returns = {result: key for result in results if (key := task_of[makers[result]]) is not None}
    graphs = _graphs(labels, task_of, returns)
    number = {key: number for number, key in enumerate(graphs)}
    states = {turn.result: turn.state for turn in (*accumulators, *carries)}
    return Partition(
        labels.num_stages,
        labels.body.constants,
        labels.body.index,
        tuple(_task(labels, key, graphs, states, fused, rank_of) for key in graphs),
        tuple(replace(a, task=number[returns[a.result]]) for a in accumulators),
        tuple(replace(c, task=number[returns[c.result]]) for c in carries),
    )


def _add(task_of: TaskOf, key: TaskKey, graph: Graph) -> Value:
    """Let a task run a graph of one output as well, and return the output in a value of its own."""
    result = Value(graph.outputs[0].aval)
    task_of.update(dict.fromkeys(with_outputs(graph, [result]), key))
    return result


def _read(task_of: TaskOf, wanted: Iterable[Atom]) -> TaskOf:
    """Return the equations of tasks that make wanted values or have side effects, and what is read for these."""
    needed, kept = set(wanted), list[Equation]()
    for equation in reversed(task_of):
        if equation.effects or not needed.isdisjoint(equation.outputs):
            needed.update(equation.inputs)
            kept.append(equation)
    return {equation: task_of[equation] for equation in reversed(kept)}


def _graphs(labels: Labels, task_of: TaskOf, returns: Mapping[Value, TaskKey]) -> dict[TaskKey, Graph]:
    """Return each task as a graph: with the free equations that it needs, and with what others read of it.

    `returns` has the results that go from microbatch to microbatch, with their tasks.
    """
    free = producers(labels.free)
    place = {equation: number for number, equation in enumerate(task_of)}
    # A stable order of a task's inputs: the loop's inputs, then as the body and its additions read and make them.
    in_order = (*labels.body.inputs, *(v for e in task_of for v in (*values(e.inputs), *e.outputs)))
    number = {value: number for number, value in enumerate(dict.fromkeys(in_order))}
    inside: dict[TaskKey, tuple[list[Equation], list[Value]]] = {}
    for key, own in by_task(task_of).items():
        needed = [*ancestors((a for e in own for a in e.inputs), free)]
        equations = sorted({*own, *(free[v] for v in needed if v in free)}, key=place.__getitem__)
        outputs = {v for e in equations for v in e.outputs}
        inside[key] = equations, sorted((v for v in needed if v not in outputs), key=number.__getitem__)
    read = {v for _, inputs in inside.values() for v in inputs}
    graphs: dict[TaskKey, Graph] = {}
    for key, (equations, inputs) in inside.items():
        own = [v for e in equations if task_of[e] is not None for v in e.outputs if v in read]
        returned = [value for value, home in returns.items() if home == key]
        graphs[key] = Graph(tuple(inputs), (*own, *returned), tuple(equations))
    return graphs


def _home(labels: Labels, task_of: TaskOf, atom: Atom) -> TaskKey:
    """Return the task that makes a result; the last stage's forward for a result that any task can compute."""
    maker = labels.body.producer.get(atom) if isinstance(atom, Value) else None
    return (None if maker is None else task_of.get(maker)) or TaskKey(labels.num_stages - 1)


def _accumulators(labels: Labels, task_of: TaskOf) -> list[Accumulator]:
    """Make an accumulator for each result, or one for each stage's part of it, and let tasks update them."""
    body, traced = labels.body, _TracedOps(labels.body.length)
    accumulators: list[Accumulator] = []
    for number, (atom, op) in enumerate(zip(body.results, body.operations, strict=True)):
        for part in _parts(labels, atom) if type(op) is AddOp else [atom]:
            accumulators.append(_accumulate(labels, task_of, number, part, op, traced))
    return accumulators


def _parts(labels: Labels, atom: Atom) -> list[Atom]:
    """Return the addends of a sum over several stages; any other atom is its own only part."""
    graph = labels.body
    equation = graph.producer.get(atom) if isinstance(atom, Value) else None
    if equation is None or not facts_of(equation.primitive).adds or graph.reads[atom] > 1:  # type: ignore[index]
        return [atom]
    phases = [labels.phase.get(graph.producer.get(a)) for a in equation.inputs]  # type: ignore[arg-type]
    alike = all(a.aval.shape == atom.aval.shape for a in equation.inputs)
    if equation in labels.free or not alike or None in phases or phases[0] == phases[1]:
        return [atom]
    return [part for addend in equation.inputs for part in _parts(labels, addend)]


@dataclass(frozen=True)
class _TracedOps:
    """The jaxprs of operations; a model has many parameters of a few types.

    An operation is known by its identity: a user's operations may compare equal and do different things.
    """

    length: int
    traced: dict[tuple[int, Any], tuple[Any, Any]] = field(default_factory=dict[tuple[int, Any], tuple[Any, Any]])

    def of(self, op: Op, aval: Any) -> tuple[Any, Any]:
        """Return the jaxprs of an operation's `state` and `update` for values of a type."""
        value = struct_of(aval).update(weak_type=aval.weak_type)
        if (id(op), value) not in self.traced:
            dtype = state_type(op, self.length, value).dtype
            initial = jax.make_jaxpr(lambda: jnp.asarray(op.state(self.length, struct_of(aval)), dtype))()
            state = struct_of(applied(initial, []).outputs[0].aval)
            update = jax.make_jaxpr(op.update)(state, value, jax.ShapeDtypeStruct((), jnp.int32))
            self.traced[id(op), value] = initial, update
        return self.traced[id(op), value]


def _accumulate(labels: Labels, task_of: TaskOf, part_of: int, atom: Atom, op: Op, traced: _TracedOps) -> Accumulator:
    """Let the task that makes `atom` update an accumulator of `op`."""
    initial, update = traced.of(op, atom.aval)
    init = applied(initial, [])  # arrays that a user's operation captures become part of the program
    state = Value(init.outputs[0].aval)
    graph = applied(update, [state, atom, labels.body.index])
    refuse_ordered_effects(graph)
    result = _add(task_of, _home(labels, task_of, atom), graph)
    # A subclass may do something else: it is a user's own operation.
    ordered = type(op) not in (AddOp, MaxOp, Concat)
    return Accumulator(part_of, _UNNUMBERED, state, result, init, ordered)


def _split(labels: Labels, task_of: TaskOf) -> None:
    """Split backward tasks for zero-bubble: work that no cotangent leaving the stage needs gets a task of its own."""
    producer, leaving = labels.body.producer, list[Value]()
    for equation, key in task_of.items():
        for value in values(equation.inputs) if key is not None else ():
            home = task_of[producer[value]] if value in producer else None
            if home is not None and home != key:
                leaving.append(value)
    phases = range(labels.num_stages, 2 * labels.num_stages - 1)
    backward = [e for e, key in task_of.items() if key is not None and key.phase in phases]
    _, weights = split_backward(backward, leaving)
    for equation in weights:
        task_of[equation] = TaskKey(labels.phase[equation], of_weights=True)


def _task(
    labels: Labels,
    key: TaskKey,
    graphs: Mapping[TaskKey, Graph],
    states: Mapping[Value, Value],
    fused: TaskKey | None,
    rank_of: Callable[[int], int],
) -> LoopTask:
    """Make a task; `states` has for each result that goes from microbatch to microbatch what it takes the place of."""
    stage, graph = labels.stage_of(key.phase), graphs[key]
    kind = TaskKind.FUSED if key == fused else TaskKind.FORWARD
    if key.phase >= labels.num_stages:
        is_split = TaskKey(key.phase, of_weights=True) in graphs
        kind = TaskKind.BACKWARD_INPUT if is_split else TaskKind.BACKWARD
        kind = TaskKind.BACKWARD_WEIGHT if key.of_weights else kind
    if kind is not TaskKind.FORWARD:
        graph = shielded(graph, always=kind is TaskKind.FUSED)
    position = {value: p for p, value in enumerate(graph.inputs)}
    turns = [(p, states[v]) for p, v in enumerate(values(graph.outputs)) if v in states]
    pins = tuple((p, position[state]) for p, state in turns if state in position)
    return LoopTask(f"{MEANING[kind].prefix}_{stage}", rank_of(stage), graph, stage, kind, pins=pins)


def _write_carries(labels: Labels, task_of: TaskOf) -> list[Carry]:
    """Let a task write each leaf of the carry; every stage that reads a counter keeps its own copy."""
    body, counters = labels.body, labels.counters
    carries: list[Carry] = []
    writers: list[TaskKey] = []

    def write(leaf: int, key: TaskKey) -> None:
        result = _add(task_of, key, Graph((), (body.next_carry[leaf],), ()))
        carries.append(Carry(leaf, _UNNUMBERED, body.carry[leaf], result))
        writers.append(key)

    for leaf, atom in enumerate(body.next_carry):
        if leaf not in counters:
            write(leaf, _home(labels, task_of, atom))
    readers = _readers(labels, task_of)
    for carry, writer in zip(carries, writers, strict=True):
        _check_carry(labels, carry.leaf, writer, readers[carry.leaf])
    for leaf in sorted(counters):
        first = {labels.stage_of(key.phase): key for key in sorted(readers[leaf], reverse=True)}
        for key in first.values():
            write(leaf, key)
    return carries


def _readers(labels: Labels, task_of: TaskOf) -> list[set[TaskKey]]:
    """Return the tasks that read each leaf of the carry, themselves or to compute the next value of a counter."""
    body, counters = labels.body, labels.counters
    behind: dict[Value, set[int]] = {state: {leaf} for leaf, state in enumerate(body.carry)}
    for equation in body.equations:
        if equation in labels.free:
            read = set[int]().union(*(behind.get(v, ()) for v in values(equation.inputs)))
            behind.update(dict.fromkeys(equation.outputs, read))
    readers: list[set[TaskKey]] = [set() for _ in body.carry]
    for key, equations in by_task(task_of).items():
        for value in {v for e in equations for v in values(e.inputs)}:
            for leaf in behind.get(value, ()):
                readers[leaf].add(key)

    def spread() -> None:
        """Let the tasks of a counter read what its next value depends on: other counters, and what these depend on."""
        for _ in counters:
            for leaf in counters:
                for other in behind.get(body.next_carry[leaf], ()):  # type: ignore[arg-type]
                    readers[other] |= readers[leaf]

    spread()
    for leaf in counters:
        readers[leaf] = readers[leaf] or {TaskKey(0)}
    spread()
    return readers


def _check_carry(labels: Labels, leaf: int, writer: TaskKey, readers: set[TaskKey]) -> None:
    early = sorted(key for key in readers if key < writer)
    if not early:
        return
    body = labels.body
    where = next((e.where for e in body.equations if body.carry[leaf] in e.inputs), "an unknown line")
    aval = body.carry[leaf].aval
    remedy = "Read and write a mutable variable in one stage and one direction."
    if writer.phase < labels.num_stages:
        remedy += " Modules that several stages share (a BatchNorm, say) need variables of their own in each."
    raise CarryError(
        f"the loop's carry{body.carry_names[leaf]} ({aval.str_short()}, first read at {where}) is read in "
        f"{_describe(labels, early[0])} and written later, in {_describe(labels, writer)}: the next microbatch would "
        f"have to wait for the whole pipeline. {remedy}"
    )


def _describe(labels: Labels, key: TaskKey) -> str:
    return f"the {'forward' if key.phase < labels.num_stages else 'backward'} of stage {labels.stage_of(key.phase)}"


def residuals_of(part: Partition) -> tuple[dict[Value, set[int]], dict[Value, set[int]]]:
    """Return what stages keep of each microbatch, each value with its stages.

    First the activations: results of forwards that a stage's backward reads, kept from the forward to the backward (to
    the input gradient, if the backward is split). Then the results of any task that a stage's weight gradient reads,
    kept from the input gradient to the weight gradient.
    """
    outside = {a.result for a in part.accumulators} | {c.result for c in part.carries}
    kinds = {value: task.kind for task in part.tasks for value in values(task.graph.outputs) if value not in outside}
    activations: dict[Value, set[int]] = {}
    kept: dict[Value, set[int]] = {}
    for task in part.tasks:
        for value in task.graph.inputs:
            if task.kind not in RUN_FORWARD and kinds.get(value) in RUN_FORWARD:
                activations.setdefault(value, set()).add(task.stage)
            if task.kind is TaskKind.BACKWARD_WEIGHT and value in kinds:
                kept.setdefault(value, set()).add(task.stage)
    return activations, kept
