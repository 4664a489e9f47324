"""Keep the small values of a loop in few arrays, because a call of a task costs time for each array.

Three kinds of values are packed into one flat array for each dtype: the values that a task leaves for later tasks of
its rank (residuals), the sums that a task adds to in each microbatch (gradients), and the parameters that tasks read. A
value is the same bits in a packed array, and each sum is the same addition. A task of its own packs parameters before
the loop. The tasks after the loop read packed sums; sums that they do not read alone are unpacked by a task of its own.

A parameter that is packed is in memory twice while the loop runs, so the copies on a rank have a limit. Parameters of
matrix products and tables are not packed: XLA would copy them out of the packed array in each task.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray

from jaxpp_flax.engine.passes.loop.loop_tasks import Accumulator
from jaxpp_flax.engine.passes.placed import Loop, Move, Placed, Segment
from jaxpp_flax.engine.tracing.ir import Atom, Equation, Graph, Value, emit, inside, memory_kind_of, producers, values
from jaxpp_flax.schedules.residuals import ResidualPlan

__all__ = ["PackRule", "check_pack_bytes", "pack"]

_WHOLE = ("dot_general", "conv_general_dilated", "gather")
_FEWEST = 4  # values that are worth packing
_COPIES = 1 << 20  # bytes of packed parameters on a rank, at most
_AUTO_BYTES = 16384
_AUTO_SAVES = 10_000  # arrays of a step: about 10 ms on a CPU


def check_pack_bytes(pack_bytes: Any) -> str | int:
    """Return a setting `pack_bytes=` that is "auto" or a number of bytes.

    Raises:
      ValueError: for another word, or for a negative number.
      TypeError: for another type.

    Example:
      >>> check_pack_bytes("auto"), check_pack_bytes(4096)
      ('auto', 4096)
    """
    known = 'Use "auto", the size of the largest value that is packed in bytes, or 0 to pack nothing.'
    if isinstance(pack_bytes, str):
        if pack_bytes != "auto":
            raise ValueError(f"pack_bytes={pack_bytes!r} is no known setting. {known}")
        return pack_bytes
    if isinstance(pack_bytes, bool) or not isinstance(pack_bytes, int):
        found = f"{type(pack_bytes).__name__}: {pack_bytes!r}"
        raise TypeError(f"pack_bytes must be a word or a whole number of bytes, got {found}. {known}")
    if pack_bytes < 0:
        raise ValueError(f"pack_bytes={pack_bytes}: a size is at least 0 bytes. {known}")
    return pack_bytes


@dataclass(frozen=True, kw_only=True)
class PackRule:
    """Which values of a loop are packed: those up to `limit` bytes, in a loop that saves `fewest` arrays in a step."""

    limit: int = 0
    fewest: int = 0

    @classmethod
    def of(cls, pack_bytes: str | int, axis_sizes: Mapping[str, int]) -> PackRule:
        """Make the rule of a checked setting for ranks with these axes. "auto" has a rule for ranks of one device.

        Raises:
          ValueError: for a number of bytes where a rank has several devices: parts of one array would need several
            shardings.
        """
        divided = {axis: size for axis, size in axis_sizes.items() if size > 1}
        if pack_bytes == "auto":
            return cls() if divided else cls(limit=_AUTO_BYTES, fewest=_AUTO_SAVES)
        if pack_bytes and divided:
            raise ValueError(
                f"pack_bytes={pack_bytes} packs values on ranks of one device, but a rank of this mesh has the axes "
                f"{divided}. Leave pack_bytes= out."
            )
        return cls(limit=int(pack_bytes))


def pack(placed: Placed, rule: PackRule, residuals: ResidualPlan | None = None) -> Placed:
    """Return the step with the small values of its loops packed.

    A residual plan saves memory: a rule with `fewest` packs nothing then, any other rule leaves residuals alone.
    """
    if not rule.limit or (rule.fewest and residuals is not None):
        return placed
    for loop in [step for step in placed.steps if isinstance(step, Loop)]:
        placed = _Packing(loop, rule, placed).packed(with_residuals=residuals is None)
    return placed


@dataclass(eq=False)
class _Packing:
    """A loop of a step while its values are packed, with the graphs of its tasks as they are so far.

    `before` and `after` have groups of outer values for each rank, with the array of each group: parameters, and sums
    that need a task. `segments` are the graphs of the step's segments that read packed sums.
    """

    loop: Loop
    rule: PackRule
    placed: Placed
    graphs: list[Graph] = field(default_factory=list[Graph])
    before: defaultdict[int, list[tuple[Sequence[Value], Value]]] = field(default_factory=lambda: defaultdict(list))
    after: defaultdict[int, list[tuple[Sequence[Value], Value]]] = field(default_factory=lambda: defaultdict(list))
    segments: dict[Segment, Graph] = field(default_factory=dict[Segment, Graph])

    def __post_init__(self) -> None:
        part = self.loop.partition
        self.graphs = [task.graph for task in part.tasks]
        self.ranks = [self.loop.rank_of_task(task) for task in range(len(part.tasks))]
        self.turns = (*part.accumulators, *part.carries)
        self.readers = defaultdict[Value, list[int]](list)
        for task, graph in enumerate(self.graphs):
            for value in graph.inputs:
                self.readers[value].append(task)

    def packed(self, with_residuals: bool) -> Placed:
        """Return the step with this loop packed; or the same step, if that saves too few arrays."""
        if _arrays_of_a_step(self.loop) <= self.rule.fewest:
            return self.placed
        if with_residuals:
            self._pack_residuals()
        loop = self._with_packed_sums(self._with_packed_operands(self.loop))
        tasks = tuple(replace(t, graph=g) for t, g in zip(loop.partition.tasks, self.graphs, strict=True))
        loop = replace(loop, partition=replace(loop.partition, tasks=tasks))
        saved = _arrays_of_a_step(self.loop) - _arrays_of_a_step(loop)
        if saved <= self.rule.fewest:
            return self.placed
        packing = [Segment(rank, _packing_graph(groups)) for rank, groups in sorted(self.before.items())]
        unpacking = [Segment(rank, _unpacking_graph(groups)) for rank, groups in sorted(self.after.items())]
        steps: list[Any] = []
        for step in self.placed.steps:
            if step is self.loop:
                steps += [*packing, loop, *unpacking]
            else:
                steps.append(replace(step, graph=self.segments[step]) if step in self.segments else step)
        return replace(self.placed, steps=tuple(steps))

    def _fits(self, value: Value) -> bool:
        aval = value.aval
        if not isinstance(aval, ShapedArray) or jnp.issubdtype(aval.dtype, jax.dtypes.extended):
            return False
        spec = getattr(aval.sharding, "spec", ())  # an Explicit axis, even of one device, cannot be flattened
        plain = not aval.weak_type and memory_kind_of(aval) is None and not any(spec)
        return plain and 0 < value.nbytes <= self.rule.limit

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
            self.graphs[task] = _reading(self.graphs[task], packed, members)

    def _with_packed_operands(self, loop: Loop) -> Loop:
        part, operands, inner = loop.partition, list(loop.operands), list(loop.partition.operands)
        special = {*part.data, *loop.gathers, *(turn.state for turn in self.turns)}
        outer = dict(zip(inner, operands, strict=True))
        special |= {v for g in self.graphs for e in g.equations if _reads_whole(e) for v in values(e.inputs)}
        stages = [task.stage for task in part.tasks]
        for rank in sorted(set(self.ranks)):
            copies = 0
            read = {v: [t for t in self.readers.get(v, ()) if self.ranks[t] == rank] for v in outer}
            found = [v for v in outer if read[v] and v not in special and self._fits(v)]
            for members in _groups(found, lambda v, read=read: frozenset(stages[t] for t in read[v])):
                copies += sum(v.nbytes for v in members)
                if copies > _COPIES:
                    break
                packed = Value(_packed(members)[1].aval)
                self.before[rank].append(([outer[v] for v in members], packed))
                operands.append(packed)
                inner.append(Value(packed.aval))
                self._read_packed(sorted({t for v in members for t in read[v]}), inner[-1], members)
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
        readers = self._segments_that_read(result_of.values())  # in their order, so that ranks still share an update
        position = {v: number for number, v in enumerate(readers)}

        def key(state: Value) -> Hashable:
            a = of_state[state]
            return a.task, a.ordered, readers[result_of[a]]

        gone: set[Accumulator] = set()
        new: list[tuple[Accumulator, Value]] = []
        for states in _groups(sorted(added, key=lambda v: position[result_of[of_state[v]]]), key):
            members = [of_state[v] for v in states]
            sums = self._pack_sums(members, [added[v] for v in states])
            outside, results = Value(sums.state.aval), [result_of[a] for a in members]
            for segment in readers[results[0]]:
                self.segments[segment] = _reading(self.segments.get(segment, segment.graph), outside, results)
            if not readers[results[0]]:
                self.after[self.ranks[sums.task]].append((results, outside))
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

    def _segments_that_read(self, sums: Collection[Value]) -> dict[Value, tuple[Segment, ...]]:
        """Return the segments that read each sum, sums in the order of reading; none if others read the sum too."""
        wanted, elsewhere = set(sums), set(values(self.placed.outputs))
        found = defaultdict[Value, list[Segment]](list)
        for step in self.placed.steps:
            if isinstance(step, Segment):
                for v in filter(wanted.__contains__, step.graph.inputs):
                    found[v].append(step)
            else:
                elsewhere.update([step.value] if isinstance(step, Move) else [*step.operands, *step.carry_init])
        return {v: () if v in elsewhere else tuple(found[v]) for v in dict.fromkeys([*found, *sums])}

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


def _reads_whole(equation: Equation) -> bool:
    """Return whether XLA would copy an equation's inputs out of a packed array."""
    return any(each.primitive.name in _WHOLE for each in (equation, *inside(equation.params)))


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


def _unpacked(packed: Value, members: Sequence[Value], wanted: Sequence[Value]) -> list[Equation]:
    """Return the equations that define the wanted ones of some values from the array that holds them all."""
    ends = list(accumulate(m.aval.size for m in members))

    def parts(array: Any) -> list[Any]:
        found = [(v.aval, end) for v, end in zip(members, ends, strict=True) if v in wanted]
        return [jax.lax.reshape(jax.lax.slice(array, (end - a.size,), (end,)), a.shape) for a, end in found]

    return emit(parts, [packed], [v for v in members if v in wanted])[0]


def _reading(graph: Graph, packed: Value, members: Sequence[Value]) -> Graph:
    """Return a graph that reads some of its inputs from the array that holds them."""
    inputs, wanted = tuple(v for v in graph.inputs if v not in members), [v for v in members if v in graph.inputs]
    return replace(graph, inputs=(*inputs, packed), equations=(*_unpacked(packed, members, wanted), *graph.equations))


def _arrays_of_a_step(loop: Loop) -> int:
    """Return the number of arrays that the tasks of a loop take and return in a step."""
    return loop.length * sum(len(t.graph.inputs) + len(t.graph.outputs) for t in loop.partition.tasks)


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
        tuple(e for members, packed in groups for e in _unpacked(packed, members, members)),
    )
