"""Cut a labelled loop body into tasks, one for each stage and kind, and its reductions into accumulators.

Every task is a `Graph` of its own over shared `Value`s: a value that one task defines and another reads is an edge
between them. Reductions belong to the loop: each task updates the accumulators of its results. A sum over several
stages has an accumulator for each stage's part; the parts are added up once after the loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxpp_flax.engine.analyses.data_flow import makers_of
from jaxpp_flax.engine.passes.check_supported import refuse_ordered_effects
from jaxpp_flax.engine.passes.loop.carries import write_carries
from jaxpp_flax.engine.passes.loop.label import Labels
from jaxpp_flax.engine.passes.loop.loop_tasks import UNNUMBERED, Accumulator, LoopTask, Partition
from jaxpp_flax.engine.passes.loop.task_drafts import Key, TaskDrafts
from jaxpp_flax.engine.passes.memory.recompute import recompute
from jaxpp_flax.engine.tracing.ir import (
    Atom,
    Graph,
    Value,
    VerificationError,
    applied,
    struct_of,
    values,
)
from jaxpp_flax.engine.tracing.primitives import facts_of
from jaxpp_flax.engine.tracing.regions import shielded
from jaxpp_flax.engine.tracing.treduce import AddOp, Concat, MaxOp, Op, state_type
from jaxpp_flax.schedules.residuals import ResidualPlan
from jaxpp_flax.schedules.task import TaskKind

__all__ = ["partition", "verify_effects"]


def partition(
    labels: Labels, *, fuse_last: bool, split_backward: bool, residuals: ResidualPlan | None = None
) -> Partition:
    """Build the tasks of a labelled body.

    Args:
      labels: the result of `label`.
      fuse_last: run the last stage's forward and backward as one task.
      split_backward: split each backward task but the first stage's into input and weight gradients.
      residuals: the stages that compute their residuals again; None for none.

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
    carries = write_carries(drafts)
    if residuals is not None:
        recompute(drafts, residuals)
    graphs = drafts.graphs()
    number = {key: number for number, key in enumerate(graphs)}
    of_turn = {value: number[key] for value, key in drafts.returns.items()}
    return Partition(
        drafts.stages,
        body.constants,
        body.index,
        tuple(_task(drafts, key, graphs) for key in graphs),
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
    graph = labels.body.graph
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
    return Accumulator(part_of, UNNUMBERED, state, result, init, ordered)


def _split(drafts: TaskDrafts) -> None:
    """Split backward tasks for zero-bubble: work that no cotangent leaving the stage needs gets a task of its own."""
    key_of, producer = drafts.key_of, drafts.labels.body.graph.producer
    read = ((v, key) for e, key in key_of.items() for v in values(e.inputs))
    leaving = [v for v, key in read if v in producer and key_of.get(producer[v], key) != key]
    phases = range(drafts.stages, 2 * drafts.stages - 1)
    backward = [e for e in drafts.equations if e in key_of and key_of[e][0] in phases]
    needed = set(makers_of(backward, leaving))
    key_of.update({e: (key_of[e][0], 1) for e in backward if e not in needed})


def _task(drafts: TaskDrafts, key: Key, graphs: Mapping[Key, Graph]) -> LoopTask:
    stage, graph = drafts.stage_of(key), graphs[key]
    if key == drafts.fused:
        return LoopTask(stage, TaskKind.FORWARD, shielded(graph, always=True), fused=True)
    if key[0] < drafts.stages:
        return LoopTask(stage, TaskKind.FORWARD, graph)
    graph = shielded(graph)
    if key[1] == 1:
        return LoopTask(stage, TaskKind.BACKWARD_WEIGHT, graph)
    whole = (key[0], 1) not in graphs
    return LoopTask(stage, TaskKind.BACKWARD if whole else TaskKind.BACKWARD_INPUT, graph)


def verify_effects(labels: Labels, partitioned: Partition) -> None:
    """Check that no labelled equation is in two tasks (`Partition.verify` finds equations that are in no task)."""
    count = Counter(v for task in partitioned.tasks for e in task.graph.equations for v in e.outputs)
    for equation in labels.phase:
        if any(count[v] > 1 for v in equation.outputs):
            raise VerificationError(f"{equation.name} at {equation.where} stands in several tasks")
