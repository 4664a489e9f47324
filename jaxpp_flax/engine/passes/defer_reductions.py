"""Reduce data-parallel gradients once, after the loop, instead of in every microbatch.

On an Auto mesh a weight gradient contracts the sharded batch dimension, and XLA adds an all-reduce to every backward
task. Here that contraction keeps the shards apart: with D shards, the gradient of shape (...) becomes D partial
gradients of shape (D, ...), each on the device that made it; these are accumulated, and their sum over the first
axis, taken after the loop, is the one reduction. A gradient qualifies if it is linear in contractions over the batch
dimension, each used for nothing else; the others are left as they are, which is slower and no less right. What is
linear, in which dtypes, stands in `linear`. Scans over layers are looked into: the gradients that a scan stacks or adds
up qualify by what its body does. So are shard_maps: a gradient that the body sums over the data axis last of all
qualifies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import primitives
from jax.sharding import NamedSharding, PartitionSpec

from jaxpp_flax.engine.analyses.batch_dimensions import BatchDim, inside_scan, propagate
from jaxpp_flax.engine.analyses.linearity import LINEAR, Operands, accumulates, summed_in
from jaxpp_flax.engine.analyses.scans import Scan, open_scan, scan_again
from jaxpp_flax.engine.analyses.shard_maps import shard_map_without_sums, summed_in_shard_map
from jaxpp_flax.engine.tracing.inline import body_of
from jaxpp_flax.engine.tracing.ir import Atom, Constant, Equation, Graph, Value, from_jaxpr, prune, struct_of
from jaxpp_flax.engine.tracing.markers import marker_p
from jaxpp_flax.engine.tracing.treduce import AddOp, Op

__all__ = ["Deferred", "defer_reductions"]


class Deferred(NamedTuple):
    """The new body; `axes[k]` are the mesh axes over which result k is still to be summed, or None."""

    body: Graph
    axes: tuple[Any, ...]


def defer_reductions(
    body: Graph,
    num_carry: int,
    operations: Sequence[Op],
    known: Mapping[Value, BatchDim],
    size: Callable[[Any], int],
    may_defer: Callable[[Value, Any], bool] = lambda value, axes: True,
) -> Deferred:
    """Rewrite the gradients of an inlined body that can be summed over the data axis after the loop.

    Args:
      body: plain calls inlined.
      num_carry: number of outputs before the results.
      operations: of the results; only sums are deferred.
      known: batch dimensions of the body's inputs.
      size: number of shards over given mesh axes.
      may_defer: whether a gradient may be kept as one partial sum per shard; not where the parameter itself is
        sharded over the same axes (FSDP), for the partial sums would undo that.
    """
    finder = _Finder(body, propagate(body.equations, known, size), size)
    axes: list[Any] = [None] * len(operations)
    chains: dict[int, _Chain] = {}
    for k, op in enumerate(operations):
        atom = body.outputs[num_carry + k]
        if type(op) is not AddOp or not isinstance(atom, Value) or not atom.aval.shape:
            continue
        if not accumulates(atom.aval.dtype):
            continue
        chain = finder.chain(atom)
        if chain is not None and may_defer(atom, chain.axes):
            chains[num_carry + k], axes[k] = chain, chain.axes
    if not chains:
        return Deferred(body, tuple(axes))
    equations, added, sums = finder.rewrite(list(chains.values()))
    outputs = list(body.outputs)
    for position, total in zip(chains, sums, strict=True):
        outputs[position] = total
    return Deferred(prune(_ordered(replace(body, equations=tuple(equations)), outputs, added)), tuple(axes))


@dataclass(frozen=True)
class _Chain:
    """The equations from the contractions over the batch to one gradient, in order.

    `scanned` holds the results of scans and shard_maps that are partial sums themselves.
    """

    value: Value
    equations: tuple[Equation, ...]
    axes: Any
    split: frozenset[Value]
    scanned: frozenset[Value]


@dataclass
class _Found:
    """What a search for a chain has collected."""

    equations: list[Equation] = field(default_factory=list)
    axes: set[Any] = field(default_factory=set)
    split: set[Value] = field(default_factory=set)
    scanned: set[Value] = field(default_factory=set)


@dataclass
class _OpenScan:
    """A scan with what its body shows; `chains` are those that make up its results, by position."""

    scan: Scan
    finder: _Finder
    chains: dict[int, tuple[_Chain, ...] | None] = field(default_factory=dict)


class _Finder:
    def __init__(self, body: Graph, dims: Mapping[Value, BatchDim], size: Callable[[Any], int]) -> None:
        self.body, self.dims, self.size = body, dims, size
        self.scans: dict[Equation, _OpenScan] = {}
        self.mapped: dict[Equation, Graph] = {}  # bodies of shard_maps
        self.producer = {v: e for e in body.equations for v in e.outputs}
        self.order = {e: i for i, e in enumerate(body.equations)}
        self.users: dict[Value, int] = {}
        for equation in body.equations:
            for atom in equation.inputs:
                if isinstance(atom, Value):
                    self.users[atom] = self.users.get(atom, 0) + 1
        for atom in body.outputs:
            if isinstance(atom, Value):
                self.users[atom] = self.users.get(atom, 0) + 1

    def chain(self, value: Value) -> _Chain | None:
        """How a value is made of contractions over the batch, or None if it is not linear in such."""
        found = _Found()
        if self._visit(value, found) is None or len(found.axes) != 1:
            return None
        ordered = sorted(dict.fromkeys(found.equations), key=self.order.__getitem__)
        return _Chain(value, tuple(ordered), found.axes.pop(), frozenset(found.split), frozenset(found.scanned))

    def _visit(self, value: Atom, found: _Found) -> Any:
        """The dtype that holds the shards' parts of a sum over the batch; None if `value` is not the sum of parts.

        Collects what lies between the contractions over the batch and the value.
        """
        equation = self.producer.get(value) if isinstance(value, Value) else None
        if not isinstance(value, Value) or equation is None or self.users.get(value, 0) != 1 or value in self.dims:
            return None
        if equation.name == "shard_map":
            axes = self._summed_in_shard_map(equation, equation.outputs.index(value))
            found.axes.add(axes)
            found.scanned.add(value)
            return value.aval.dtype if axes is not None and accumulates(value.aval.dtype) else None
        if equation.name == "scan":
            chains = self._scan_chains(equation, equation.outputs.index(value))
            found.axes.update(chain.axes for chain in chains or ())
            found.scanned.add(value)
            return value.aval.dtype if chains is not None else None
        tagged = [a for a in equation.inputs if isinstance(a, Value) and a in self.dims]
        if not tagged:
            kept = self._passed_on(equation, found)
        else:
            kept = summed_in(equation)
            if kept is None or not self._contracts_batch(equation, tagged):
                return None
            found.split.update(tagged)
            found.axes.update(self.dims[a][1] for a in tagged)
        found.equations.append(equation)
        return kept

    def _passed_on(self, equation: Equation, found: _Found) -> Any:
        """The dtype that holds the parts behind an operation on sums over the batch, by the table of linear ones."""
        rule = LINEAR.get(equation.primitive)
        if rule is None:
            return None
        summands, others = equation.inputs[:1], equation.inputs[1:]
        if rule.operands is Operands.EVERY:
            summands, others = equation.inputs, ()
        elif rule.operands is Operands.EITHER and self._depends(others[0]):
            summands, others = others, summands
        if any(self._depends(a) for a in others):
            return None
        if rule.operands is Operands.PADDED and not all(self._is_zero(a) for a in others):
            return None
        kept = [self._visit(a, found) for a in summands]
        if any(dtype is None for dtype in kept):
            return None
        return rule.keeps(equation, kept[0])

    def _scan_chains(self, equation: Equation, position: int) -> tuple[_Chain, ...] | None:
        """How a scan's result is a sum over the batch: stacked by the scan, or added up from zero in its carry."""
        if equation.effects:
            return None
        opened = self.scans.get(equation)
        if opened is None:
            scan = open_scan(equation)
            at = {i: self.dims[a] for i, a in enumerate(equation.inputs) if isinstance(a, Value) and a in self.dims}
            finder = _Finder(scan.body, inside_scan(scan, at, self.size), self.size)
            opened = self.scans[equation] = _OpenScan(scan, finder)
        if position not in opened.chains:
            summands: list[Atom] = [opened.scan.body.outputs[position]]
            if position < opened.scan.num_carry:
                start = equation.inputs[opened.scan.num_consts + position]
                summands = opened.finder.added_to(opened.scan.carry_in[position], summands[0])
                summands = summands if self._is_zero(start) and accumulates(start.aval.dtype) else []
            chains = [opened.finder.chain(s) if isinstance(s, Value) else None for s in summands]
            found = tuple(chain for chain in chains if chain is not None)
            opened.chains[position] = found if found and len(found) == len(chains) else None
        return opened.chains[position]

    def _summed_in_shard_map(self, equation: Equation, position: int) -> Any:
        """The axes of the batch over which a shard_map itself sums up one of its results, or None."""
        axes = {self.dims[a][1] for a in equation.inputs if isinstance(a, Value) and a in self.dims}
        if equation.effects or len(axes) != 1:
            return None
        if equation not in self.mapped:
            self.mapped[equation] = body_of(equation)
        (over,) = axes
        return over if summed_in_shard_map(equation, self.mapped[equation], position, over) else None

    def added_to(self, before: Value, after: Atom) -> list[Atom]:
        """What the body adds to a carry in each step, if that is all that it does with it; or else nothing."""
        summands: list[Atom] = []
        while after is not before:
            made = self.producer.get(after) if isinstance(after, Value) else None
            if made is None or made.name not in ("add", "add_any") or self.users.get(after) != 1:  # type: ignore[arg-type]
                return []
            first, second = made.inputs
            if not self._descends(first, before):
                first, second = second, first
            summands.append(second)
            after = first
        return summands if self.users.get(before) == 1 else []

    def _descends(self, atom: Atom, from_value: Value) -> bool:
        """Whether a sum has a value among its summands."""
        while atom is not from_value:
            made = self.producer.get(atom) if isinstance(atom, Value) else None
            if made is None or made.name not in ("add", "add_any"):
                return False
            if self._descends(made.inputs[1], from_value):
                return True
            atom = made.inputs[0]
        return True

    def rewrite(self, chains: Sequence[_Chain]) -> tuple[list[Equation], list[Equation], list[Value]]:
        """The graph's equations with its scans made anew, those to add, and the chains' partial sums."""
        scanned = {v for chain in chains for v in chain.scanned}
        partial: dict[Value, tuple[Value, int]] = {}
        equations: list[Equation] = []
        for equation in self.body.equations:
            if scanned.isdisjoint(equation.outputs):
                equations.append(equation)
            elif equation.name == "shard_map":
                equations.extend(self._without_sums(equation, scanned, partial))
            else:
                equations.extend(self._rebuild(equation, scanned, partial))
        added: list[Equation] = []
        sums: list[Value] = []
        for chain in chains:
            made = self.producer[chain.value]
            more, total = _partial_sums(chain, self.dims, partial, self.size(chain.axes), made)
            added.extend(more)
            sums.append(total)
        return equations, added, sums

    def _without_sums(
        self, equation: Equation, scanned: set[Value], partial: dict[Value, tuple[Value, int]]
    ) -> list[Equation]:
        """A shard_map whose deferred results are the parts of the shards, along a first dimension."""
        positions = [k for k, v in enumerate(equation.outputs) if v in scanned]
        sums = {k: self._summed_in_shard_map(equation, k) for k in positions}
        equations, parts = shard_map_without_sums(equation, self.mapped[equation], sums)
        partial.update({equation.outputs[k]: (part, 0) for k, part in parts.items()})
        return equations

    def _rebuild(
        self, equation: Equation, scanned: set[Value], partial: dict[Value, tuple[Value, int]]
    ) -> list[Equation]:
        """A scan whose deferred results are partial sums; `partial` tells these and their dimension of shards."""
        opened = self.scans[equation]
        scan = opened.scan
        chains = {k: c for k, c in opened.chains.items() if c is not None and equation.outputs[k] in scanned}
        equations, added, sums = opened.finder.rewrite([chain for several in chains.values() for chain in several])
        operands, zeros = list(equation.inputs), list[Equation]()
        inputs, outputs = list(scan.body.inputs), list(scan.body.outputs)
        remaining = iter(sums)
        for position, several in chains.items():
            total = next(remaining)
            if position < scan.num_carry:
                at, aval = scan.num_consts + position, struct_of(total.aval)
                start, _ = from_jaxpr(jax.make_jaxpr(lambda a=aval: jax.numpy.zeros_like(a))(), [])
                zeros.extend(
                    replace(e, source=equation.source, transposed=equation.transposed) for e in start.equations
                )
                inputs[at], operands[at] = Value(total.aval), start.outputs[0]
                for summand in (inputs[at], *(next(remaining) for _ in several[1:])):
                    add, _ = from_jaxpr(jax.make_jaxpr(jax.lax.add)(aval, aval), [summand, total])
                    added.extend(add.equations)
                    total = add.outputs[0]
            outputs[position] = total
        body = prune(_ordered(Graph(tuple(inputs), tuple(outputs), tuple(equations)), outputs, added))
        keep = [None if position in chains else v for position, v in enumerate(equation.outputs)]
        made, results = scan_again(equation, replace(scan, body=body), operands, keep)
        for position in chains:
            partial[equation.outputs[position]] = (results[position], int(position >= scan.num_carry))
        return [*zeros, *made]

    def _depends(self, atom: Atom) -> bool:
        """Whether an operand comes, through untagged values, from a contraction over the batch."""
        stack, seen = [atom], set[Atom]()
        while stack:
            current = stack.pop()
            if not isinstance(current, Value) or current in seen:
                continue
            seen.add(current)
            if current in self.dims:
                return True
            equation = self.producer.get(current)
            if equation is not None and equation.primitive is not marker_p:
                stack.extend(equation.inputs)
        return False

    def _contracts_batch(self, equation: Equation, tagged: Sequence[Value]) -> bool:
        if equation.name == "dot_general":
            (lc, rc), _ = equation.params["dimension_numbers"]
            left, right = equation.inputs
            if left not in self.dims or right not in self.dims:
                return False
            a, b = self.dims[left][0], self.dims[right][0]  # type: ignore[index]
            return a in lc and b in rc and tuple(lc).index(a) == tuple(rc).index(b)
        if equation.name == "reduce_sum":
            return self.dims[tagged[0]][0] in equation.params["axes"]
        if equation.name in ("scatter-add", "scatter_add"):
            operand, indices, updates = equation.inputs
            numbers = equation.params["dimension_numbers"]
            if operand in self.dims or indices not in self.dims or updates not in self.dims:
                return False
            if numbers.operand_batching_dims or numbers.scatter_indices_batching_dims or not self._is_zero(operand):
                return False
            at = self.dims[indices][0]  # type: ignore[index]
            free = [d for d in range(updates.aval.ndim) if d not in numbers.update_window_dims]
            return at < len(free) and free[at] == self.dims[updates][0]  # type: ignore[index]
        return False

    def _is_zero(self, atom: Atom) -> bool:
        """Whether an operand is a broadcast literal zero: copies of it may be added without a trace."""
        if isinstance(atom, Constant):
            return not np.any(np.asarray(atom.value))
        equation = self.producer.get(atom)
        return equation is not None and equation.name == "broadcast_in_dim" and self._is_zero(equation.inputs[0])


def _partial_sums(
    chain: _Chain,
    dims: Mapping[Value, BatchDim],
    partial: Mapping[Value, tuple[Value, int]],
    shards: int,
    made: Equation,
) -> tuple[list[Equation], Value]:
    """The chain once for each shard, as one vectorised computation in place of its last equation, `made`."""
    inside = {v for e in chain.equations for v in e.outputs}
    read = [a for e in chain.equations for a in e.inputs if isinstance(a, Value)]
    inputs = tuple(v for v in dict.fromkeys([*read, chain.value]) if v not in inside)
    graph = Graph(inputs, (chain.value,), tuple(map(_told_how_to_lie, chain.equations)))
    operands = [partial[v][0] if v in chain.scanned else v for v in inputs]
    axes = [partial[v][1] if v in chain.scanned else dims[v][0] if v in chain.split else None for v in inputs]

    def run(*xs: Any) -> Any:
        parts = list(xs)
        for i, (x, axis) in enumerate(zip(xs, axes, strict=True)):
            if inputs[i] in chain.split and axis is not None:
                shape = x.shape
                split = (*shape[:axis], shards, shape[axis] // shards, *shape[axis + 1 :])
                parts[i] = jax.lax.reshape(x, split, out_sharding=_split_sharding(x, axis))
        return jax.vmap(lambda *ys: graph.run(*ys)[0], in_axes=axes)(*parts)

    jaxpr = jax.make_jaxpr(run)(*(struct_of(v.aval) for v in operands))
    captured = [Constant(c, jax.typeof(c)) for c in getattr(jaxpr, "consts", ())]
    # A metric of the forward is a sum over the batch as well: only a gradient's sums belong to the backward.
    result, _ = from_jaxpr(jaxpr, [*captured, *operands], transposed=made.transposed)
    total = result.outputs[0]
    if not isinstance(total, Value):
        raise TypeError("a gradient over the batch turned out constant")
    return [replace(e, source=made.source) for e in result.equations], total


def _split_sharding(operand: Any, axis: int) -> NamedSharding | None:
    """On an Explicit mesh a split dimension needs to be told where its sharding goes: to the major part."""
    sharding = struct_of(jax.typeof(operand)).sharding
    if sharding is None:
        return None
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[: axis + 1], None, *sharding.spec[axis + 1 :]))


def _told_how_to_lie(equation: Equation) -> Equation:
    """On an Explicit mesh a reshape of the parts, whose first dimension is sharded, needs to be told how the rest lies.

    The sum itself is reshaped without being told.
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
        position = max((defined_at.get(a, -1) for a in equation.inputs if isinstance(a, Value)), default=-1)
        slots.setdefault(position, []).append(equation)
        defined_at.update(dict.fromkeys(equation.outputs, position))
    equations = list(slots.get(-1, []))
    for index, equation in enumerate(body.equations):
        equations.append(equation)
        equations.extend(slots.get(index, []))
    return Graph(body.inputs, tuple(outputs), tuple(equations))
