"""Reduce data-parallel gradients once, after the loop, instead of in every microbatch.

A weight gradient contracts the sharded batch dimension, and every backward task would end with an all-reduce. This pass
keeps the shards of the contraction apart: with D shards, the gradient of shape (...) becomes D partial gradients of
shape (D, ...), each on the device that made it. The loop accumulates these. Their sum over the first axis, taken after
the loop, is the only reduction. A gradient qualifies if it is linear in contractions over the batch dimension (see
`analyses/batch_flow.py`). Other gradients stay unchanged, which is slower but equally correct. With several axes, a
parameter may be sharded over the last ones (FSDP): its gradient has a part for each shard over the first ones.

On an Explicit mesh JAX has a type for such a gradient, `unreduced`. It does not decide this question: JAX 0.10 to 0.12
let parts of floats be converted to integers, which cuts each of them off, and refuse to scale or to divide them. A step
that uses the type asks for one reduction: a warning names a result for which this pass does not find it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
from jax.extend import source_info_util
from jax.extend.core import primitives
from jax.sharding import NamedSharding, PartitionSpec

from jaxpp_flax.engine.analyses.batch_dimensions import BatchDim, ShardCounts
from jaxpp_flax.engine.analyses.batch_flow import BatchFlow, batch_in, batch_of
from jaxpp_flax.engine.analyses.data_flow import ancestors
from jaxpp_flax.engine.analyses.inner_bodies import shard_map_without_sums
from jaxpp_flax.engine.analyses.linearity import accumulates
from jaxpp_flax.engine.arrays.mesh import axes_in, entry_of, keep_axes
from jaxpp_flax.engine.passes.fsdp.rule import FsdpWarning
from jaxpp_flax.engine.passes.loop.loop import Loop, each_loop
from jaxpp_flax.engine.program.specs import followed_spec
from jaxpp_flax.engine.tracing.ir import Atom, Constant, Equation, Graph, Value, emit, struct_of, values
from jaxpp_flax.engine.tracing.loop_body import LoopBody
from jaxpp_flax.engine.tracing.primitives import Batch, facts_of
from jaxpp_flax.engine.tracing.treduce import AddOp, Concat, LastOp, MaxOp, Op
from jaxpp_flax.messages import warn_user

__all__ = ["defer_in_loops", "defer_reductions"]


def defer_in_loops(step: Graph, specs: Sequence[PartitionSpec], shards: ShardCounts) -> Graph:
    """Defer the reductions of every loop that slices its microbatches from sharded arguments.

    `specs` gives the partition of each input of the step inside a submesh.
    """
    spec_of = dict(zip(step.inputs, specs, strict=True))
    dims = batch_of(step, specs, shards)
    for equation in step.equations:  # a narrower copy of a sharded parameter is sharded alike
        if (spec := followed_spec(equation, spec_of)) is not None:
            spec_of[equation.outputs[0]] = spec
    return each_loop(step, Loop, lambda loop: _defer_in_loop(loop, spec_of, dims, shards))


def _defer_in_loop(
    loop: Loop, spec_of: Mapping[Value, PartitionSpec], dims: Mapping[Value, BatchDim], shards: ShardCounts
) -> Loop:
    if dims.keys().isdisjoint(loop.constants):
        return loop
    body = loop.flat_body()
    batch = batch_in(body, loop.constants, dims)
    if not batch:
        return loop
    sharded = {
        (v.aval.shape, name)
        for v, a in zip(body.constants, loop.constants, strict=True)
        if v in body.reads  # not what a narrower copy in front of the loop has replaced
        for name in axes_in(spec_of.get(a, ()) if isinstance(a, Value) and v not in batch else ())
    }

    def may_defer(gradient: Value, axes: Any) -> bool:
        return all((gradient.aval.shape, name) not in sharded for name in axes_in((axes,)))

    over = {entry for _, entry in batch.values()}
    later = axes_in(over) if loop.gathered else ()  # a gradient is placed like its parameter after the loop
    deferred = defer_reductions(body, batch, shards, may_defer, later)
    for count in range(max(len(axes_in((entry,))) for entry in over) - 1, 0, -1):
        # The first axes alone: the parameters of some gradients are sharded over the other ones.
        fewer = {v: (dim, entry_of(axes_in((entry,))[:count])) for v, (dim, entry) in batch.items()}
        deferred = deferred.and_then(defer_reductions(deferred.body, fewer, shards, may_defer, later))
    body, axes, batch_dims = deferred
    parts = math.prod(map(shards, over))
    _warn_of_reductions(deferred, batch, shards, loop.where)
    return replace(loop, body=body, data_axes=axes, batch_dims=batch_dims, batch_shards=parts)


class Deferred(NamedTuple):
    """The new body; `axes[k]` are the mesh axes over which result k must still be summed, or None.

    `batch_dims[k]` is the dimension of accumulator k over the shards of the batch, with its mesh axes, or None. A body
    that maps its work over the shards itself (`jax.vmap(..., spmd_axis_name="data")`) has such results from the start:
    their accumulators stay sharded through the loop, and the step's own sum after it is the only reduction.
    """

    body: LoopBody
    axes: tuple[Any, ...]
    batch_dims: tuple[BatchDim | None, ...]

    def and_then(self, more: Deferred) -> Deferred:
        """Return what `more`, of this body, has found in addition."""
        axes = tuple(one or other for one, other in zip(self.axes, more.axes, strict=True))
        dims = tuple(one or other for one, other in zip(self.batch_dims, more.batch_dims, strict=True))
        return Deferred(more.body, axes, dims)


def defer_reductions(
    body: LoopBody,
    batch_dims: Mapping[Value, BatchDim],
    size: Callable[[Any], int],
    may_defer: Callable[[Value, Any], bool] = lambda value, axes: True,
    later: Collection[str] = (),
) -> Deferred:
    """Rewrite the gradients of an inlined body that can be summed over the data axis after the loop.

    Args:
      body: a body with plain calls inlined.
      batch_dims: the batch dimensions of the body's inputs.
      size: returns the number of shards over given mesh axes.
      may_defer: returns whether a gradient may be kept as one partial sum per shard; not if the parameter itself is
        sharded over the same axes (FSDP): the partial sums would undo the sharding.
      later: the mesh axes over which gradients are placed after the loop.
    """
    flow = BatchFlow(batch_dims, size, later)

    def may_wait(position: int, value: Value, axes: Any) -> bool:
        k = position - len(body.carry)
        linear = k >= 0 and type(body.operations[k]) in (AddOp, Concat, LastOp)
        asked = body.partial_over[position : position + 1]  # none in a body that no step of a user made
        allowed = any(over.issuperset(axes_in((axes,))) for over in asked) or may_defer(value, axes)
        return linear and accumulates(value.aval.dtype) and allowed

    flow.keep_in_parts(body, may_wait)
    axes = tuple(map(flow.parts_over, body.results))
    kept = [_kept_by(op, atom, flow.dim_of(atom)) for op, atom in zip(body.operations, body.results, strict=True)]
    dims = tuple(dim if over is None else (0, over) for dim, over in zip(kept, axes, strict=True))
    if not any(axes):
        return Deferred(body, axes, dims)
    results = zip(body.operations, body.results, axes, strict=True)
    operations = tuple(op if over is None else _of_parts(op, atom) for op, atom, over in results)
    graph, numbers = _InParts(flow).rewritten(body)
    body = replace(body.rewritten(graph), operations=operations, numbers=body.numbers | numbers)
    return Deferred(body, axes, dims)


def _warn_of_reductions(deferred: Deferred, batch: Collection[Value], shards: ShardCounts, where: str) -> None:
    """Warn of results that the step's types keep as partial sums, and that are reduced in every microbatch."""
    body = deferred.body
    for k, (value, asked) in enumerate(zip(body.results, body.partial_over[body.num_carry :], strict=True)):
        missing = {name for name in asked if shards(name) > 1}.difference(axes_in((deferred.axes[k],)))
        if missing and not set(ancestors([value], body.producer)).isdisjoint(batch):
            warn_user(
                f"result {k} of the treduce at {where}, {value.aval.str_short()}, has a type of partial sums over "
                f"{sorted(missing)} (`jax.P(unreduced=)`), but it is no sum over examples in its dtype: it is reduced "
                "in every microbatch, not once, which is right and slower. Sum it in the dtype in which it is "
                "computed; docs/internals/engine.md, 'Data axes', has the rules. For parameters that are sharded over "
                'these axes, pass `fsdp="step"` in place of the types.',
                FsdpWarning,
            )


def _of_parts(op: Op, value: Atom) -> Op:
    """Return the operation for the parts of a value, whose first dimension is new: axes are counted from the end."""
    return Concat(op.position(value.aval.ndim) - value.aval.ndim - 1) if isinstance(op, Concat) else op


def _kept_by(op: Op, value: Atom, batch_dim: BatchDim | None) -> BatchDim | None:
    """Return the batch dimension of an operation's accumulator from that of the reduced value."""
    if batch_dim is None or not isinstance(op, (AddOp, Concat, MaxOp, LastOp)):
        return None
    dim, axes = batch_dim
    # The axis of the microbatches is new.
    return dim + (isinstance(op, Concat) and op.position(value.aval.ndim) <= dim), axes


class _InParts:
    """Applies the equations whose results are sums in parts: with D shards, the parts have the shape (D, ...)."""

    def __init__(self, flow: BatchFlow) -> None:
        self.flow = flow

    def rewritten(self, graph: Graph) -> tuple[Graph, frozenset[Value]]:
        """Return the graph with parts in place of these sums, also as its outputs; and the parts of single numbers."""
        parts: dict[Atom, Atom] = {}
        equations: list[Equation] = []
        for equation in graph.equations:
            kept = [v if self.flow.parts_over(v) is None else None for v in equation.outputs]
            if None not in kept:
                equations.append(equation)
                continue
            inputs = values(equation.inputs)

            def applied(*xs: Any, equation: Equation = equation, inputs: list[Value] = inputs) -> Sequence[Any]:
                return self._apply(equation, dict(zip(inputs, xs, strict=True)))

            applications, results = emit(applied, [parts.get(v, v) for v in inputs], kept, like=equation)
            equations += applications
            parts.update(zip(equation.outputs, results, strict=True))
        numbers = frozenset(values(new for old, new in parts.items() if old.aval.size == 1 and new is not old))
        return Graph(graph.inputs, tuple(parts.get(a, a) for a in graph.outputs), tuple(equations)), numbers

    def _apply(self, equation: Equation, held: Mapping[Atom, Any]) -> Sequence[Any]:
        """Apply an equation to arrays; `held` has the parts of the sums that are in parts, and so have the results."""
        operands = [a.value if isinstance(a, Constant) else held[a] for a in equation.inputs]
        sums = {k: axes for k, v in enumerate(equation.outputs) if (axes := self.flow.parts_over(v)) is not None}
        if not sums:
            return equation.bind(*operands)
        batch = facts_of(equation.primitive).batch
        if batch is Batch.SCAN:
            return self._scan(equation, operands)
        if batch is Batch.SHARD_MAP:
            return shard_map_without_sums(equation, self.flow.mapped[equation], sums)(*operands)
        if batch is Batch.PLACED:
            return [_placed_in_parts(equation, operands[0], sums[0])]
        if equation.primitive is primitives.reshape_p:  # its result has a sharded dimension now, so JAX must be told
            typed = struct_of(equation.outputs[0].aval).sharding
            equation = replace(equation, params={**equation.params, "sharding": typed})
        dims: list[int | None] = [None if self.flow.parts_over(atom) is None else 0 for atom in equation.inputs]
        for i, atom in enumerate(equation.inputs):
            if (examples := self.flow.dim_of(atom)) is not None:
                dims[i] = examples[0]
                operands[i] = _split(operands[i], examples[0], sums[0], self.flow.size(sums[0]))
        return [jax.vmap(lambda *xs: equation.bind(*xs)[0], in_axes=dims)(*operands)]

    def _scan(self, equation: Equation, operands: list[Any]) -> list[Any]:
        """Run a scan that adds up parts in its carry, and stacks parts."""
        scan, outer = self.flow.scans[equation], source_info_util.current_name_stack()
        first, second = scan.num_consts, scan.num_consts + scan.num_carry
        for k, carry in enumerate(scan.carry_in, first):
            axes, aval = self.flow.parts_over(carry), carry.aval
            if axes is not None and self.flow.parts_over(equation.inputs[k]) is None:  # then it is zero
                shape, sharding = (self.flow.size(axes), *aval.shape), _with_entry(aval, 0, axes)
                operands[k] = jax.numpy.zeros(shape, aval.dtype, out_sharding=sharding)

        def step(carry: Any, xs: Any) -> tuple[Any, Any]:
            held: dict[Atom, Any] = dict(zip(scan.body.inputs, (*operands[:first], *carry, *xs), strict=True))
            for inner in scan.body.equations:
                with inner.named_within(outer):
                    held.update(zip(inner.outputs, self._apply(inner, held), strict=True))
            results = [a.value if isinstance(a, Constant) else held[a] for a in scan.body.outputs]
            return tuple(results[: scan.num_carry]), tuple(results[scan.num_carry :])

        carry, stacked = jax.lax.scan(
            step, tuple(operands[first:second]), tuple(operands[second:]), equation.params["length"],
            reverse=equation.params["reverse"], unroll=equation.params["unroll"],
        )  # fmt: skip
        pairs = zip(equation.outputs[scan.num_carry :], stacked, strict=True)
        return [*carry, *(x if self.flow.parts_over(v) is None else jax.numpy.moveaxis(x, 1, 0) for v, x in pairs)]


def _placed_in_parts(equation: Equation, x: Any, axes: Any) -> Any:
    """Place the parts of a sum over `axes` as an equation places their sum over other axes, where types say so."""
    typed = struct_of(equation.outputs[0].aval).sharding
    if typed is None:
        return x
    names = axes_in((axes,))
    spec = keep_axes(typed.spec, lambda name: name not in names)
    return jax.sharding.reshard(x, NamedSharding(typed.mesh, PartitionSpec(axes, *spec.partitions)))


def _split(x: Any, dim: int, axes: Any, shards: int) -> Any:
    """Split a dimension into the shards over mesh axes, the first ones of those that shard it, and their examples."""
    shape = (*x.shape[:dim], shards, x.shape[dim] // shards, *x.shape[dim + 1 :])
    typed = struct_of(jax.typeof(x)).sharding
    if typed is not None:
        names = axes_in((typed.spec[dim],))
        spec = PartitionSpec(*typed.spec[:dim], axes, entry_of(names[len(axes_in((axes,))) :]), *typed.spec[dim + 1 :])
        typed = NamedSharding(typed.mesh, spec)
    return jax.lax.reshape(x, shape, out_sharding=typed)


def _with_entry(aval: Any, dim: int, entry: Any) -> NamedSharding | None:
    """Return the sharding of a type on an Explicit mesh, for one dimension more; None on an Auto mesh."""
    typed = struct_of(aval).sharding
    return typed and NamedSharding(typed.mesh, PartitionSpec(*typed.spec[:dim], entry, *typed.spec[dim:]))
