"""How the values of a graph will be partitioned, if XLA follows the partitions of its inputs: found without compiling.

A dimension that an operation keeps stays partitioned; one that it sums over is whole afterwards. Where two operands
want one mesh axis, the first one has it. XLA may choose another partition; what is found here only predicts bytes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, TypeAlias

from jax.sharding import NamedSharding, PartitionSpec

from jaxpp_flax.engine.analyses.batch_dimensions import Way, ways_of
from jaxpp_flax.engine.analyses.inner_bodies import open_scan
from jaxpp_flax.engine.arrays.mesh import axes_in, canonical, entry_of
from jaxpp_flax.engine.tracing.inline import inline
from jaxpp_flax.engine.tracing.ir import Atom, Equation, Graph, Value, applied, opened
from jaxpp_flax.engine.tracing.primitives import Batch, facts_of

__all__ = ["specs_after", "ways"]

_Axes: TypeAlias = "tuple[tuple[str, ...], ...]"  # of each dimension of a value


def specs_after(
    graph: Graph, in_specs: Sequence[PartitionSpec], axis_sizes: Mapping[str, int]
) -> dict[Value, PartitionSpec]:
    """Return the predicted partition of each value of a graph that is not whole on every device.

    Args:
      graph: the graph.
      in_specs: the partition of each of its inputs.
      axis_sizes: those of the mesh.
    """
    if all(size == 1 for size in axis_sizes.values()):
        return {}  # a device alone has all values whole
    flow = _SpecFlow(axis_sizes)
    for value, spec in zip(graph.inputs, in_specs, strict=True):
        flow.set(value, flow.entries(spec, value.aval.ndim))
    flow.settle(graph.equations, frozenset(graph.inputs))
    return {value: canonical(PartitionSpec(*map(entry_of, axes))) for value, axes in flow.found.items()}


def ways(equation: Equation, shape: Sequence[int]) -> Sequence[Way]:
    """Return where dimensions of operands go, as in `ways_of`; XLA also keeps some along which an operation works."""
    batch = facts_of(equation.primitive).batch
    if batch is Batch.ALONG:
        return [[d if a.aval.shape[d] == n else None for d, n in enumerate(shape)] for a in equation.inputs]
    if batch is Batch.CONVOLUTION:
        numbers = equation.params["dimension_numbers"]
        left, right = ([None] * len(shape) for _ in range(2))
        for source, target in ((0, 0), *((d, d) for d in range(2, len(shape)))):
            left[numbers.lhs_spec[source]] = numbers.out_spec[target]
        right[numbers.rhs_spec[0]] = numbers.out_spec[1]
        return [left, right]
    ways = ways_of(equation, ())
    return [list(range(len(shape))), *ways[1:]] if batch is Batch.SCATTER else ways


class _SpecFlow:
    """What is known of the partitions of a graph's values, and of those in the bodies of its calls and scans."""

    def __init__(self, axis_sizes: Mapping[str, int]) -> None:
        self.sizes = axis_sizes
        self.found: dict[Value, _Axes] = {}

    def entries(self, spec: PartitionSpec, ndim: int) -> _Axes:
        """Return the axes of each dimension, without those of one device."""
        listed = [tuple(name for name in axes_in((entry,)) if self.sizes[name] > 1) for entry in spec.partitions]
        return (*listed[:ndim], *[()] * (ndim - len(listed)))

    def set(self, value: Value, axes: _Axes | None) -> None:
        """Note the partition of a value; axes that do not divide a dimension are left out."""
        self.found.pop(value, None)
        shape = getattr(value.aval, "shape", ())
        if axes is not None and len(axes) == len(shape):
            axes = tuple(map(self._dividing, axes, shape))
            if any(axes):
                self.found[value] = axes

    def _dividing(self, names: tuple[str, ...], size: int) -> tuple[str, ...]:
        while size % math.prod(self.sizes[name] for name in names):
            names = names[:-1]
        return names

    def settle(self, equations: Sequence[Equation], fixed: Collection[Value]) -> None:
        """Follow equations forward, then back from results to operands that nothing else partitions, and forward."""
        self.follow(equations)
        for equation in reversed(equations):
            self._back(equation, fixed)
        self.follow(equations)

    def _back(self, equation: Equation, fixed: Collection[Value]) -> None:
        wanted = self._axes_of(equation.outputs[0]) if equation.outputs else None
        if wanted is None:
            return
        for atom, way in zip(equation.inputs, ways(equation, equation.outputs[0].aval.shape), strict=False):
            if not isinstance(atom, Value) or atom in fixed:
                continue
            axes = list(self.found.get(atom, [()] * len(way)))
            for dim, target in enumerate(way):
                if target is None or target < 0 or axes[dim]:
                    continue
                if not {name for names in axes for name in names}.intersection(wanted[target]):
                    axes[dim] = wanted[target]
            self.set(atom, tuple(axes))

    def follow(self, equations: Iterable[Equation]) -> None:
        """Find the partitions of the results of equations in executable order."""
        for equation in equations:
            results = self._results(equation)
            for k, value in enumerate(equation.outputs):
                self.set(value, self._joined(self.found.get(value), results[k] if k < len(results) else None))

    def _joined(self, one: _Axes | None, other: _Axes | None) -> _Axes | None:
        """Return a partition with the axes of the first, and those of the second that it has room for."""
        if one is None or other is None or len(one) != len(other):
            return one or other
        taken = {name for names in one for name in names}
        return tuple(a or (b if taken.isdisjoint(b) else ()) for a, b in zip(one, other, strict=True))

    def _axes_of(self, atom: Atom) -> _Axes | None:
        return self.found.get(atom) if isinstance(atom, Value) else None

    def _results(self, equation: Equation) -> Sequence[_Axes | None]:
        facts = facts_of(equation.primitive)
        if facts.batch is Batch.EACH:
            return list(map(self._axes_of, equation.inputs))
        if facts.batch is Batch.SCAN:
            return self._scan(equation)
        if facts.batch is Batch.SHARD_MAP:
            shapes = [value.aval.ndim for value in equation.outputs]
            return list(map(self.entries, equation.params["out_specs"], shapes))
        if (body := facts.body_in(equation.params)) is not None:
            return self._call(body, equation.inputs)
        if equation.name == "cond":
            branches = [self._call(branch, equation.inputs[1:]) for branch in equation.params["branches"]]
            return [reduce(self._joined, axes) for axes in zip(*branches, strict=True)]
        if facts.batch is Batch.PLACED:
            return [self._placed(equation, facts.placing_in(equation.params))]
        if not equation.outputs or all(self._axes_of(atom) is None for atom in equation.inputs):
            return ()
        return [self._merged(equation)] * len(equation.outputs)

    def _merged(self, equation: Equation) -> _Axes:
        """Return the partition of an equation's results, to which each operand brings the dimensions that stay."""
        shape = equation.outputs[0].aval.shape
        taken, axes = set[str](), list[tuple[str, ...]]([()] * len(shape))
        pairs = list(zip(equation.inputs, ways(equation, shape), strict=False))
        if facts_of(equation.primitive).batch is Batch.ELEMENTWISE:  # a whole array goes before a row of it
            pairs.sort(key=lambda pair: -pair[0].aval.size)
        for atom, way in pairs:
            for names, target in zip(self._axes_of(atom) or (), way, strict=False):
                if names and target is not None and target >= 0 and not axes[target] and taken.isdisjoint(names):
                    axes[target] = self._dividing(names, shape[target])
                    taken.update(axes[target])
        return tuple(axes)

    def _placed(self, equation: Equation, sharding: Any) -> _Axes | None:
        before, ndim = self._axes_of(equation.inputs[0]), equation.outputs[0].aval.ndim
        if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
            return before
        entries = [*sharding.spec.partitions, *[None] * (ndim - len(sharding.spec.partitions))]
        free = {d for d, entry in enumerate(entries) if entry is PartitionSpec.UNCONSTRAINED}
        free.update(equation.params.get("unconstrained_dims", ()))
        wanted = self.entries(PartitionSpec(*[None if d in free else e for d, e in enumerate(entries)]), ndim)
        return tuple(before[d] if d in free and before else names for d, names in enumerate(wanted))

    def _call(self, body: Any, operands: Sequence[Atom]) -> list[_Axes | None]:
        inputs = tuple(Value(v.aval) for v in opened(body).invars)
        graph = inline(Graph(inputs, (g := applied(body, inputs)).outputs, g.equations), flatten=True)
        for value, atom in zip(inputs, operands, strict=True):
            self.set(value, self._axes_of(atom))
        self.settle(graph.equations, frozenset(inputs))
        return list(map(self._axes_of, graph.outputs))

    def _scan(self, equation: Equation) -> list[_Axes | None]:
        scan = open_scan(equation)
        first, second = scan.num_consts, scan.num_consts + scan.num_carry
        of_inputs = [self._axes_of(atom) for atom in equation.inputs]
        of_inputs[second:] = [None if axes is None else axes[1:] for axes in of_inputs[second:]]
        fixed, after = frozenset(scan.body.inputs), list[Any]()
        for _ in range(2):  # a carry has one partition: what the first round finds of it, the second one starts from
            for value, axes in zip(scan.body.inputs, of_inputs, strict=True):
                self.set(value, axes)
            self.settle(scan.body.equations, fixed)
            after = list(map(self._axes_of, scan.body.outputs))
            of_inputs[first:second] = map(self._joined, of_inputs[first:second], after)
        after[: scan.num_carry] = of_inputs[first:second]
        return [*after[: scan.num_carry], *[None if a is None else ((), *a) for a in after[scan.num_carry :]]]
