"""What a block computes and holds on one device, from its graph: the facts that a quote starts from."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from jax.sharding import PartitionSpec

from jaxpp_flax.engine.analyses.data_flow import source_of
from jaxpp_flax.engine.analyses.spec_flow import specs_after
from jaxpp_flax.engine.arrays.mesh import axes_in
from jaxpp_flax.engine.tracing.inline import inline
from jaxpp_flax.engine.tracing.ir import Atom, Equation, Graph, Value, bodies
from jaxpp_flax.engine.tracing.primitives import Batch, Cost, facts_of

__all__ = ["AxisCollective", "Product", "TaskFacts", "facts_of_products", "facts_of_task", "interpolated"]


@dataclass(frozen=True)
class Product:
    """`times` products of a matrix (m, k) and a matrix (k, n) on one device."""

    times: float
    m: float
    n: float
    k: float
    dtype: str
    itemsize: float

    @property
    def flops(self) -> float:
        """The operations of one of them."""
        return 2 * self.m * self.n * self.k

    @property
    def nbytes(self) -> float:
        """The bytes that one of them reads and writes."""
        return self.itemsize * (self.m * self.k + self.k * self.n + self.m * self.n)


class AxisCollective(NamedTuple):
    """What the devices along an axis move between them for a value.

    Attributes:
      axis: its name.
      nbytes: of the value on a device: whole along the axis; in front of an exchange, a part.
      kind: the sum of a value, its gather, or an exchange of its parts (all-to-all).
    """

    axis: str
    nbytes: float
    kind: Literal["sum", "gather", "exchange"] = "sum"


@dataclass(frozen=True)
class TaskFacts:
    """What a task does for one microbatch on one device.

    Attributes:
      products: its products of matrices.
      moved: the bytes that other work reads and writes, where XLA fuses what is done element by element.
      saved: the bytes that a forward writes for its backward alone.
      kernels: the number of pieces of other work.
      collectives: what the devices of a rank move between them.
    """

    products: tuple[Product, ...] = ()
    moved: float = 0.0
    saved: float = 0.0
    kernels: float = 0.0
    collectives: tuple[AxisCollective, ...] = ()


def interpolated(one: TaskFacts, other: TaskFacts, share: float) -> TaskFacts:
    """Return the facts on the line through those at two sizes of a microbatch; no number is below 0.

    Raises:
      ValueError: if the two do not have the same operations.
    """
    if len(one.products) != len(other.products) or len(one.collectives) != len(other.collectives):
        raise ValueError("the model computes something else for another size of a microbatch.")

    def mixed(a: float, b: float) -> float:
        return max(a + (b - a) * share, 0.0)

    products = tuple(
        Product(mixed(a.times, b.times), mixed(a.m, b.m), mixed(a.n, b.n), mixed(a.k, b.k), a.dtype, a.itemsize)
        for a, b in zip(one.products, other.products, strict=True)
    )
    pairs = zip(one.collectives, other.collectives, strict=True)
    moving = tuple(a._replace(nbytes=mixed(a.nbytes, b.nbytes)) for a, b in pairs)
    moved, saved, kernels = (mixed(getattr(one, name), getattr(other, name)) for name in ("moved", "saved", "kernels"))
    return TaskFacts(products, moved, saved, kernels, moving)


def facts_of_task(
    graph: Graph, in_specs: Sequence[PartitionSpec], axis_sizes: Mapping[str, int], saved: Collection[int] = ()
) -> tuple[TaskFacts, list[PartitionSpec]]:
    """Return what a task does on one device, and the partitions of its results, as `specs_after` predicts them.

    `saved` are the places of the results that its own backward alone reads.
    """
    flat = inline(graph, flatten=True, remat=True)  # what the user recomputes, too
    specs = specs_after(flat, in_specs, axis_sizes)
    results = [specs.get(v) if isinstance(v, Value) else None for v in flat.outputs]
    return _Reader(specs, axis_sizes).read(flat, saved), [spec or PartitionSpec() for spec in results]


def facts_of_products(
    graph: Graph, in_specs: Sequence[PartitionSpec], axis_sizes: Mapping[str, int]
) -> Iterator[tuple[Equation, TaskFacts | None]]:
    """Return each equation with its products of matrices, and what devices move for them; None without products."""
    reader = _Reader(specs_after(graph, in_specs, axis_sizes), axis_sizes)
    for equation in graph.equations:
        facts = None
        if equation.name == "dot_general":
            product, summed, gathers = reader._product(equation)
            facts = TaskFacts((product,), collectives=(*summed, *gathers.values()))
        elif inside := reader._inside(equation):
            facts = TaskFacts(tuple(inside))
        yield equation, facts


@dataclass(frozen=True)
class _Reader:
    specs: Mapping[Value, PartitionSpec]
    sizes: Mapping[str, int]

    def read(self, graph: Graph, saved: Collection[int]) -> TaskFacts:
        products, moving, partial = list[Product](), list[AxisCollective](), dict[Value, list[AxisCollective]]()
        makers = {value: equation for equation in graph.equations for value in equation.outputs}
        moved, kernels, gathered = 0.0, 0, dict[tuple[Atom, str], AxisCollective]()
        written, read = set[Value](), set[Value]()
        for equation in graph.equations:
            facts = facts_of(equation.primitive)
            if equation.name == "dot_general":
                product, summed, gathers = self._product(equation)
                gathered |= gathers
                products.append(product)
                partial.update((value, summed) for value in equation.outputs if summed)
                written.update(_made_by_element(equation.inputs, makers))
            elif bodies(equation.params):
                products += self._inside(equation)
            elif facts.cost in (Cost.KERNEL, Cost.READING):
                # A gather reads what it returns, not the whole table; a scatter runs over all of its result.
                moved += 2 * sum(map(self._nbytes, equation.outputs))
                kernels += 1
                written.update(_made_by_element(equation.inputs, makers))
                moving += self._lookup(equation)
            elif facts.is_reduction:  # it fuses with what it reads, and with what follows
                read.update(_read_from_memory(equation.inputs, makers))
                moving += self._sums(self._axes(equation.inputs[0], facts.dimensions_in(equation.params)), equation)
            elif facts.adds and all(isinstance(atom, Value) and atom in partial for atom in equation.inputs):
                # XLA adds first, and sums over devices once.
                partial[equation.outputs[0]] = max([partial.pop(v) for v in {*equation.inputs}], default=[])  # type: ignore[arg-type]
            elif equation.name == "dynamic_slice":  # a microbatch of a batch: the rest is not read
                moved += self._nbytes(equation.outputs[0])
            elif facts.cost is Cost.LIGHT and equation.name != "transpose":
                read.update(_read_from_memory(equation.inputs, makers))
                moving += self._exchanges(equation)
        passed = [v for place, v in enumerate(graph.outputs) if place not in saved]
        written.update(_made_by_element(passed, makers))
        kept = sum(map(self._nbytes, {*_made_by_element(graph.outputs, makers)} - written))
        moved += sum(map(self._nbytes, written | read))
        moving += [*(each for of in partial.values() for each in of), *gathered.values()]
        return TaskFacts(tuple(products), moved, kept, kernels + len(written), tuple(moving))

    def _product(
        self, equation: Equation
    ) -> tuple[Product, list[AxisCollective], dict[tuple[Atom, str], AxisCollective]]:
        """Return a product on one device, the sums of its result over devices, and the operands that they gather."""
        contracted, batch = equation.params["dimension_numbers"]
        left, right = equation.inputs
        operands = [(0, left), (1, right)]
        free = [{*range(of.aval.ndim)} - {*contracted[i], *batch[i]} for i, of in operands]
        along, beside = ([{*self._axes(of, dims[i])} for i, of in operands] for dims in (contracted, free))
        summed = {name for i, _ in operands for name in along[i] - beside[1 - i]}
        shared = {name for i, of in operands for name in self._axes(of, batch[i])} - summed
        rows, columns = beside[0] - shared - summed, beside[1] - beside[0] - shared - summed
        whole = _shape(left.aval, right.aval, equation.params["dimension_numbers"])
        times, m, n, k = (math.prod(self.sizes[name] for name in names) for names in (shared, rows, columns, summed))
        # Where the other operand is cut along a dimension that stays, XLA gathers this one.
        gathers = {
            (of, name): self._moved(of, name, "gather")
            for i, of in operands
            for name in sorted(along[i] & beside[1 - i])
        }
        cut = replace(whole, times=whole.times / times, m=whole.m / m, n=whole.n / n, k=whole.k / k)
        return cut, self._sums(sorted(summed), equation), gathers

    def _inside(self, equation: Any, times: float = 1.0) -> list[Product]:
        """Return the products of a loop's body; devices share them as they share what it reads and returns."""
        found = list[list[Product]]()
        if isinstance(equation, Equation):
            times /= max(map(self._parts, (*equation.inputs, *equation.outputs)), default=1)
        turns = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        for body in bodies(equation.params):
            of_body = list[Product]()
            for each in body.eqns:
                if each.primitive.name == "dot_general":
                    whole = _shape(each.invars[0].aval, each.invars[1].aval, each.params["dimension_numbers"])
                    of_body.append(replace(whole, times=whole.times * turns * times))
                elif bodies(each.params):
                    of_body += self._inside(each, turns * times)
            found.append(of_body)
        if equation.primitive.name == "cond":  # one branch runs: the longest one is counted
            return max(found, key=lambda of: sum(each.times * each.flops for each in of), default=[])
        return [each for of_body in found for each in of_body]

    def _sums(self, axes: Sequence[str], equation: Equation) -> list[AxisCollective]:
        """Return the sums of an equation's result along axes; other axes may cut it."""
        return [self._moved(equation.outputs[0], name, "sum", axes) for name in axes]

    def _moved(
        self, atom: Atom, axis: str, kind: Literal["sum", "gather", "exchange"], whole: Sequence[str] = ()
    ) -> AxisCollective:
        """Return the move of a value that is whole along an axis (and more), or will be."""
        others = math.prod(self.sizes[name] for name in self._axes(atom) if name not in (axis, *whole))
        return AxisCollective(axis, _whole(atom) / others, kind)

    def _lookup(self, equation: Equation) -> list[AxisCollective]:
        """Return the sums over devices that each hold some rows of a table, as of an embedding."""
        if equation.name != "gather":
            return []
        return self._sums(
            [of for of in self._axes(equation.inputs[0]) if of not in self._axes(equation.outputs[0])], equation
        )

    def _exchanges(self, equation: Equation) -> list[AxisCollective]:
        """Return what devices exchange where a constraint of the user's cuts a value along another dimension."""
        if facts_of(equation.primitive).batch is not Batch.PLACED:
            return []
        (before, after), ndim = (equation.inputs[0], equation.outputs[0]), equation.outputs[0].aval.ndim
        at = [{name: d for d in range(ndim) for name in self._axes(of, (d,))} for of in (before, after)]
        moved = [name for name, d in at[0].items() if at[1].get(name, d) != d]
        return [AxisCollective(name, self._nbytes(before), "exchange") for name in moved]

    def _axes(self, atom: Atom, dims: Collection[int] | None = None) -> list[str]:
        """Return the axes of several devices that cut a value along some of its dimensions, or along all."""
        spec = self.specs.get(atom) if isinstance(atom, Value) else None
        entries = () if spec is None else spec.partitions
        here = (entry for d, entry in enumerate(entries) if dims is None or d in dims)
        return [name for entry in here for name in axes_in((entry,)) if self.sizes[name] > 1]

    def _parts(self, atom: Atom) -> int:
        """Return the number of devices that share a value."""
        return math.prod(self.sizes[name] for name in self._axes(atom))

    def _nbytes(self, atom: Atom) -> float:
        return _whole(atom) / self._parts(atom)


def _whole(atom: Any) -> float:
    return float(getattr(atom.aval, "size", 0) * getattr(getattr(atom.aval, "dtype", None), "itemsize", 0))


def _shape(left: Any, right: Any, numbers: Any) -> Product:
    (contracted, _), (batch, _) = numbers
    k, times = (math.prod(left.shape[d] for d in dims) for dims in (contracted, batch))
    each = max(k * times, 1)
    dtype = str(min((left.dtype, right.dtype), key=lambda of: of.itemsize))
    return Product(float(times), left.size / each, right.size / each, float(k), dtype, left.dtype.itemsize)


def _read_from_memory(atoms: Iterable[Any], makers: Mapping[Value, Equation]) -> Iterator[Value]:
    """Return what work element by element reads from memory: what is not made by such work itself."""
    for value in (source_of(atom, makers) for atom in atoms):
        if value is not None and not _is_light(makers.get(value)):
            yield value


def _is_light(equation: Equation | None) -> bool:
    """Return whether XLA fuses this with what reads it: work element by element."""
    facts = None if equation is None else facts_of(equation.primitive)
    return facts is not None and facts.cost is Cost.LIGHT and not facts.is_reduction


def _made_by_element(atoms: Iterable[Any], makers: Mapping[Value, Equation]) -> Iterator[Value]:
    """Return what is written to memory for a reader that fuses with nothing."""
    for value in (source_of(atom, makers) for atom in atoms):
        if value is not None and _is_light(makers.get(value)):
            yield value
