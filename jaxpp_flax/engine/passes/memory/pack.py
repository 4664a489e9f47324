"""Keep the small values of a loop in few arrays, because a call of a task costs time for each array.

Three kinds of values are packed into one flat array for each dtype: the values that a task leaves for later tasks of
its rank (residuals), the sums that a task adds to in each microbatch (gradients), and the parameters that tasks read. A
value is the same bits in a packed array, and each sum is the same addition. The tasks before and after the loop stay as
they are: a task of its own packs parameters before the loop, and one unpacks the sums after it.

A parameter that is packed is in memory twice while the loop runs. So only values up to a limit are packed.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray

from jaxpp_flax.engine.passes.loop.loop_tasks import Accumulator
from jaxpp_flax.engine.passes.placed import Loop, Placed, Segment
from jaxpp_flax.engine.tracing.ir import Atom, Equation, Graph, Value, emit, memory_kind_of, producers, values

__all__ = ["pack", "pack_bytes"]

_FEWEST = 4  # values that are worth packing


def pack_bytes(axis_sizes: Mapping[str, int]) -> int:
    """Return the size of the largest value that is packed, in bytes: `JAXPP_FLAX_PACK_BYTES`, by default 0.

    Nothing is packed where a rank has several devices: parts of one array would need several shardings.

    Raises:
      ValueError: if the variable is not a number of bytes.
    """
    text = os.environ.get("JAXPP_FLAX_PACK_BYTES", "") or "0"
    if not text.isdecimal():
        raise ValueError(
            f"JAXPP_FLAX_PACK_BYTES is {text!r}, which is not a number of bytes. Set it to a whole number, such as "
            "16384; 0 packs nothing."
        )
    return int(text) if all(size == 1 for size in axis_sizes.values()) else 0


def pack(placed: Placed, limit: int) -> Placed:
    """Return the step with the values of its loops packed, up to `limit` bytes each; 0 packs nothing."""
    if not limit:
        return placed
    steps: list[Any] = []
    for step in placed.steps:
        steps += _Packing(step, limit).packed() if isinstance(step, Loop) else [step]
    return replace(placed, steps=tuple(steps))


@dataclass(eq=False)
class _Packing:
    """A loop while its values are packed, with the graphs of its tasks as they are so far."""

    loop: Loop
    limit: int
    graphs: list[Graph] = field(default_factory=list[Graph])
    before: defaultdict[int, list[tuple[Sequence[Value], Value]]] = field(default_factory=lambda: defaultdict(list))
    after: defaultdict[int, list[tuple[Sequence[Value], Value]]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        part = self.loop.partition
        self.graphs = [task.graph for task in part.tasks]
        self.ranks = [self.loop.rank_of_task(task) for task in range(len(part.tasks))]
        self.turns = (*part.accumulators, *part.carries)
        self.readers = defaultdict[Value, list[int]](list)
        for task, graph in enumerate(self.graphs):
            for value in graph.inputs:
                self.readers[value].append(task)

    def packed(self) -> list[Segment | Loop]:
        """Return the loop, the tasks that pack its parameters, and the tasks that unpack its sums."""
        self._pack_residuals()
        loop = self._with_packed_sums(self._with_packed_operands(self.loop))
        tasks = tuple(replace(t, graph=g) for t, g in zip(loop.partition.tasks, self.graphs, strict=True))
        loop = replace(loop, partition=replace(loop.partition, tasks=tasks))
        packing = [Segment(rank, _packing_graph(groups)) for rank, groups in sorted(self.before.items())]
        return [*packing, loop, *(Segment(rank, _unpacking_graph(g)) for rank, g in sorted(self.after.items()))]

    def _fits(self, value: Value) -> bool:
        aval = value.aval
        if not isinstance(aval, ShapedArray) or jnp.issubdtype(aval.dtype, jax.dtypes.extended):
            return False
        spec = getattr(aval.sharding, "spec", ())  # an Explicit axis, even of one device, cannot be flattened
        plain = not aval.weak_type and memory_kind_of(aval) is None and not any(spec)
        return plain and 0 < value.nbytes <= self.limit

    def _pack_residuals(self) -> None:
        results = {turn.result for turn in self.turns}
        for task, graph in enumerate(self.graphs):
            own = [v for v in dict.fromkeys(values(graph.outputs)) if v not in results and self._stays(v, task)]
            for members in _groups(own, lambda v: tuple(self.readers[v])):
                made, packed = _packed(members)
                graph = self.graphs[task]
                left = tuple(v for v in graph.outputs if v not in members)
                self.graphs[task] = replace(graph, outputs=(*left, packed), equations=(*graph.equations, *made))
                self._read_packed(self.readers[members[0]], packed, members)

    def _stays(self, value: Value, task: int) -> bool:
        """Return whether only later tasks of the same rank read a small value."""
        readers = self.readers.get(value, ())
        if value in self.graphs[task].inputs:  # another task has made it
            return False
        return bool(readers) and self._fits(value) and all(self.ranks[r] == self.ranks[task] for r in readers)

    def _read_packed(self, tasks: Iterable[int], packed: Value, members: Sequence[Value]) -> None:
        for task in tasks:
            graph = self.graphs[task]
            inputs = tuple(v for v in graph.inputs if v not in members)
            self.graphs[task] = replace(
                graph, inputs=(*inputs, packed), equations=(*_unpacked(packed, members), *graph.equations)
            )

    def _with_packed_operands(self, loop: Loop) -> Loop:
        part, operands, inner = loop.partition, list(loop.operands), list(loop.partition.operands)
        special = {*part.data, *loop.gathers, *(turn.state for turn in self.turns)}
        outer = dict(zip(inner, operands, strict=True))
        for rank in sorted(set(self.ranks)):
            read = {v: tuple(t for t in self.readers.get(v, ()) if self.ranks[t] == rank) for v in outer}
            found = [v for v in outer if read[v] and v not in special and self._fits(v)]
            for members in _groups(found, read.__getitem__):
                outside = [outer[v] for v in members]
                packed = Value(_packed(members)[1].aval)
                self.before[rank].append((outside, packed))
                operands.append(packed)
                inner.append(Value(packed.aval))
                self._read_packed(read[members[0]], inner[-1], members)
        return replace(loop, operands=tuple(operands), partition=replace(part, operands=tuple(inner)))

    def _with_packed_sums(self, loop: Loop) -> Loop:
        part, added = loop.partition, dict[Value, Value]()
        result_of = dict(zip(part.accumulators, loop.accumulator_results, strict=True))
        numbers = {a: k for k, a in enumerate(part.accumulators)}
        for task, graph in enumerate(self.graphs):
            own = [a for a in part.accumulators if a.task == task and not loop.batch_dims[numbers[a]]]
            alone = [a for a in own if self.readers.get(a.state) == [task] and a.result not in self.readers]
            added.update(_summands(graph, [a for a in alone if self._fits(a.state)]))
        of_state = {a.state: a for a in part.accumulators}
        gone: set[Accumulator] = set()
        new: list[tuple[Accumulator, Value]] = []
        for states in _groups(list(added), lambda v: (of_state[v].task, of_state[v].ordered)):
            members = [of_state[v] for v in states]
            sums = self._pack_sums(members, [added[v] for v in states])
            outside = Value(sums.state.aval)
            self.after[self.ranks[sums.task]].append(([result_of[a] for a in members], outside))
            gone.update(members)
            new.append((sums, outside))
        kept = [k for a, k in numbers.items() if a not in gone]
        return replace(
            loop,
            partition=replace(part, accumulators=(*(part.accumulators[k] for k in kept), *(a for a, _ in new))),
            accumulator_results=(*(loop.accumulator_results[k] for k in kept), *(v for _, v in new)),
            batch_dims=(*(loop.batch_dims[k] for k in kept), *[None] * len(new)),
            like=(*(loop.like[k] for k in kept), *[None] * len(new)) if loop.like else (),
        )

    def _pack_sums(self, members: Sequence[Accumulator], summands: Sequence[Value]) -> Accumulator:
        """Replace the additions of one task to some accumulators by one addition."""
        task, graph = members[0].task, self.graphs[members[0].task]
        states, results = {a.state for a in members}, {a.result for a in members}
        flattening, flat = _packed(summands)
        state, result = Value(flat.aval), Value(flat.aval)
        adding, _ = emit(jax.lax.add, [state, flat], [result])
        left = tuple(e for e in graph.equations if results.isdisjoint(e.outputs))
        self.graphs[task] = Graph(
            (*(v for v in graph.inputs if v not in states), state),
            (*(v for v in graph.outputs if v not in results), result),
            (*left, *flattening, *adding),
        )
        made, initial = _packed([a.init.outputs[0] for a in members])
        init = Graph((), (initial,), (*(e for a in members for e in a.init.equations), *made))
        return Accumulator(task, state, result, init, members[0].ordered)


def _summands(graph: Graph, accumulators: Sequence[Accumulator]) -> dict[Value, Value]:
    """Return what a task adds to the state of each accumulator that it uses for nothing but this addition."""
    maker, found = producers(graph.equations), dict[Value, Value]()
    uses = Counter(v for e in graph.equations for v in values(e.inputs)) + Counter(values(graph.outputs))
    for a in accumulators:
        equation = maker.get(a.result)
        if equation is None or equation.name not in ("add", "add_any") or uses[a.state] != 1 or uses[a.result] != 1:
            continue
        summands = [v for v in values(equation.inputs) if v is not a.state]
        if a.state in equation.inputs and len(summands) == 1 and a.result in graph.outputs:
            found[a.state] = summands[0]
    return found


def _groups(found: Sequence[Value], key: Callable[[Value], Hashable]) -> list[list[Value]]:
    """Return the values that go into one array: those of one dtype and one key, if there are enough."""
    groups = defaultdict[Hashable, list[Value]](list)
    for value in found:
        groups[value.aval.dtype, key(value)].append(value)
    return [group for group in groups.values() if len(group) >= _FEWEST]


def _packed(members: Sequence[Atom]) -> tuple[list[Equation], Value]:
    """Return the equations that pack some values, and the packed array."""

    def flat(*arrays: Any) -> Any:
        return jax.lax.concatenate([jax.lax.reshape(array, (array.size,)) for array in arrays], 0)

    equations, results = emit(flat, members)
    return equations, values(results)[0]


def _unpacked(packed: Value, members: Sequence[Value]) -> list[Equation]:
    """Return the equations that define some values from the array that holds them."""

    def parts(array: Any) -> list[Any]:
        found, start = list[Any](), 0
        for aval in (m.aval for m in members):
            part = jax.lax.slice(array, (start,), (start + aval.size,))
            found.append(jax.lax.reshape(part, aval.shape))
            start += aval.size
        return found

    return emit(parts, [packed], members)[0]


def _packing_graph(groups: Sequence[tuple[Sequence[Value], Value]]) -> Graph:
    """Return the graph of a task that packs groups of values; each group has the value of its array."""
    equations: list[Equation] = []
    for members, packed in groups:
        made, result = _packed(members)
        equations += [replace(e, outputs=tuple(packed if v is result else v for v in e.outputs)) for e in made]
    inputs = dict.fromkeys(v for members, _ in groups for v in members)
    return Graph(tuple(inputs), tuple(packed for _, packed in groups), tuple(equations))


def _unpacking_graph(groups: Sequence[tuple[Sequence[Value], Value]]) -> Graph:
    """Return the graph of a task that unpacks groups of values."""
    return Graph(
        tuple(packed for _, packed in groups),
        tuple(v for members, _ in groups for v in members),
        tuple(e for members, packed in groups for e in _unpacked(packed, members)),
    )
