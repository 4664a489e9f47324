"""Cut a labelled loop body into tasks, one for each stage and kind, and its reductions into accumulators.

Every task is a `Graph` of its own over shared `Value`s: a value that one task defines and another reads is an edge
between them. Reductions belong to the loop: each task updates the accumulators of its results. A sum over several
stages has an accumulator for each stage's part; the parts are added up once after the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxpp_flax.engine.analyses.data_flow import makers_of
from jaxpp_flax.engine.passes.check_supported import refuse_ordered_effects
from jaxpp_flax.engine.passes.loop.loop import (
    Accumulator,
    Carry,
    CutLoop,
    LabelledLoop,
    Labels,
    Partition,
    advanced,
    each_loop,
)
from jaxpp_flax.engine.passes.loop.task_drafts import Key, TaskDrafts
from jaxpp_flax.engine.passes.memory.recompute import recompute
from jaxpp_flax.engine.program.program import LoopTask
from jaxpp_flax.engine.tracing.ir import Atom, Graph, Value, applied, struct_of, values
from jaxpp_flax.engine.tracing.primitives import facts_of
from jaxpp_flax.engine.tracing.regions import shielded
from jaxpp_flax.engine.tracing.treduce import AddOp, Concat, MaxOp, Op, state_type
from jaxpp_flax.error_codes import documented
from jaxpp_flax.schedules.errors import ScheduleError
from jaxpp_flax.schedules.residuals import ResidualPlan
from jaxpp_flax.schedules.task import MEANING, TaskKind

__all__ = ["CarryError", "partition", "partition_loops"]

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
        split_backward=schedule.splits_backward,
        residuals=residuals,
        rank_of=schedule.rank_of,
    )
    has_backward = any(task.kind is not TaskKind.FORWARD for task in part.tasks)
    return advanced(CutLoop, loop, partition=part, schedule=schedule.with_backward() if has_backward else schedule)


def partition(
    labels: Labels,
    *,
    fuse_last: bool,
    split_backward: bool,
    residuals: ResidualPlan | None = None,
    rank_of: Callable[[int], int] = int,
) -> Partition:
    """Build the tasks of a labelled body.

    Args:
      labels: the result of `label`.
      fuse_last: run the last stage's forward and backward as one task.
      split_backward: split each backward task but the first stage's into input and weight gradients.
      residuals: the stages that compute their residuals again; None for none.
      rank_of: returns the rank of a stage; by default each stage has a rank of its own.

    Raises:
      CarryError: if a phase reads a leaf of the carry, and a later phase writes it.
      ValueError: if an operation with side effects would run twice.
    """
    body, last = labels.body, labels.num_stages - 1
    key_of = {e: (last if fuse_last and phase == last + 1 else phase, 0) for e, phase in labels.phase.items()}
    drafts = TaskDrafts(labels, key_of, list(body.equations), fused=(last, 0) if fuse_last else None)
    if split_backward:
        _split(drafts)
    accumulators = _accumulators(drafts)
    drafts.drop_unneeded(body.next_carry)  # sums over several stages that were split
    carries = _write_carries(drafts)
    if residuals is not None:
        recompute(drafts, residuals)
    graphs = drafts.graphs()
    number = {key: number for number, key in enumerate(graphs)}
    of_turn = {value: number[key] for value, key in drafts.returns.items()}
    states = {turn.result: turn.state for turn in (*accumulators, *carries)}
    return Partition(
        drafts.stages,
        body.constants,
        body.index,
        tuple(_task(drafts, key, graphs, states, rank_of(drafts.stage_of(key))) for key in graphs),
        tuple(replace(a, task=of_turn[a.result]) for a in accumulators),
        tuple(replace(c, task=of_turn[c.result]) for c in carries),
    )


def _accumulators(drafts: TaskDrafts) -> list[Accumulator]:
    """Make an accumulator for each result, or one for each stage's part of it."""
    body, traced = drafts.labels.body, _TracedOps(drafts.labels.body.length)
    return [
        _accumulate(drafts, number, part, op, traced)
        for number, (atom, op) in enumerate(zip(body.results, body.operations, strict=True))
        for part in (_parts(drafts.labels, atom) if type(op) is AddOp else [atom])
    ]


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
    known: dict[tuple[int, Any], tuple[Any, Any]] = field(default_factory=dict[tuple[int, Any], tuple[Any, Any]])

    def of(self, op: Op, aval: Any) -> tuple[Any, Any]:
        """Return the jaxprs of an operation's `state` and `update` for values of a type."""
        value = struct_of(aval).update(weak_type=aval.weak_type)
        if (id(op), value) not in self.known:
            dtype = state_type(op, self.length, value).dtype
            initial = jax.make_jaxpr(lambda: jnp.asarray(op.state(self.length, struct_of(aval)), dtype))()
            state = struct_of(applied(initial, []).outputs[0].aval)
            update = jax.make_jaxpr(op.update)(state, value, jax.ShapeDtypeStruct((), jnp.int32))
            self.known[id(op), value] = initial, update
        return self.known[id(op), value]


def _accumulate(drafts: TaskDrafts, part_of: int, atom: Atom, op: Op, traced: _TracedOps) -> Accumulator:
    """Let the task that makes `atom` update an accumulator of `op`."""
    initial, update = traced.of(op, atom.aval)
    init = applied(initial, [])  # arrays that a user's operation captures become part of the program
    state = Value(init.outputs[0].aval)
    graph = applied(update, [state, atom, drafts.labels.body.index])
    refuse_ordered_effects(graph)
    result = drafts.add(drafts.home(atom), graph)
    # A subclass may do something else: it is a user's own operation.
    ordered = type(op) not in (AddOp, MaxOp, Concat)
    return Accumulator(part_of, _UNNUMBERED, state, result, init, ordered)


def _split(drafts: TaskDrafts) -> None:
    """Split backward tasks for zero-bubble: work that no cotangent leaving the stage needs gets a task of its own."""
    key_of, producer = drafts.key_of, drafts.labels.body.producer
    read = ((v, key) for e, key in key_of.items() for v in values(e.inputs))
    leaving = [v for v, key in read if v in producer and key_of.get(producer[v], key) != key]
    phases = range(drafts.stages, 2 * drafts.stages - 1)
    backward = [e for e in drafts.equations if e in key_of and key_of[e][0] in phases]
    needed = set(makers_of(backward, leaving))
    key_of.update({e: (key_of[e][0], 1) for e in backward if e not in needed})


def _task(
    drafts: TaskDrafts, key: Key, graphs: Mapping[Key, Graph], states: Mapping[Value, Value], rank: int
) -> LoopTask:
    """Make a task; `states` has for each result that goes from microbatch to microbatch what it takes the place of."""
    stage, graph = drafts.stage_of(key), graphs[key]
    kind = TaskKind.FUSED if key == drafts.fused else TaskKind.FORWARD
    if key[0] >= drafts.stages:
        whole = (key[0], 1) not in graphs
        kind = TaskKind.BACKWARD if whole else TaskKind.BACKWARD_INPUT
        kind = TaskKind.BACKWARD_WEIGHT if key[1] == 1 else kind
    if kind is not TaskKind.FORWARD:
        graph = shielded(graph, always=kind is TaskKind.FUSED)
    position = {value: p for p, value in enumerate(graph.inputs)}
    turns = [(p, states[v]) for p, v in enumerate(values(graph.outputs)) if v in states]
    pins = tuple((p, position[state]) for p, state in turns if state in position)
    return LoopTask(f"{MEANING[kind].prefix}_{stage}", rank, graph, stage, kind, pins=pins)


def _write_carries(drafts: TaskDrafts) -> list[Carry]:
    """Let a task write each leaf of the carry; every stage that reads a counter keeps its own copy."""
    body, counters = drafts.labels.body, drafts.labels.counters
    found: list[Carry] = []

    def write(leaf: int, key: Key) -> None:
        result = drafts.add(key, Graph((), (body.next_carry[leaf],), ()))
        found.append(Carry(leaf, _UNNUMBERED, body.carry[leaf], result))

    for leaf, atom in enumerate(body.next_carry):
        if leaf not in counters:
            write(leaf, drafts.home(atom))
    readers = _readers(drafts)
    for carry in found:
        _check_carry(drafts, carry.leaf, drafts.returns[carry.result], readers[carry.leaf])
    for leaf in sorted(counters):
        first = {drafts.stage_of(key): key for key in sorted(readers[leaf], reverse=True)}
        for key in first.values():
            write(leaf, key)
    return found


def _readers(drafts: TaskDrafts) -> list[set[Key]]:
    """Return the tasks that read each leaf of the carry, themselves or to compute the next value of a counter."""
    body, counters = drafts.labels.body, drafts.labels.counters
    behind: dict[Value, set[int]] = {state: {leaf} for leaf, state in enumerate(body.carry)}
    for equation in body.equations:
        if equation in drafts.labels.free:
            read = set[int]().union(*(behind.get(v, ()) for v in values(equation.inputs)))
            behind.update(dict.fromkeys(equation.outputs, read))
    readers: list[set[Key]] = [set() for _ in body.carry]
    for key, equations in drafts.by_task().items():
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
        readers[leaf] = readers[leaf] or {(0, 0)}
    spread()
    return readers


def _check_carry(drafts: TaskDrafts, leaf: int, writer: Key, readers: set[Key]) -> None:
    early = sorted(key for key in readers if key < writer)
    if not early:
        return
    body = drafts.labels.body
    where = next((e.where for e in body.equations if body.carry[leaf] in e.inputs), "an unknown line")
    aval = body.carry[leaf].aval
    remedy = "Read and write a mutable variable in one stage and one direction."
    if writer[0] < drafts.stages:
        remedy += " Modules that several stages share (a BatchNorm, say) need variables of their own in each."
    raise CarryError(
        f"the loop's carry{body.carry_names[leaf]} ({aval.str_short()}, first read at {where}) is read in "
        f"{_describe(drafts, early[0])} and written later, in {_describe(drafts, writer)}: the next microbatch would "
        f"have to wait for the whole pipeline. {remedy}"
    )


def _describe(drafts: TaskDrafts, key: Key) -> str:
    return f"the {'forward' if key[0] < drafts.stages else 'backward'} of stage {drafts.stage_of(key)}"
