"""Cut a labelled loop body into tasks, one for each stage and kind, and its reductions into accumulators.

Every task is a `Graph` of its own over shared `Value`s: a value that one task defines and another reads is an edge
between them. Reductions belong to the loop: each task updates the accumulators of its results. A sum over several
stages has one partial accumulator for each stage; these are added up once after the loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxpp_flax.engine.passes.loop.accumulators import DraftAccumulator, accumulate, split_sums
from jaxpp_flax.engine.passes.loop.carries import DraftCarry, write_carries
from jaxpp_flax.engine.passes.loop.label import LabelledLoop, Labels
from jaxpp_flax.engine.passes.loop.loop_tasks import Accumulator, Carry, LoopTask, Partial, Partition
from jaxpp_flax.engine.passes.loop.open_loops import OpenLoop
from jaxpp_flax.engine.passes.loop.task_drafts import Key, TaskDrafts
from jaxpp_flax.engine.tracing.dataflow import needed_by
from jaxpp_flax.engine.tracing.ir import Atom, Equation, Graph, Value, VerificationError, emit
from jaxpp_flax.engine.tracing.markers import marker_p
from jaxpp_flax.engine.tracing.treduce import AddOp, Op
from jaxpp_flax.schedules.task import FusedTask, TaskKind

__all__ = ["PartedLoop", "partition", "partition_loop", "verify_effects"]


@dataclass(frozen=True, eq=False)
class PartedLoop:
    """A loop of the step with its tasks."""

    loop: OpenLoop
    labels: Labels
    partition: Partition

    def verify(self) -> None:
        """See `Partition.verify` and `verify_effects`."""
        self.partition.verify()
        verify_effects(self.labels, self.partition)

    def as_text(self) -> str:
        """See `Partition.as_text`."""
        return self.partition.as_text()


def partition_loop(labelled: LabelledLoop) -> PartedLoop:
    """Cut a labelled loop into the tasks that its schedule runs."""
    loop, labels = labelled.loop, labelled.labels
    schedule, last = loop.schedule, loop.schedule.num_stages - 1
    tasks = [t for rank in schedule.tasks(loop.body.length) for t in rank if t.stage == last]
    fuse_last = all(isinstance(t, FusedTask) for t in tasks)
    return PartedLoop(loop, labels, partition(labels, fuse_last=fuse_last, split_backward=schedule.splits_backward))


def partition(labels: Labels, *, fuse_last: bool, split_backward: bool) -> Partition:
    """Build the tasks of a labelled body.

    Args:
      labels: the result of `label`.
      fuse_last: run the last stage's forward and backward as one task.
      split_backward: split each backward task but the first stage's into input and weight gradients.

    Raises:
      CarryError: if a phase reads a leaf of the carry, and a later phase writes it.
    """
    body, last = labels.body, labels.num_stages - 1
    fused = (last, 0) if fuse_last else None
    key_of = {e: (last if fuse_last and phase == last + 1 else phase, 0) for e, phase in labels.phase.items()}
    drafts = TaskDrafts(labels, key_of)
    if split_backward:
        _split(drafts)
    for equation in body.equations:
        if equation in drafts.key_of:
            drafts.equations.setdefault(drafts.key_of[equation], []).append(equation)
    roots: list[Atom] = [labels.resolve(a) for a in body.next_carry]
    results, accumulators = _reduce(drafts, roots)
    _drop_unneeded(drafts, roots)
    for key, equations in drafts.equations.items():
        wanted = drafts.wanted.setdefault(key, [])
        for equation in equations:
            wanted.extend(a for a in map(labels.resolve, equation.inputs) if isinstance(a, Value))
    return _number(drafts, fused, results, accumulators, write_carries(drafts))


def _reduce(drafts: TaskDrafts, roots: list[Atom]) -> tuple[list[Partial | int], list[DraftAccumulator]]:
    """Make an accumulator for each result, or several with their sum; `roots` collects the accumulated values."""
    labels, accumulators = drafts.labels, list[DraftAccumulator]()

    def place(tree: Any, op: Op) -> Partial | int:
        if isinstance(tree, tuple):
            return Partial(place(tree[0], op), place(tree[1], op))
        accumulators.append(accumulate(drafts, tree, op))
        roots.append(tree)
        return len(accumulators) - 1

    results: list[Partial | int] = []
    for atom, op in zip(map(labels.resolve, labels.body.results), labels.body.operations, strict=True):
        tree = split_sums(labels, atom) if type(op) is AddOp and isinstance(atom, Value) else atom
        results.append(place(tree, op))
    return results, accumulators


def _number(
    drafts: TaskDrafts,
    fused: Key | None,
    results: Sequence[Partial | int],
    accumulators: Sequence[DraftAccumulator],
    carries: Sequence[DraftCarry],
) -> Partition:
    """Build the finished tasks in the order of phases."""
    keys = sorted({*drafts.equations, *drafts.extra, *drafts.returns})
    position = {key: i for i, key in enumerate(keys)}
    graphs = _graphs(drafts, keys, fused)
    return Partition(
        drafts.stages,
        drafts.body.constants,
        drafts.body.index,
        tuple(_task(drafts, key, graph, fused) for key, graph in zip(keys, graphs, strict=True)),
        tuple(Accumulator(position[a.key], a.state, a.result, a.init, a.ordered) for a in accumulators),
        tuple(Carry(c.leaf, position[c.key], c.state, c.result) for c in carries),
        tuple(results),
    )


def _split(drafts: TaskDrafts) -> None:
    """Split backward tasks for zero-bubble: work that no cotangent leaving the stage needs gets a task of its own."""
    leaving: set[Value] = set()
    key_of = drafts.key_of
    for equation in drafts.body.equations:
        for atom in map(drafts.labels.resolve, equation.inputs):
            made = drafts.body.producer.get(atom) if isinstance(atom, Value) else None
            if made in key_of and equation in key_of and key_of[made][0] != key_of[equation][0]:
                leaving.add(atom)  # type: ignore[arg-type]
    phases = range(drafts.stages, 2 * drafts.stages - 1)
    backward = [e for e in drafts.body.equations if e in key_of and key_of[e][0] in phases]
    needed = needed_by(backward, leaving, drafts.labels.resolve)
    key_of.update({e: (key_of[e][0], 1) for e in backward if e not in needed})


def _drop_unneeded(drafts: TaskDrafts, roots: Sequence[Atom]) -> None:
    """Drop equations that nothing needs any more: sums over several stages that were split."""
    needed = {a for a in roots if isinstance(a, Value)}
    for equation in reversed(drafts.body.equations):
        if equation.primitive is marker_p:
            continue
        if equation.effects or not needed.isdisjoint(equation.outputs):
            needed.update(a for a in map(drafts.labels.resolve, equation.inputs) if isinstance(a, Value))
        else:
            drafts.key_of.pop(equation, None)
    for key, equations in list(drafts.equations.items()):
        drafts.equations[key] = [e for e in equations if e in drafts.key_of]
        if not drafts.equations[key]:
            del drafts.equations[key]


def _graphs(drafts: TaskDrafts, keys: Sequence[Key], fused: Key | None) -> list[Graph]:
    order = {e: i for i, e in enumerate(drafts.body.equations)}
    position = {v: i for i, v in enumerate((*drafts.body.inputs, *drafts.states))}

    def input_order(value: Value) -> Key:
        """Give a task's inputs a stable order: the loop's inputs, the accumulators, then edges by definition."""
        made = drafts.body.producer.get(value)
        return (0, position[value]) if made is None else (1, order[made] * 1000 + made.outputs.index(value))

    inside: list[tuple[list[Equation], list[Value]]] = []
    outside: set[Value] = set()
    for key in keys:
        own = drafts.equations.get(key, [])
        extra = drafts.extra.get(key, [])
        defined = {v for e in (*own, *extra) for v in e.outputs}
        wanted = [a for e in (*own, *extra) for a in map(drafts.labels.resolve, e.inputs) if isinstance(a, Value)]
        free, read = drafts.free_closure(wanted)
        ordered = [*sorted((*own, *free), key=order.__getitem__), *extra]
        inputs = sorted(read - defined, key=input_order)
        inside.append((ordered, inputs))
        outside.update(inputs)
    graphs: list[Graph] = []
    for key, (equations, inputs) in zip(keys, inside, strict=True):
        own = [v for e in drafts.equations.get(key, []) for v in e.outputs if v in outside]
        outputs = [*dict.fromkeys((*own, *drafts.returns.get(key, [])))]
        resolved = [replace(e, inputs=tuple(map(drafts.labels.resolve, e.inputs))) for e in equations]
        if key == fused:
            resolved = _shield_recomputation(resolved)
        graphs.append(Graph(tuple(inputs), tuple(outputs), tuple(resolved)))
    return graphs


def _task(drafts: TaskDrafts, key: Key, graph: Graph, fused: Key | None) -> LoopTask:
    stage = drafts.stage_of(key)
    if key[0] < drafts.stages:
        return LoopTask(stage, TaskKind.FORWARD, graph, fused=key == fused)
    if key[1] == 1:
        return LoopTask(stage, TaskKind.BACKWARD_WEIGHT, graph)
    whole = (key[0], 1) not in drafts.equations
    return LoopTask(stage, TaskKind.BACKWARD if whole else TaskKind.BACKWARD_INPUT, graph)


def _shield_recomputation(equations: Sequence[Equation]) -> list[Equation]:
    """Keep XLA from merging recomputed work with the original inside one fused task: that would undo remat."""
    if not any(e.late for e in equations):
        return list(equations)
    first = next(i for i, e in enumerate(equations) if e.late)
    after = {v for e in equations[first:] for v in e.outputs}
    entering = [
        *dict.fromkeys(a for e in equations if e.late for a in e.inputs if isinstance(a, Value) and a not in after)
    ]
    if not entering:
        return list(equations)
    (barrier,), _ = emit(lambda *xs: jax.lax.optimization_barrier(xs), entering)
    shielded: dict[Atom, Value] = dict(zip(entering, barrier.outputs, strict=True))
    recomputed = [
        replace(e, inputs=tuple(shielded.get(a, a) for a in e.inputs)) if e.late else e for e in equations[first:]
    ]
    return [*equations[:first], barrier, *recomputed]


def verify_effects(labels: Labels, partitioned: Partition) -> None:
    """Check that no labelled equation is in two tasks (`Partition.verify` finds equations that are in no task)."""
    count: dict[Value, int] = {}
    for task in partitioned.tasks:
        for equation in task.graph.equations:
            for value in equation.outputs:
                count[value] = count.get(value, 0) + 1
    for equation in labels.body.equations:
        if equation in labels.phase and any(count.get(v, 0) > 1 for v in equation.outputs):
            raise VerificationError(f"{equation.name} at {equation.where} stands in several tasks")
