"""Follow the examples of a batch through a graph: which dimension of a value runs over them, which values are sums.

A sum over the examples can be held as one part for each shard. An operation that is linear in it leaves it so (see
`linearity`); any other one needs the sum whole. The analysis goes forward for what may be held in parts, and backward
for what must be whole, until neither changes. It follows scans: what their bodies stack or add up. It follows
shard_maps: what they themselves sum over the batch's axes at last.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxpp_flax.engine.analyses.batch_dimensions import BatchDim, ShardCounts, ways_of
from jaxpp_flax.engine.analyses.inner_bodies import Scan, ends_in_sum, open_scan
from jaxpp_flax.engine.analyses.linearity import accumulates, passes_parts, sums_in_parts
from jaxpp_flax.engine.arrays.mesh import axes_in, entry_of
from jaxpp_flax.engine.tracing.inline import body_of
from jaxpp_flax.engine.tracing.ir import Atom, Equation, Graph, Value, struct_of, values
from jaxpp_flax.engine.tracing.loop_body import LoopBody, sliced_by_index
from jaxpp_flax.engine.tracing.primitives import Batch, Operands, facts_of

__all__ = ["BatchFlow", "Sum", "batch_in", "batch_of", "propagate"]


@dataclass(frozen=True)
class Sum:
    """A sum over the examples; `axes` are the mesh axes of the shards that have a part each, None for zero."""

    axes: Any


# What is known of a value.
State = BatchDim | Sum | None


def propagate(
    equations: Iterable[Equation], batch_dims: Mapping[Value, BatchDim], size: Callable[[Any], int]
) -> dict[Value, BatchDim]:
    """Return the batch dimension of every value that has one; the arguments are those of `BatchFlow`."""
    flow = BatchFlow(batch_dims, size)
    flow.follow(equations)
    return {value: dim for value, dim in flow.states.items() if isinstance(dim, tuple)}


def batch_of(graph: Graph, specs: Sequence[PartitionSpec], shards: ShardCounts) -> dict[Value, BatchDim]:
    """Return the batch dimension of every value of a step that has one; `specs` are the partitions of its inputs."""
    pairs = zip(graph.inputs, specs, strict=True)
    batch_dims = {value: dim for value, spec in pairs if (dim := shards.batch_dim(spec)) is not None}
    return propagate(graph.equations, batch_dims, shards) if batch_dims else {}


def batch_in(body: LoopBody, operands: Sequence[Atom], dims: Mapping[Value, BatchDim]) -> dict[Value, BatchDim]:
    """Return the batch dimensions of what a body, with calls inlined, slices microbatches from.

    `operands` stand for the body's constants in the step, and `dims` has the batch dimensions there.
    """
    sliced = sliced_by_index(body.equations, body.index)
    pairs = zip(body.constants, operands, strict=True)
    return {v: dims[a] for v, a in pairs if v in sliced and isinstance(a, Value) and a in dims}


class BatchFlow:
    """What is known of the values of a graph, with plain calls inlined, and of those in the bodies of its scans.

    Args:
      known: the batch dimensions of the graph's inputs.
      size: returns the number of shards over given mesh axes.
      later: the mesh axes over which sums are placed later: an equation that places a sum over them leaves it in parts.
    """

    def __init__(
        self, batch_dims: Mapping[Value, BatchDim], size: Callable[[Any], int], later: Collection[str] = ()
    ) -> None:
        self.size, self.later = size, later
        self.states: dict[Value, BatchDim | Sum] = dict(batch_dims)
        self.whole: set[Value] = set()
        self.scans: dict[Equation, Scan] = {}
        self.mapped: dict[Equation, Graph] = {}  # bodies of shard_maps

    def parts_over(self, atom: Atom) -> Any:
        """Return the mesh axes of the shards that hold a part of a sum each; None for all other values."""
        state = self.states.get(atom) if isinstance(atom, Value) and atom not in self.whole else None
        return state.axes if isinstance(state, Sum) else None

    def dim_of(self, atom: Atom) -> BatchDim | None:
        """Return the batch dimension of a value that has one."""
        return _dim(self.states.get(atom)) if isinstance(atom, Value) else None

    def keep_in_parts(self, graph: Graph, may_wait: Callable[[int, Value, Any], bool]) -> None:
        """Find the sums that stay in parts up to the outputs of a graph.

        `may_wait` returns whether an output, by position and value, may be returned in parts over given mesh axes.
        """
        count = -1
        while count < len(self.whole):
            count = len(self.whole)
            self.follow(graph.equations)
            summed = [(k, v) for k, v in enumerate(graph.outputs) if isinstance(v, Value) and self.parts_over(v)]
            self._need(v for k, v in summed if not may_wait(k, v, self.parts_over(v)))
            self._need_before(graph.equations)

    def follow(self, equations: Iterable[Equation]) -> None:
        """Find the states of the results of equations in executable order."""
        for equation in equations:
            states = self._results(equation)
            for k, value in enumerate(equation.outputs):
                self._set(value, states[k] if k < len(states) else None)

    def _set(self, value: Value, state: State) -> None:
        if state is None or (isinstance(state, Sum) and value in self.whole):
            self.states.pop(value, None)
        else:
            self.states[value] = state

    def _state_of(self, atom: Atom) -> State:
        if isinstance(atom, Value):
            return self.states.get(atom)
        number = atom.aval.ndim == 0 and jnp.issubdtype(atom.aval.dtype, jnp.number)
        return Sum(None) if number and not np.asarray(atom.value) else None

    def _results(self, equation: Equation) -> Sequence[State]:
        facts = facts_of(equation.primitive)
        states = [self._state_of(atom) for atom in equation.inputs]
        if facts.batch is Batch.SCAN:
            return self._scan(equation, states)
        if facts.batch is Batch.EACH:
            return [_dim(state) for state in states]
        tagged = {i: state for i, state in enumerate(states) if isinstance(state, tuple)}
        axes = {over for _, over in tagged.values()}
        if len(axes) > 1 or not equation.outputs:
            return ()
        if not tagged:
            return [self._linear(equation, states)]
        (over,) = axes
        if facts.batch is Batch.SHARD_MAP:
            return self._shard_map(equation, tagged, over)
        dims = {(i, dim) for i, (dim, _) in tagged.items()}
        ways = ways_of(equation, over)
        targets = {ways[i][dim] if i < len(ways) else None for i, dim in dims}
        target = targets.pop() if len(targets) == 1 else None
        if target is None:
            return ()
        if target >= 0:
            return [self._held(value, target, over) for value in equation.outputs]
        together = {(i, dim) for i, way in enumerate(ways) for dim, to in enumerate(way) if to == target}
        others = [states[i] for i in facts.summed if i not in tagged]
        return [Sum(over)] if together == dims and all(map(_is_zero, others)) and sums_in_parts(equation) else []

    def _held(self, value: Value, dim: int, axes: Any) -> BatchDim | None:
        """Return a batch dimension with its mesh axes: the first ones, if a reshape has left it only the major part."""
        names = axes_in((axes,))
        for count in range(len(names), 0, -1):
            held = entry_of(names[:count])
            if value.aval.shape[dim] % self.size(held) == 0:
                return int(dim), held
        return None

    def _linear(self, equation: Equation, states: Sequence[State]) -> Sum | None:
        """Return the state of the result of a linear operation on sums, or on zero."""
        facts = facts_of(equation.primitive)
        rule, sums = facts.linear, {i: state for i, state in enumerate(states) if isinstance(state, Sum)}
        if isinstance(sharding := facts.placing_in(equation.params), NamedSharding) and 0 in sums:
            placed, typed = set(axes_in(sharding.spec)), struct_of(equation.outputs[0].aval).sharding is not None
            beside = typed and placed.isdisjoint(axes_in((sums[0].axes,)))
            return sums[0] if beside or not placed.isdisjoint(self.later) else None
        if rule is None or not sums:
            return None
        parted = [i for i, state in sums.items() if not _is_zero(state)]
        linear = {
            Operands.FIRST: 0 in sums and parted in ([], [0]),
            Operands.EITHER: len(parted) == 1,
            Operands.EVERY: len(sums) == len(states),
        }[rule.operands]
        axes = {sums[i].axes for i in parted}
        if not linear or len(axes) > 1:
            return None
        if not axes:
            return Sum(None) if rule.moves else None
        over = axes.pop()
        # On an Explicit mesh, the parts have another type than their sum: an array of that type does not fit them.
        whole = [atom for i, atom in enumerate(equation.inputs) if i not in parted]
        fitted = whole if facts.batch is Batch.ELEMENTWISE else (*whole, *equation.outputs)
        if any(_is_typed_over(over, atom) for atom in fitted):
            return None
        return Sum(over) if passes_parts(equation, rule, equation.inputs[parted[0]].aval.dtype) else None

    def _scan(self, equation: Equation, states: Sequence[State]) -> list[State]:
        """Follow a scan: what its carry is must hold before and after each step.

        Its initial value may be less: zero for a sum, or a value without a batch dimension.
        """
        if equation not in self.scans:
            self.scans[equation] = open_scan(equation)
        scan = self.scans[equation]
        first, second = scan.num_consts, scan.num_consts + scan.num_carry
        sliced = [(s[0] - 1, s[1]) if isinstance(s, tuple) and s[0] > 0 else None for s in states[second:]]
        of_inputs: list[State] = [*map(_dim, states[:first]), *states[first:second], *sliced]
        lost: set[int] = set()
        while True:
            for value, state in zip(scan.body.inputs, of_inputs, strict=True):
                self._set(value, state)
            self.follow(scan.body.equations)
            after = [self._state_of(atom) for atom in scan.body.outputs]
            before = [self.states.get(value) for value in scan.carry_in]
            changed = [k for k, state in enumerate(before) if k not in lost and state != after[k]]
            if not changed:
                break
            for k in changed:
                grows = _is_zero(before[k]) or (before[k] is None and isinstance(after[k], tuple))
                of_inputs[first + k] = after[k] if grows else None
                lost.update([k] if of_inputs[first + k] is None else [])
        stacked = [(s[0] + 1, s[1]) if isinstance(s, tuple) else s for s in after[scan.num_carry :]]
        of_results = [*before, *stacked]
        return list(map(_dim, of_results)) if equation.effects else of_results

    def _shard_map(self, equation: Equation, tagged: Mapping[int, BatchDim], axes: Any) -> list[State]:
        """Return what a shard_map's specs say of its results for manual axes, and its body for others."""
        if equation not in self.mapped:
            self.mapped[equation] = body_of(equation)
        body, params, names = self.mapped[equation], equation.params, list(axes_in((axes,)))
        if not any(name in params["newly_manual_axes"] for name in names):
            for i, value in enumerate(body.inputs):
                self._set(value, tagged.get(i))
            self.follow(body.equations)
            return [_dim(self._state_of(atom)) for atom in body.outputs]
        states: list[State] = []
        for k, (value, spec) in enumerate(zip(equation.outputs, params["out_specs"], strict=True)):
            entries = [[name for name in axes_in((entry,)) if self.size(name) > 1] for entry in spec.partitions]
            if names in entries:
                states.append(self._held(value, entries.index(names), axes))
            elif accumulates(value.aval.dtype) and ends_in_sum(equation, body, k, names):
                states.append(Sum(axes))
            else:
                states.append(None)
        return states

    def _need(self, atoms: Iterable[Atom]) -> None:
        self.whole.update(v for v in values(atoms) if self.parts_over(v) is not None)

    def _need_before(self, equations: Sequence[Equation]) -> None:
        """Find the sums that equations need whole; what must be whole of their results is known."""
        for equation in reversed(equations):
            batch = facts_of(equation.primitive).batch
            if batch is Batch.SCAN:
                self._need_in_scan(equation)
            elif batch is Batch.SHARD_MAP or all(self.parts_over(v) is None for v in equation.outputs):
                self._need(equation.inputs)

    def _need_in_scan(self, equation: Equation) -> None:
        scan = self.scans[equation]
        for k, (value, result) in enumerate(zip(equation.outputs, scan.body.outputs, strict=True)):
            if self.parts_over(value) is None:
                self._need([result, *scan.carry_in[k : k + 1]])
        self._need_before(scan.body.equations)
        inner = zip(equation.inputs, scan.body.inputs, strict=True)
        self._need(atom for atom, value in inner if self.parts_over(value) is None)


def _is_typed_over(axes: Any, atom: Atom) -> bool:
    """Return whether the type of an atom, on an Explicit mesh, is sharded over some of the axes."""
    typed = struct_of(atom.aval).sharding
    return typed is not None and not set(axes_in((axes,))).isdisjoint(axes_in(typed.spec))


def _dim(state: State) -> BatchDim | None:
    return state if isinstance(state, tuple) else None


def _is_zero(state: State) -> bool:
    return isinstance(state, Sum) and state.axes is None
