"""The workspace of a task: what XLA holds while it runs, beside arguments and results, before it is compiled.

The model of a compiler: products, kernels, sums and loops write what they make. What is computed element by element is
written where one of these reads it; else its readers compute it themselves, and on a TPU all of them do. It takes the
place of an operand of its type that nothing reads later. A result of the task comes as soon as it can, and has memory
of its own. A product of a GPU reads matrices: what is computed element by element in another order of dimensions than
what it is computed from, as attention's probabilities, is copied for each product. Buffers of collectives that XLA
joins, what its scheduler moves to hide collectives, and the padding of layouts, are not known here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from jax.sharding import PartitionSpec

from jaxpp_flax.engine.analyses.batch_dimensions import ShardCounts
from jaxpp_flax.engine.analyses.data_flow import source_of
from jaxpp_flax.engine.analyses.inner_bodies import open_scan
from jaxpp_flax.engine.analyses.spec_flow import specs_after, ways
from jaxpp_flax.engine.arrays.mesh import axes_in
from jaxpp_flax.engine.tracing.inline import inline
from jaxpp_flax.engine.tracing.ir import Atom, Equation, Graph, Value, values
from jaxpp_flax.engine.tracing.primitives import Batch, Cost, facts_of
from jaxpp_flax.schedules.memory import MemoryInUse

__all__ = ["stored", "workspace"]

_FUSING = Cost.VIEW, Cost.LIGHT  # what is computed where it is read
_WITHOUT_COPIES = ("tpu", "cpu")  # platforms whose products read an operand in any order of its dimensions


def workspace(
    graph: Graph, in_specs: Sequence[PartitionSpec], axis_sizes: Mapping[str, int], platform: str = ""
) -> float:
    """Return the most bytes at one time, on one device, of what a task writes beside its results.

    Args:
      graph: the task's.
      in_specs: the partition of each of its inputs.
      axis_sizes: those of the mesh.
      platform: of the devices; "tpu" for those whose products compute their operands.
    """
    flat = inline(graph, flatten=True, remat=True)
    device = _Device(specs_after(flat, in_specs, axis_sizes), ShardCounts(axis_sizes), platform)
    written, last = _written(flat, fuses_operands=platform == "tpu")
    copied = frozenset[Value]() if platform in _WITHOUT_COPIES else _turned(flat)
    ends: defaultdict[int, list[Value]] = defaultdict(list)
    for value, place in last.items():
        ends[place].append(value)
    memory = MemoryInUse()
    for place, equation in enumerate(flat.equations):
        new, gone = written.get(place, ()), ends[place]
        whole = sum(map(device.nbytes, gone))
        if new and _is_elementwise(equation):
            types = {(value.aval.shape, value.aval.dtype) for value in new}
            taken = next((v for v in gone if (v.aval.shape, v.aval.dtype) in types), None)
            replaced = 0.0 if taken is None else device.nbytes(taken)
            memory.change(-replaced)
            whole -= replaced
        own = device.inside(equation)
        if facts_of(equation.primitive).cost is Cost.PRODUCT:
            own += sum(device.nbytes(value) for value in values(equation.inputs) if value in copied)
        memory.change(sum(map(device.nbytes, new)) + own)
        memory.change(-own - whole - sum(device.nbytes(value) for value in new if value not in last))
    return memory.peak


def _turned(flat: Graph) -> frozenset[Value]:
    """Return what is computed element by element in another order of dimensions than what it is computed from."""
    facts = dict[Value, tuple[bool, bool]]()  # whether something is computed, and whether dimensions change places
    for equation in flat.equations:
        if not _is_elementwise(equation):
            continue
        out = equation.outputs[0]
        # A smaller operand is broadcast: a mask, or the largest value of each row.
        read = [facts.get(v, (False, False)) for v in values(equation.inputs) if v.aval.size == out.aval.size]
        computes = facts_of(equation.primitive).cost is Cost.LIGHT and equation.name != "transpose"
        turns = equation.name == "transpose" and _moves(equation.params["permutation"], out.aval.shape)
        facts[out] = computes or any(fact for fact, _ in read), turns or any(fact for _, fact in read)
    return frozenset(value for value, both in facts.items() if all(both))


def _moves(permutation: Sequence[int], shape: Sequence[int]) -> bool:
    """Return whether dimensions change places so that a matrix becomes more than its transposed one, for each batch."""
    long = [source for source, size in zip(permutation, shape, strict=True) if size > 1]
    in_order = sorted(long)
    batch = next((i for i, (one, other) in enumerate(zip(long, in_order, strict=True)) if one != other), len(long))
    rows = long[batch:]
    turned = in_order.index(rows[0]) if rows else 0
    return rows != in_order[turned:] + in_order[batch:turned]


def _is_elementwise(equation: Equation) -> bool:
    facts = facts_of(equation.primitive)
    return facts.cost in _FUSING and not facts.is_reduction


def stored(flat: Graph) -> dict[Value, frozenset[Value]]:
    """Return what is in memory for the readers of each value of a forward, in one task with its backward.

    A value that takes less than what its readers would read for it has a place of its own, and so have results.

    Args:
      flat: the forward's, without calls.
    """
    makers = {value: equation for equation in flat.equations for value in equation.outputs}
    read = {
        source
        for equation in flat.equations
        if facts_of(equation.primitive).cost not in _FUSING
        for value in values(equation.inputs)
        if (source := source_of(value, makers)) is not None
    }
    return _sources(flat, read.union(values(flat.outputs)), {v: frozenset({v}) for v in flat.inputs}, narrows=True)


def _sources(
    flat: Graph, written: Collection[Value], of_inputs: Mapping[Value, frozenset[Value]], *, narrows: bool = False
) -> dict[Value, frozenset[Value]]:
    """Return what is read in the place of each value: itself, or what its readers compute it from.

    Args:
      flat: the graph.
      written: values computed element by element that are written.
      of_inputs: for inputs of the graph.
      narrows: also write a value that takes less than what it is computed from.
    """
    sources = dict(of_inputs)
    for equation in flat.equations:
        own = frozenset[Value]().union(*(sources.get(value, ()) for value in values(equation.inputs)))
        is_view = facts_of(equation.primitive).cost is Cost.VIEW
        is_fused = _is_elementwise(equation) and (is_view or not any(v in written for v in equation.outputs))
        if is_fused and narrows and not is_view:
            is_fused = sum(v.nbytes for v in equation.outputs) >= sum(v.nbytes for v in own)
        sources.update((value, own if is_fused else frozenset({value})) for value in equation.outputs)
    return sources


def _written(flat: Graph, *, fuses_operands: bool) -> tuple[dict[int, list[Value]], dict[Value, int]]:
    """Return what each equation writes, without results of the task, and the place of the last reader of each value."""
    fusing = (*_FUSING, Cost.PRODUCT) if fuses_operands else _FUSING
    read = {v for e in flat.equations if facts_of(e.primitive).cost not in fusing for v in values(e.inputs)}
    returned = set(values(flat.outputs))
    sources = _sources(flat, read | returned, {})
    places, written, last = dict[Value, int](), dict[int, list[Value]](), dict[Value, int]()
    for position, equation in enumerate(flat.equations):
        if any(value not in sources[value] for value in equation.outputs):
            continue
        own = frozenset[Value]().union(*(sources.get(value, ()) for value in values(equation.inputs)))
        place = position
        if _is_elementwise(equation) and returned.issuperset(equation.outputs):
            place = max((places[value] for value in own), default=position)
        for value in own:
            last[value] = max(place, last.get(value, place))
        places.update(dict.fromkeys(equation.outputs, place))
        written[position] = list(equation.outputs)
    results = {source for value in returned for source in sources.get(value, ())}
    written = {position: [value for value in new if value not in results] for position, new in written.items()}
    return written, {value: position for value, position in last.items() if value not in results}


class _Device:
    """The bytes of one device.

    Args:
      specs: the partitions of values that are not whole on every device.
      shards: the number of shards over each axis.
      platform: as in `workspace`.
    """

    def __init__(self, specs: Mapping[Value, PartitionSpec], shards: ShardCounts, platform: str) -> None:
        self._specs, self._shards, self._platform = specs, shards, platform

    def nbytes(self, value: Value) -> float:
        """Return the bytes of the device's part of a value."""
        return self._shards.nbytes(value, self._spec(value))

    def _spec(self, atom: Atom) -> PartitionSpec:
        return self._specs.get(atom, PartitionSpec()) if isinstance(atom, Value) else PartitionSpec()

    def inside(self, equation: Equation) -> float:
        """Return the bytes that an equation makes for itself: those of a scan's body, or arrays that are whole."""
        facts = facts_of(equation.primitive)
        if facts.batch is Batch.SCAN:
            scan = open_scan(equation)
            specs = list(map(self._spec, equation.inputs))
            slices = scan.num_consts + scan.num_carry
            specs[slices:] = [PartitionSpec(*spec.partitions[1:]) for spec in specs[slices:]]
            return workspace(scan.body, specs, self._shards.axes, self._platform)
        return self._whole(equation) if facts.cost is Cost.PRODUCT else 0.0

    def _whole(self, equation: Equation) -> float:
        """Return the bytes of what a product reads or makes whole along axes that its first operand has elsewhere.

        It gathers a matrix whose axis shards the examples too, and makes the whole gradient of such a matrix. Along a
        dimension of the result that both operands have, the first one is cut instead.
        """
        out, nbytes = equation.outputs[0], 0.0
        ways_of_operands = ways(equation, out.aval.shape)
        if not ways_of_operands:  # nothing is known of some products, such as a `ragged_dot`
            return 0.0
        first, *others = zip(equation.inputs, ways_of_operands, strict=False)
        taken = self._places(*first)
        for atom, way in (*others, (out, range(out.aval.ndim))):
            places = self._places(atom, way)
            both = {dim for dim in first[1] if dim is not None and dim >= 0 and dim in way and atom is not out}
            shared = [name for name, dim in places.items() if taken.get(name, dim) != dim and dim not in both]
            if shared and isinstance(atom, Value):
                nbytes += self.nbytes(atom) * self._shards(tuple(shared))
        return nbytes

    def _places(self, atom: Atom, way: Sequence[int | None]) -> dict[str, int | None]:
        """Return for each axis of an array the dimension of a product's result that it shards, as in `Way`."""
        entries = zip(self._spec(atom).partitions, way, strict=False)
        return {name: target for entry, target in entries for name in axes_in((entry,))}
