"""The plain side: the trainer's step under `jax.jit`, cut at recorded values: one device runs it block by block.

A piece reads what the pipeline recorded in front of it, and makes the points of one block: forward, backward, and its
gradients; or, behind the loops, its new state. So a device holds one block at a time. All pieces are right if and only
if the step is: each checks what the next one reads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp_flax.checkpoint.format.leaves import is_key
from jaxpp_flax.checkpoint.format.paths import flatten
from jaxpp_flax.engine.tracing.ir import Equation, struct_of
from jaxpp_flax.verify.rounding import on_host
from jaxpp_flax.verify.runs.choices import choice_places, opened
from jaxpp_flax.verify.runs.crossings import BodyRun, Crossing
from jaxpp_flax.verify.runs.parts import Function, Part, rounding_of, trace
from jaxpp_flax.verify.runs.points import CHOSEN, LoopPoints, Point, name_loop
from jaxpp_flax.verify.runs.traced_step import TracedStep, trace_step

__all__ = ["Piece", "cut", "even", "points_after"]

_RECORDED = ("forward", "backward", *CHOSEN)
_BEHIND = 1_000_000  # the number of a loop behind all others
_INDEX = "index"  # the name of a microbatch's number in a loop's body


def even(points: Collection[Point], others: Collection[Point]) -> list[Point]:
    """Return the points of both sides; none of those of a name of which one side has more: they would be mixed up."""
    uneven = {(point.kind, point.leaf) for point in set(points) ^ set(others)}
    return [point for point in points if (point.kind, point.leaf) not in uneven]


@dataclass(frozen=True)
class _Operand:
    """An operand of a loop."""

    loop: int
    number: int


@dataclass(frozen=True)
class _Carry:
    """What goes from microbatch to microbatch in a loop: its value before one, and after it."""

    number: int


class Piece:
    """A part of a step that runs alone.

    Args:
      points: what it makes.
      outside: what it computes outside of loops.
      loop: its part of a loop's body, if it has one.

    Attributes:
      reads: what it reads: the numbers of leaves of the step's arguments, and recorded points.
      rounding: the unit of rounding of the narrowest type of float that it computes with.
      has_order: its microbatches have an order, since a value goes from one to the next.
    """

    def __init__(self, points: Sequence[Point], outside: Part, loop: _LoopPart | None = None) -> None:
        self.points, self._outside, self._loop = tuple(points), outside, loop
        self.reads: tuple[Any, ...] = tuple(dict.fromkeys([*outside.reads, *(loop.recorded if loop else ())]))
        self.rounding = rounding_of(outside, *([loop.body] if loop else []))
        self.has_order = loop is None or bool(loop.carried)
        self._run_outside = jax.jit(lambda given: list(outside(dict(zip(outside.reads, given, strict=True))).values()))

    def __call__(self, values: Mapping[Any, Any], order: Sequence[int]) -> tuple[dict[Point, Any], dict[Point, Any]]:
        """Return the array of each point, and for results of loops those of each microbatch, stacked, on the host.

        Args:
          values: an array for each of `reads`.
          order: the order in which the microbatches run; arrays are stacked in the order of the batch all the same.
        """
        made = self._run_outside([values[name] for name in self._outside.reads])
        outside = dict(zip(self._outside.makes, made, strict=True))
        if self._loop is None:
            return {point: on_host(outside[point]) for point in self.points}, {}
        return self._loop.run(outside, values, order)


class _LoopPart:
    """A piece's part of a loop: it runs one microbatch after another, and keeps what they make on the host."""

    def __init__(self, loop: _Loop, points: Sequence[Point]) -> None:
        params = loop.equation.params
        self.number, self.length, self.num_consts = loop.number, params["length"], params["num_consts"]
        self.points = tuple(points)
        results = {p: i for i, p in enumerate(loop.points.results)}
        count = params["num_carry"]
        self.last = {p: _Carry(results[p]) for p in points if results.get(p, count) < count}
        self.operations = {p: params["operations"][results[p] - count] for p in points if results.get(p, -1) >= count}
        self.carried = list(self.last.values())
        while True:
            self.body: Part = loop.body.part([*(p for p in points if p not in self.last), *self.carried])
            more = {name for name in self.body.reads if isinstance(name, _Carry)} - {*self.carried}
            if not more:
                break
            self.carried += sorted(more, key=lambda carry: carry.number)
        self.fixed = [name for name in self.body.reads if isinstance(name, _Operand)]
        self.recorded = [name for name in self.body.reads if isinstance(name, Point)]
        self.types = {p: struct_of(loop.body.results[p].aval) for p in self.operations}
        self._one = jax.jit(self._microbatch)

    def initial(self, carry: _Carry) -> _Operand:
        """The loop's operand that a carry begins with."""
        return _Operand(self.number, self.num_consts + carry.number)

    @property
    def operands(self) -> list[_Operand]:
        """The operands of the loop that this part reads."""
        return list(dict.fromkeys([*self.fixed, *map(self.initial, self.carried)]))

    def run(
        self, outside: Mapping[Any, Any], values: Mapping[Any, Any], order: Sequence[int]
    ) -> tuple[dict[Point, Any], dict[Point, Any]]:
        """Run all microbatches; as `Piece.__call__`."""
        fixed = [outside[name] for name in self.fixed]
        carry = [outside[self.initial(carry)] for carry in self.carried]
        states = [op.state(self.length, self.types[p]) for p, op in self.operations.items()]
        stacked: list[Any] = [None] * self.length
        for i in order:
            recorded = [values[p][i] for p in self.recorded]
            made, carry, states = self._one(fixed, jnp.int32(i), carry, states, recorded)
            stacked[i] = [on_host(array) for array in made]
        seen = [p for p in self.body.makes if isinstance(p, Point)]
        arrays = {p: _stack(of) for p, of in zip(seen, zip(*stacked, strict=True), strict=True)}
        parts = {p: arrays.pop(p) for p in self.operations}
        arrays |= {p: on_host(state) for p, state in zip(self.operations, states, strict=True)}
        after = dict(zip(self.carried, carry, strict=True))
        return {**arrays, **{p: on_host(after[carry]) for p, carry in self.last.items()}}, parts

    def _microbatch(
        self, fixed: Sequence[Any], index: Any, carry: Sequence[Any], states: Sequence[Any], recorded: Sequence[Any]
    ) -> tuple[list[Any], list[Any], list[Any]]:
        names = [*self.fixed, _INDEX, *self.carried, *self.recorded]
        made = self.body(dict(zip(names, [*fixed, index, *carry, *recorded], strict=True)))
        pairs = zip(self.operations.items(), states, strict=True)
        new = [op.update(state, made[p], index) for (p, op), state in pairs]
        return [of for p, of in made.items() if isinstance(p, Point)], [made[carry] for carry in self.carried], new


def _stack(arrays: Sequence[Any]) -> Any:
    return jnp.stack(arrays) if is_key(arrays[0]) else np.stack(arrays)


class _Loop:
    """A loop of a step, whose body is a function of its operands and of what was recorded."""

    def __init__(
        self, number: int, equation: Equation, parameters: Sequence[str], recorded: Mapping[Point, Any]
    ) -> None:
        params, body = equation.params, equation.params["body"]
        self.number, self.equation = number, equation
        places = choice_places(opened(body), params["num_carry"], parameters)
        consts = [_Operand(number, i) for i in range(params["num_consts"])]
        carry = [_Carry(i) for i in range(params["num_carry"])]
        types = dict(zip([*consts, _INDEX, *carry], [struct_of(v.aval) for v in body.inputs], strict=True))

        def name(*inputs: Any) -> list[Any]:
            run = BodyRun(places)
            results, phases = run(body, inputs)
            named[:] = [name_loop(number, run.seen, phases, params["num_carry"], parameters)]
            return results

        named: list[LoopPoints] = []
        jax.eval_shape(name, *types.values())
        self.points = points = named[0]
        flat = [p for of_one in points.crossings for p in of_one]
        self.seen = even([*flat, *points.results], [p for p in recorded if p.loop == number and p.kind != "scalar"])
        given = {p: recorded[p] for p in self.seen if p.kind in _RECORDED}
        given = {p: jax.ShapeDtypeStruct(array.shape[1:], array.dtype) for p, array in given.items()}

        def flattened(arguments: dict[Any, Any]) -> dict[Any, Any]:
            def record(crossing: Crossing, i: int) -> list[Any]:
                pairs = zip(points.crossings[i], crossing.values, strict=True)
                return [arguments.get(p, value) for p, value in pairs]

            run = BodyRun(places, record)
            results, _ = run(body, [arguments[name] for name in types])
            found = dict(zip(flat, [value for crossing in run.seen for value in crossing.values], strict=True))
            carried = {_Carry(i): results[i] for i in range(params["num_carry"])}
            return {**found, **dict(zip(points.results, results, strict=True)), **carried}

        self.body: Function = trace(flattened, {**types, **given})


def cut(
    step: Callable[..., Any], arguments: Any, parameters: Sequence[str], recorded: Mapping[Point, Any]
) -> tuple[Piece, ...]:
    """Cut a step into pieces, in about the order of computation.

    Args:
      step: the trainer's step.
      arguments: the types of its state and batch.
      parameters: the paths of the parameters that have gradients.
      recorded: what the pipeline has recorded, for its types; what it has not is computed again in each piece that
        reads it.
    """
    traced = trace_step(step, *arguments)
    loops = [_Loop(i, equation, parameters, recorded) for i, equation in enumerate(traced.loops)]
    outside, ends = _outside(traced, jax.tree.leaves(arguments), loops, recorded)
    pieces: list[Piece] = []
    for loop in loops:
        for points in _by(loop.seen, lambda p: p.block):
            part = _LoopPart(loop, points)
            pieces.append(Piece(points, outside.part(part.operands), part))
    made = {v for e in outside.graph.equations for v in e.outputs}
    blocks = _by(ends, lambda p: p.block if p.block and outside.results[p] in made else str(p))
    return *pieces, *(Piece(points, outside.part(points)) for points in blocks)


def _outside(
    traced: TracedStep, leaves: Sequence[Any], loops: Sequence[_Loop], recorded: Collection[Point]
) -> tuple[Function, list[Point]]:
    """Return what the step computes outside of loops, as a function of leaves and recorded points; and its ends."""
    results = {p: v for of in loops for p, v in zip(of.points.results, of.equation.outputs, strict=True)}
    scalars = {p: v for v, p in traced.scalars.items()}
    seen = even(scalars, [p for p in recorded if p.kind == "scalar"])
    types = {p: struct_of(v.aval) for p, v in (*results.items(), *((p, scalars[p]) for p in seen))}
    places = _blocks(results)
    ends: list[Point] = []

    def flattened(known: dict[Any, Any]) -> dict[Any, Any]:
        made: dict[Any, Any] = {}

        def loop(number: int, _: Equation, operands: Sequence[Any]) -> list[Any]:
            made.update({_Operand(number, i): operand for i, operand in enumerate(operands)})
            return [known[p] for p in loops[number].points.results]

        def scalar(point: Point, value: Any) -> Any:
            made[point] = value
            return known.get(point, value)

        found = traced.run([known[i] for i in range(len(leaves))], loop, scalar)
        after = points_after(jax.tree.unflatten(traced.results, found), places)
        ends[:] = [*seen, *after]
        return made | after

    return trace(flattened, {**dict(enumerate(leaves)), **types}), ends


def _by(points: Sequence[Point], key: Callable[[Point], Hashable]) -> Iterator[list[Point]]:
    """Yield the points in groups of one key, in order of their first ones."""
    groups: dict[Hashable, list[Point]] = {}
    for point in points:
        groups.setdefault(key(point), []).append(point)
    yield from groups.values()


def _blocks(points: Collection[Point]) -> dict[str, tuple[int, str]]:
    """Return where each parameter's gradient is computed: the number of marks before it, and the block."""
    return {f"/{p.leaf}": (p.phase, p.block) for p in points if p.kind == "gradient"}


def points_after(
    results: tuple[Any, Mapping[str, Any]], blocks: Mapping[str, tuple[int, str]] | None = None
) -> dict[Point, Any]:
    """Return the metrics and the leaves of the new state by their points: behind all loops, in the gradients' order."""
    state, metrics = results
    found = {Point("metric", name, _BEHIND): value for name, value in metrics.items()}
    for path, leaf in flatten(state)[0].items():
        place, block = max((place for name, place in (blocks or {}).items() if path.endswith(name)), default=(0, ""))
        found[Point("state", path, _BEHIND, block=block, phase=1 + place)] = leaf
    return found
