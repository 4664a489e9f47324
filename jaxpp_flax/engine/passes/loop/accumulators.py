"""Accumulators: each task updates those of its own results; a sum over stages has a partial sum for each stage."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpp_flax.engine.passes.loop.label import Labels
from jaxpp_flax.engine.passes.loop.task_drafts import Key, TaskDrafts
from jaxpp_flax.engine.tracing.ir import Atom, Graph, Value, applied, struct_of
from jaxpp_flax.engine.tracing.treduce import AddOp, Concat, MaxOp, Op

__all__ = ["DraftAccumulator", "accumulate", "split_sums"]


class DraftAccumulator(NamedTuple):
    """An `Accumulator` whose task has no number yet."""

    key: Key
    state: Value
    result: Value
    init: Graph
    ordered: bool


def split_sums(labels: Labels, value: Value) -> Any:
    """Split a sum over several stages into a nested pair of addends; return any other value itself."""
    equation = labels.body.producer.get(value)
    if equation is None or equation.name not in ("add_any", "add") or equation not in labels.phase:
        return value
    operands = [labels.resolve(a) for a in equation.inputs]
    alike = all(isinstance(a, Value) and a.aval.shape == value.aval.shape for a in operands)
    if labels.users.get(value, 0) > 1 or not alike:
        return value
    phases = [_phase_of(labels, a) for a in operands]
    if None in phases or phases[0] == phases[1]:
        return value
    return tuple(split_sums(labels, a) for a in operands if isinstance(a, Value))


def _phase_of(labels: Labels, atom: Atom) -> int | None:
    equation = labels.body.producer.get(atom) if isinstance(atom, Value) else None
    return labels.phase.get(equation) if equation is not None else None


def accumulate(drafts: TaskDrafts, atom: Atom, op: Op) -> DraftAccumulator:
    """Append `op`'s update of an accumulator to the task that makes `atom`."""
    key = drafts.home(atom)
    aval = struct_of(atom.aval)
    # Arrays that a user's operation captures become part of the program.
    init = applied(jax.make_jaxpr(lambda: op.state(drafts.body.length, aval))(), [])
    state = Value(init.outputs[0].aval)
    drafts.states.append(state)
    update = jax.make_jaxpr(op.update)(struct_of(state.aval), aval, jax.ShapeDtypeStruct((), jnp.int32))
    graph = applied(update, [state, atom, drafts.body.index])
    result = graph.outputs[0]
    extra = drafts.extra.setdefault(key, [])
    extra.extend(graph.equations)
    if not isinstance(result, Value) or result not in {v for e in graph.equations for v in e.outputs}:
        result = drafts.copy(key, result)  # the operation returns its operand unchanged: copy it to a new value
    drafts.returns.setdefault(key, []).append(result)
    wanted = drafts.wanted.setdefault(key, [])
    wanted.extend(a for e in graph.equations for a in e.inputs if isinstance(a, Value))
    # A subclass may do something else: it is a user's own operation.
    ordered = type(op) not in (AddOp, MaxOp, Concat)
    return DraftAccumulator(key, state, result, init, ordered)
