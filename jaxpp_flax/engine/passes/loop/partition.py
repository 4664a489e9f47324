"""Cut a labelled loop body into tasks, one for each stage and kind, and its reductions into accumulators.

Every task is a `Graph` of its own over shared `Value`s: a value that one task defines and another reads is an edge
between them. Reductions belong to the loop: each task updates the accumulators of its results. A sum over several
stages has one partial accumulator for each stage; these are added up once after the loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from jaxpp_flax.engine.analyses.data_flow import needed_by
from jaxpp_flax.engine.passes.check_supported import refuse_ordered_effects
from jaxpp_flax.engine.passes.loop.carries import write_carries
from jaxpp_flax.engine.passes.loop.label import Labels
from jaxpp_flax.engine.passes.loop.loop_tasks import Accumulator, LoopTask, Partial, Partition
from jaxpp_flax.engine.passes.loop.task_drafts import Key, TaskDrafts
from jaxpp_flax.engine.tracing.ir import (
    Atom,
    Equation,
    Graph,
    Value,
    VerificationError,
    applied,
    emit,
    from_jaxpr,
    struct_of,
    values,
)
from jaxpp_flax.engine.tracing.markers import marker_p
from jaxpp_flax.engine.tracing.primitives import facts_of
from jaxpp_flax.engine.tracing.treduce import AddOp, Concat, MaxOp, Op
from jaxpp_flax.schedules.task import TaskKind

__all__ = ["partition", "verify_effects"]


# A task, and a function that makes its accumulator or carry, once the task has a number.
_Drafts: TypeAlias = Sequence[tuple[Key, Callable[..., Any]]]


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
    key_of = {e: (last if fuse_last and phase == last + 1 else phase, 0) for e, phase in labels.phase.items()}
    drafts = TaskDrafts(labels, key_of, fused=(last, 0) if fuse_last else None)
    if split_backward:
        _split(drafts)
    results, accumulators, roots = _reduce(drafts)
    _drop_unneeded(drafts, [*map(labels.resolve, body.next_carry), *roots])
    for equation in body.equations:
        if equation in drafts.key_of:
            drafts.equations.setdefault(drafts.key_of[equation], []).append(equation)
            drafts.wanted.setdefault(drafts.key_of[equation], []).extend(labels.operands(equation))
    return _number(drafts, results, accumulators, write_carries(drafts))


def _reduce(drafts: TaskDrafts) -> tuple[list[Partial | int], _Drafts, list[Atom]]:
    """Make an accumulator for each result, or several with their sum; return the accumulated values too."""
    labels, accumulators, roots = drafts.labels, list[tuple[Key, Callable[..., Any]]](), list[Atom]()

    traced = _TracedOps(drafts.body.length)

    def place(tree: Any, op: Op) -> Partial | int:
        if isinstance(tree, tuple):
            return Partial(place(tree[0], op), place(tree[1], op))
        accumulators.append(_accumulate(drafts, tree, op, traced))
        roots.append(tree)
        return len(roots) - 1

    results: list[Partial | int] = []
    for atom, op in zip(map(labels.resolve, labels.body.results), labels.body.operations, strict=True):
        tree = _split_sums(labels, atom) if type(op) is AddOp and isinstance(atom, Value) else atom
        results.append(place(tree, op))
    return results, accumulators, roots


def _split_sums(labels: Labels, value: Value) -> Any:
    """Split a sum over several stages into a nested pair of addends; return any other value itself."""
    equation = labels.body.producer.get(value)
    if equation is None or not facts_of(equation.primitive).adds or equation not in labels.phase:
        return value
    operands = labels.operands(equation)
    alike = [v for v in operands if v.aval.shape == value.aval.shape]
    if labels.users.get(value, 0) > 1 or len(alike) < len(equation.inputs):
        return value
    phases = [labels.phase.get(made) if (made := labels.body.producer.get(v)) else None for v in operands]
    if None in phases or phases[0] == phases[1]:
        return value
    return tuple(_split_sums(labels, v) for v in operands)


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
            self.known[id(op), value] = self._trace(op, struct_of(aval), value)
        return self.known[id(op), value]

    def _trace(self, op: Op, struct: Any, value: Any) -> tuple[Any, Any]:
        def traced(state: Callable[[], Any]) -> tuple[Any, Any, Any, Any]:
            initial = jax.make_jaxpr(state)()
            aval = applied(initial, []).outputs[0].aval
            made = struct_of(aval).update(weak_type=aval.weak_type)
            update = jax.make_jaxpr(op.update)(made, value, jax.ShapeDtypeStruct((), jnp.int32))
            return initial, update, aval, from_jaxpr(update)[0].outputs[0].aval

        initial, update, before, after = traced(lambda: op.state(self.length, struct))
        if before.weak_type and before.dtype != after.dtype:  # the first update decides, as in a loop of JAX
            dtype = after.dtype
            initial, update, before, after = traced(lambda: jnp.asarray(op.state(self.length, struct), dtype))
        if (before.shape, before.dtype) != (after.shape, after.dtype):
            raise VerificationError(f"{op!r} turns an accumulator {before.str_short()} into {after.str_short()}")
        return initial, update


def _accumulate(drafts: TaskDrafts, atom: Atom, op: Op, traced: _TracedOps) -> tuple[Key, Callable[..., Accumulator]]:
    """Append `op`'s update of an accumulator to the task that makes `atom`."""
    key = drafts.home(atom)
    initial, update = traced.of(op, atom.aval)
    init = applied(initial, [])  # arrays that a user's operation captures become part of the program
    state = Value(init.outputs[0].aval)
    drafts.states.append(state)
    graph = applied(update, [state, atom, drafts.body.index])
    refuse_ordered_effects(graph)
    drafts.extra.setdefault(key, []).extend(graph.equations)
    (result,) = graph.outputs
    if isinstance(result, Value) and any(result in e.outputs for e in graph.equations):
        drafts.returns.setdefault(key, []).append(result)
    else:
        result = drafts.return_copy(key, result)  # the operation returns its operand unchanged
    drafts.wanted.setdefault(key, []).extend(v for e in graph.equations for v in values(e.inputs))
    # A subclass may do something else: it is a user's own operation.
    ordered = type(op) not in (AddOp, MaxOp, Concat)
    return key, partial(Accumulator, state=state, result=result, init=init, ordered=ordered)


def _number(drafts: TaskDrafts, results: Sequence[Partial | int], accumulators: _Drafts, carries: _Drafts) -> Partition:
    """Build the finished tasks in the order of phases."""
    keys = sorted({*drafts.equations, *drafts.extra, *drafts.returns})
    position = {key: i for i, key in enumerate(keys)}
    graphs = _graphs(drafts, keys)
    return Partition(
        drafts.stages,
        drafts.body.constants,
        drafts.body.index,
        tuple(_task(drafts, key, graph) for key, graph in zip(keys, graphs, strict=True)),
        tuple(make(task=position[key]) for key, make in accumulators),
        tuple(make(task=position[key]) for key, make in carries),
        tuple(results),
    )


def _split(drafts: TaskDrafts) -> None:
    """Split backward tasks for zero-bubble: work that no cotangent leaving the stage needs gets a task of its own."""
    key_of, labels = drafts.key_of, drafts.labels
    leaving: set[Value] = set()
    for equation, key in key_of.items():
        for value in labels.operands(equation):
            made = drafts.body.producer.get(value)
            if made is not None and key_of.get(made, key)[0] != key[0]:
                leaving.add(value)
    phases = range(drafts.stages, 2 * drafts.stages - 1)
    backward = [e for e in drafts.body.equations if e in key_of and key_of[e][0] in phases]
    needed = needed_by(backward, leaving, labels.resolve)
    key_of.update({e: (key_of[e][0], 1) for e in backward if e not in needed})


def _drop_unneeded(drafts: TaskDrafts, roots: Sequence[Atom]) -> None:
    """Drop equations that nothing needs any more: sums over several stages that were split."""
    needed = set(values(roots))
    for equation in reversed(drafts.body.equations):
        if equation.primitive is marker_p:
            continue
        if equation.effects or not needed.isdisjoint(equation.outputs):
            needed.update(drafts.labels.operands(equation))
        else:
            drafts.key_of.pop(equation, None)


def _graphs(drafts: TaskDrafts, keys: Sequence[Key]) -> list[Graph]:
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
        free, read = drafts.free_closure([v for e in (*own, *extra) for v in drafts.labels.operands(e)])
        ordered = [*sorted((*own, *free), key=order.__getitem__), *extra]
        inputs = sorted(read - defined, key=input_order)
        inside.append((ordered, inputs))
        outside.update(inputs)
    graphs: list[Graph] = []
    for key, (equations, inputs) in zip(keys, inside, strict=True):
        own = [v for e in drafts.equations.get(key, []) for v in e.outputs if v in outside]
        outputs = [*dict.fromkeys((*own, *drafts.returns.get(key, [])))]
        resolved = [e.reading(tuple(map(drafts.labels.resolve, e.inputs))) for e in equations]
        if key == drafts.fused:
            resolved = _shield_recomputation(resolved)
        graphs.append(Graph(tuple(inputs), tuple(outputs), tuple(resolved)))
    return graphs


def _task(drafts: TaskDrafts, key: Key, graph: Graph) -> LoopTask:
    stage = drafts.stage_of(key)
    if key[0] < drafts.stages:
        return LoopTask(stage, TaskKind.FORWARD, graph, fused=key == drafts.fused)
    if key[1] == 1:
        return LoopTask(stage, TaskKind.BACKWARD_WEIGHT, graph)
    whole = (key[0], 1) not in drafts.equations
    return LoopTask(stage, TaskKind.BACKWARD if whole else TaskKind.BACKWARD_INPUT, graph)


def _shield_recomputation(equations: Sequence[Equation]) -> list[Equation]:
    """Keep XLA from merging recomputed work with the original inside one fused task: that would undo remat."""
    first = next((i for i, e in enumerate(equations) if e.late), len(equations))
    after = {v for e in equations[first:] for v in e.outputs}
    entering = [*dict.fromkeys(v for e in equations if e.late for v in values(e.inputs) if v not in after)]
    if not entering:
        return list(equations)
    (barrier,), _ = emit(lambda *xs: jax.lax.optimization_barrier(xs), entering)
    shielded: dict[Atom, Value] = dict(zip(entering, barrier.outputs, strict=True))
    read_shielded = [e.reading(tuple(shielded.get(a, a) for a in e.inputs)) if e.late else e for e in equations[first:]]
    return [*equations[:first], barrier, *read_shielded]


def verify_effects(labels: Labels, partitioned: Partition) -> None:
    """Check that no labelled equation is in two tasks (`Partition.verify` finds equations that are in no task)."""
    count = Counter(v for task in partitioned.tasks for e in task.graph.equations for v in e.outputs)
    for equation in labels.phase:
        if any(count[v] > 1 for v in equation.outputs):
            raise VerificationError(f"{equation.name} at {equation.where} stands in several tasks")
