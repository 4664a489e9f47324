"""Reduce data-parallel gradients once, after the loop, instead of in every microbatch.

On an Auto mesh a weight gradient contracts the sharded batch dimension, and XLA adds an all-reduce to every backward
task. This pass keeps the shards of the contraction apart: with D shards, the gradient of shape (...) becomes D partial
gradients of shape (D, ...), each on the device that made it. The loop accumulates these. Their sum over the first
axis, taken after the loop, is the only reduction. A gradient qualifies if it is linear in contractions over the batch
dimension, each used for nothing else. Other gradients stay unchanged, which is slower but equally correct. See
`analyses/sums_over_batch.py` for the search, and `analyses/linearity.py` for the linear operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
from jax.extend.core import primitives
from jax.sharding import NamedSharding, PartitionSpec

from jaxpp_flax.engine.analyses.batch_dimensions import BatchDim, ShardCounts, propagate
from jaxpp_flax.engine.analyses.inner_bodies import scan_again, shard_map_without_sums
from jaxpp_flax.engine.analyses.linearity import accumulates
from jaxpp_flax.engine.analyses.sums_over_batch import Chain, ChainFinder
from jaxpp_flax.engine.arrays.mesh import axes_in
from jaxpp_flax.engine.passes.loop.open_loops import Opened, OpenLoop
from jaxpp_flax.engine.tracing.hints import without_hints
from jaxpp_flax.engine.tracing.inline import inline
from jaxpp_flax.engine.tracing.ir import Atom, Equation, Graph, Value, applied, emit, prune, struct_of, values
from jaxpp_flax.engine.tracing.loop_body import LoopBody, sliced_by_index
from jaxpp_flax.engine.tracing.primitives import Batch, facts_of
from jaxpp_flax.engine.tracing.treduce import AddOp, Concat, LastOp, MaxOp, Op

__all__ = ["defer_in_loops", "defer_reductions"]


def defer_in_loops(step: Opened, specs: Sequence[PartitionSpec], shards: ShardCounts) -> Opened:
    """Defer the reductions of every loop that slices its microbatches from sharded arguments.

    `specs` gives the partition of each input of the step inside a submesh.
    """
    spec_of = dict(zip(step.graph.inputs, specs, strict=True))
    known = {v: dim for v, spec in spec_of.items() if (dim := shards.batch_dim(spec)) is not None}
    dims = propagate(step.graph.equations, known, shards) if known else {}
    return step.each(lambda loop: _defer_in_loop(loop, spec_of, dims, shards))


def _defer_in_loop(
    loop: OpenLoop, spec_of: Mapping[Value, PartitionSpec], dims: Mapping[Value, BatchDim], shards: ShardCounts
) -> OpenLoop:
    operands = dict(zip(loop.body.constants, loop.constants, strict=True))
    batch = {v: dims[a] for v, a in operands.items() if isinstance(a, Value) and a in dims}
    if not batch:
        return loop
    body = loop.body.rewritten(without_hints(inline(loop.body.graph, flatten=True, remat=True)))
    sliced = sliced_by_index(body.equations, body.index)
    batch = {v: dim for v, dim in batch.items() if v in sliced}
    sharded = {
        (v.aval.shape, name)
        for v, a in operands.items()
        for name in axes_in(spec_of.get(a, ()) if isinstance(a, Value) and v not in batch else ())
        if v not in loop.gathered
    }

    def may_defer(gradient: Value, axes: Any) -> bool:
        typed = struct_of(gradient.aval).sharding
        taken = axes_in(typed.spec) if loop.gathered and typed is not None else ()
        return all((gradient.aval.shape, name) not in sharded and name not in taken for name in axes_in((axes,)))

    body, axes, batch_dims = defer_reductions(body, batch, shards, may_defer)
    body, tails = _with_tails(body, loop.tails, axes)
    parts = math.prod(shards(entry) for entry in {entry for _, entry in batch.values()})
    return replace(loop, body=body, data_axes=axes, batch_dims=batch_dims, batch_shards=parts, tails=tails)


def _with_tails(
    body: LoopBody, tails: Sequence[Equation | None], axes: Sequence[Any]
) -> tuple[LoopBody, tuple[Equation | None, ...]]:
    """Let the body itself place a result that is not deferred, so that its accumulator stays sharded."""
    results, equations = list(body.results), list(body.equations)
    left = list(tails)
    for k, tail in enumerate(tails):
        if tail is not None and axes[k] is None:
            placed = Value(tail.outputs[0].aval.update(dtype=results[k].aval.dtype))
            equations.append(replace(tail, inputs=(results[k],), outputs=(placed,)))
            results[k], left[k] = placed, None
    return body.rewritten(Graph(body.inputs, (*body.next_carry, *results), tuple(equations))), tuple(left)


class Deferred(NamedTuple):
    """The new body; `axes[k]` are the mesh axes over which result k must still be summed, or None.

    `batch_dims[k]` is the dimension of accumulator k over the shards of the batch, with its mesh axes, or None. A body
    that maps its work over the shards itself (`jax.vmap(..., spmd_axis_name="data")`) has such results from the start:
    their accumulators stay sharded through the loop, and the step's own sum after it is the only reduction.
    """

    body: LoopBody
    axes: tuple[Any, ...]
    batch_dims: tuple[BatchDim | None, ...]


def defer_reductions(
    body: LoopBody,
    known: Mapping[Value, BatchDim],
    size: Callable[[Any], int],
    may_defer: Callable[[Value, Any], bool] = lambda value, axes: True,
) -> Deferred:
    """Rewrite the gradients of an inlined body that can be summed over the data axis after the loop.

    Args:
      body: a body with plain calls inlined.
      known: the batch dimensions of the body's inputs.
      size: returns the number of shards over given mesh axes.
      may_defer: returns whether a gradient may be kept as one partial sum per shard; not if the parameter itself is
        sharded over the same axes (FSDP): the partial sums would undo the sharding.
    """
    finder = ChainFinder(body.graph, propagate(body.equations, known, size), size)
    axes: list[Any] = [None] * len(body.operations)
    dims = [_kept_by(op, a, finder.dims.get(a)) if isinstance(a, Value) else None for a, op in _reduced(body)]
    chains: dict[int, Chain] = {}
    for k, (atom, op) in enumerate(_reduced(body)):
        if type(op) is not AddOp or not isinstance(atom, Value):
            continue
        chain = finder.chain(atom) if atom.aval.shape and accumulates(atom.aval.dtype) else None
        if chain is not None and may_defer(atom, chain.axes):
            chains[len(body.carry) + k], axes[k], dims[k] = chain, chain.axes, (0, chain.axes)
    if not chains:
        return Deferred(body, tuple(axes), tuple(dims))
    equations, added, sums = _rewrite(finder, list(chains.values()))
    outputs = list(body.outputs)
    for position, total in zip(chains, sums, strict=True):
        outputs[position] = total
    rewritten = prune(_ordered(replace(body.graph, equations=tuple(equations)), outputs, added))
    return Deferred(body.rewritten(rewritten), tuple(axes), tuple(dims))


def _reduced(body: LoopBody) -> Iterator[tuple[Atom, Op]]:
    """Yield each result of the body with its operation."""
    return zip(body.results, body.operations, strict=True)


def _kept_by(op: Op, value: Value, batch_dim: BatchDim | None) -> BatchDim | None:
    """Return the batch dimension of an operation's accumulator from that of the reduced value."""
    if batch_dim is None:
        return None
    dim, axes = batch_dim
    if isinstance(op, Concat):  # the axis of the microbatches is new
        return dim + (op.axis % (value.aval.ndim + 1) <= dim), axes
    return batch_dim if isinstance(op, (AddOp, MaxOp, LastOp)) else None


def _rewrite(finder: ChainFinder, chains: Sequence[Chain]) -> tuple[list[Equation], list[Equation], list[Value]]:
    """Return the graph's equations with rebuilt scans, the equations to add, and the chains' partial sums."""
    scanned = {v for chain in chains for v in chain.scanned}
    partial: dict[Value, tuple[Atom, int]] = {}
    equations: list[Equation] = []
    for equation in finder.body.equations:
        if scanned.isdisjoint(equation.outputs):
            equations.append(equation)
        elif facts_of(equation.primitive).batch is Batch.SHARD_MAP:
            positions = [k for k, v in enumerate(equation.outputs) if v in scanned]
            sums = {k: finder.summed_by_shard_map(equation, k) for k in positions}
            made, parts = shard_map_without_sums(equation, finder.mapped[equation], sums)
            equations.extend(made)
            partial.update({equation.outputs[k]: (part, 0) for k, part in parts.items()})
        else:
            equations.extend(_rebuild(finder, equation, scanned, partial))
    totals = [_partial_sums(chain, finder, partial) for chain in chains]
    return equations, [e for added, _ in totals for e in added], [total for _, total in totals]


def _rebuild(
    finder: ChainFinder, equation: Equation, scanned: set[Value], partial: dict[Value, tuple[Atom, int]]
) -> list[Equation]:
    """Rebuild a scan so that its deferred results are partial sums; `partial` gets these and their shard dimension."""
    opened = finder.scans[equation]
    scan = opened.scan
    chains = {k: c for k, c in opened.chains.items() if c is not None and equation.outputs[k] in scanned}
    equations, added, sums = _rewrite(opened.finder, [chain for several in chains.values() for chain in several])
    operands, zeros = list(equation.inputs), list[Equation]()
    inputs, outputs = list(scan.body.inputs), list(scan.body.outputs)
    remaining = iter(sums)
    for position, several in chains.items():
        total = next(remaining)
        if position < scan.num_carry:
            at, aval = scan.num_consts + position, struct_of(total.aval)
            start, (operands[at],) = emit(lambda a=aval: jax.numpy.zeros_like(a), [], like=equation)
            zeros.extend(start)
            inputs[at] = Value(total.aval)
            for summand in (inputs[at], *(next(remaining) for _ in several[1:])):
                add, (total,) = emit(jax.lax.add, [summand, total])
                added.extend(add)
        outputs[position] = total
    body = prune(_ordered(Graph(tuple(inputs), tuple(outputs), tuple(equations)), outputs, added))
    keep = [None if position in chains else v for position, v in enumerate(equation.outputs)]
    made, results = scan_again(equation, replace(scan, body=body), operands, keep)
    for position in chains:
        partial[equation.outputs[position]] = (results[position], int(position >= scan.num_carry))
    return [*zeros, *made]


def _partial_sums(
    chain: Chain, finder: ChainFinder, partial: Mapping[Value, tuple[Atom, int]]
) -> tuple[list[Equation], Value]:
    """Run the chain once for each shard, as one vectorised computation that replaces its last equation."""
    dims, made, shards = finder.dims, finder.producer[chain.value], finder.size(chain.axes)
    inside = {v for e in chain.equations for v in e.outputs}
    read = [v for e in chain.equations for v in values(e.inputs)]
    inputs = tuple(v for v in dict.fromkeys([*read, chain.value]) if v not in inside)
    graph = Graph(inputs, (chain.value,), tuple(map(_told_how_to_lie, chain.equations)))
    operands = [partial[v][0] if v in chain.scanned else v for v in inputs]
    axes = [partial[v][1] if v in chain.scanned else dims[v][0] if v in chain.split else None for v in inputs]

    def run(*xs: Any) -> Any:
        parts = list(xs)
        for i, (x, axis) in enumerate(zip(xs, axes, strict=True)):
            if inputs[i] in chain.split and axis is not None:
                split = (*x.shape[:axis], shards, x.shape[axis] // shards, *x.shape[axis + 1 :])
                parts[i] = jax.lax.reshape(x, split, out_sharding=_split_sharding(x, axis))
        return jax.vmap(lambda *ys: graph.run(*ys)[0], in_axes=axes)(*parts)

    jaxpr = jax.make_jaxpr(run)(*(struct_of(v.aval) for v in operands))
    # A metric of the forward is a sum over the batch too: only a gradient's sums belong to the backward.
    result = applied(jaxpr, operands, transposed=made.transposed)
    total = result.outputs[0]
    if not isinstance(total, Value):
        raise TypeError("a gradient over the batch turned out constant")
    return [replace(e, source=made.source) for e in result.equations], total


def _split_sharding(operand: Any, axis: int) -> NamedSharding | None:
    """Return the sharding of a split dimension on an Explicit mesh: the major part keeps the sharding."""
    sharding = struct_of(jax.typeof(operand)).sharding
    if sharding is None:
        return None
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[: axis + 1], None, *sharding.spec[axis + 1 :]))


def _told_how_to_lie(equation: Equation) -> Equation:
    """Give a reshape on an Explicit mesh its sharding: the parts' first dimension is sharded, so JAX needs the rest.

    A reshape of the sum itself needs no sharding.
    """
    sharding = struct_of(equation.outputs[0].aval).sharding
    if equation.primitive is not primitives.reshape_p or sharding is None:
        return equation
    return replace(equation, params={**equation.params, "sharding": sharding})


def _ordered(body: Graph, outputs: Sequence[Atom], added: Sequence[Equation]) -> Graph:
    """Insert equations as early as their operands allow: program order carries meaning for the labels."""
    defined_at = {v: i for i, e in enumerate(body.equations) for v in e.outputs}
    slots: dict[int, list[Equation]] = {}
    for equation in added:
        position = max((defined_at.get(v, -1) for v in values(equation.inputs)), default=-1)
        slots.setdefault(position, []).append(equation)
        defined_at.update(dict.fromkeys(equation.outputs, position))
    equations = list(slots.get(-1, []))
    for index, equation in enumerate(body.equations):
        equations += [equation, *slots.get(index, [])]
    return Graph(body.inputs, tuple(outputs), tuple(equations))
