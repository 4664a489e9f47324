"""The plain side: the trainer's step under `jax.jit`, cut at recorded values: one device runs it block by block.

A piece reads what the pipeline recorded in front of it, and makes the points of one block: forward, backward, and its
gradients; or, behind the loops, its new state. So a device holds one block at a time. All pieces are right if and only
if the step is: each checks what the next one reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from jaxpp_flax.checkpoint.format.paths import flatten
from jaxpp_flax.engine.analyses.equation_facts import avals_of, place_of
from jaxpp_flax.engine.tracing.ir import Atom, Graph, Value, everywhere, inside, prune, struct_of, values
from jaxpp_flax.engine.tracing.markers import marker_p
from jaxpp_flax.engine.tracing.treduce import Concat, treduce_p
from jaxpp_flax.verify.rounding import on_host
from jaxpp_flax.verify.runs.choices import rounds_to_level
from jaxpp_flax.verify.runs.points import CHOSEN, Point
from jaxpp_flax.verify.runs.traced_step import OpenedLoop, TracedStep

__all__ = ["Name", "Piece", "cut", "early_host_calls", "points_after", "rounding_of"]

Name: TypeAlias = int | Point
"""What a piece reads: an argument of the traced step, by its number, or what was recorded at a point."""

_BEHIND = 1_000_000  # the number of a loop behind all others


class _Cut:
    """A graph that reads recorded values in place of those that it computes; `names` has those of its inputs."""

    def __init__(self, graph: Graph, names: Mapping[Value, Name], recorded: Mapping[Value, Point]) -> None:
        self._stand_ins = {value: Value(value.aval) for value in recorded}
        # Behind marks and loops everything is recorded. What the step prints is no result.
        kept = [e for e in graph.equations if e.outputs and e.primitive not in (marker_p, treduce_p)]
        equations = tuple(e.reading(tuple(map(self._read, e.inputs))) for e in kept)
        self._graph = Graph((*graph.inputs, *self._stand_ins.values()), (), equations)
        self.names = {**names, **{self._stand_ins[value]: point for value, point in recorded.items()}}

    def atom(self, atom: Atom) -> Atom:
        """Return what computes a value of the graph, or else stands for it."""
        return atom if atom in self._graph.producer else self._read(atom)

    def _read(self, atom: Atom) -> Atom:
        return self._stand_ins.get(atom, atom) if isinstance(atom, Value) else atom

    def part(self, atoms: Iterable[Atom]) -> Graph:
        """Return what computes these values of the graph, from those inputs alone that it reads."""
        graph = prune(replace(self._graph, outputs=tuple(map(self.atom, atoms))))
        read = {*values(graph.outputs), *(value for e in graph.equations for value in values(e.inputs))}
        return replace(graph, inputs=tuple(value for value in graph.inputs if value in read))


class Piece:
    """A part of a step that runs alone.

    Args:
      step: the step, cut.
      makes: what it makes outside of loops, with the points of these values; or, for a part of a loop, its operands.
      loop: its part of a loop's body, if it has one.

    Attributes:
      points: what it makes; `compared` are those of no choice.
      reads: what it reads.
      rounding: the unit of rounding of the narrowest type of float that it computes with.
      host_calls: the names of its calls of the host.
      has_order: its microbatches have an order, since a value goes from one to the next.
      is_of_loop: it is a part of a loop.
      free: the same piece where it rounds to levels itself, and does not take the levels that the pipeline chose; None
        for a piece without such choices.
    """

    def __init__(
        self, step: _Cut, makes: Mapping[Any, Atom], loop: _LoopPart | None = None, free: Piece | None = None
    ) -> None:
        self.free = free
        self._outside, self._loop, self._makes = step.part(makes.values()), loop, tuple(makes)
        self._names = [step.names[value] for value in self._outside.inputs]
        self.points: tuple[Point, ...] = tuple(makes if loop is None else loop.points)
        self.compared = [point for point in self.points if point.kind not in CHOSEN]
        self.reads: tuple[Name, ...] = tuple(dict.fromkeys([*self._names, *(loop.recorded.values() if loop else ())]))
        equations = [*everywhere(self._outside), *(everywhere(loop.body) if loop else ())]
        self.rounding = rounding_of(equations)
        self.host_calls = [f"{e.primitive.name} at {place_of(e)}" for e in equations if _calls_host(e)]
        self.is_of_loop, self.has_order = loop is not None, loop is None or bool(loop.carried)
        self._run = jax.jit(self._made)

    def __call__(self, arrays: Mapping[Name, Any], order: Sequence[int]) -> dict[Point, Any]:
        """Return the array of each point, on the host.

        Args:
          arrays: those that it reads.
          order: the microbatches to run, in this order; arrays are stacked in the order of the batch all the same.
        """
        made = self._run([arrays[name] for name in self.reads], jnp.array(order, jnp.int32))
        return {point: on_host(array) for point, array in zip(self.points, made, strict=True)}

    def _made(self, given: Sequence[Any], order: Any) -> list[Any]:
        arrays = dict(zip(self.reads, given, strict=True))
        made = self._outside.run(*[arrays[name] for name in self._names])
        return made if self._loop is None else self._loop.run(dict(zip(self._makes, made, strict=True)), arrays, order)


class _LoopPart:
    """A block's part of a loop, with what crosses its marks stacked."""

    def __init__(self, loop: OpenedLoop, body: _Cut, makes: Mapping[Point, Atom]) -> None:
        params, outputs = loop.equation.params, loop.body.outputs
        first, count = params["num_consts"], params["num_carry"]
        # The number of a microbatch stands between a body's constants and its carry.
        *inputs, self._index = [*loop.body.inputs[:first], *loop.body.inputs[first + 1 :], loop.body.inputs[first]]
        carry, numbers = inputs[first:], {look.point: i for i, look in enumerate(loop.results)}
        self._last = {p: carry[numbers[p]] for p in makes if numbers.get(p, count) < count}  # the last value of a carry
        reduced = [p for p in makes if p not in self._last]
        self._operations = {p: params["operations"][numbers[p] - count] if p in numbers else Concat() for p in reduced}
        read = {*self._last.values()}
        while True:  # a carry that is read is computed, too
            carried = [i for i, value in enumerate(carry) if value in read]
            self.body = body.part([*(makes[p] for p in reduced), *(outputs[i] for i in carried)])
            if read.issuperset(set(self.body.inputs).intersection(carry)):
                break
            read.update(self.body.inputs)
        self.points, self._length = tuple(makes), params["length"]
        self.carried = [carry[i] for i in carried]
        self.recorded = {value: body.names[value] for value in self.body.inputs if value in body.names}
        needed = {*self.body.inputs, *self.carried}
        self.operands = {v: of for v, of in zip(inputs, loop.equation.inputs, strict=True) if v in needed}

    def run(self, operands: Mapping[Value, Any], arrays: Mapping[Name, Any], order: Any) -> list[Any]:
        """Run the microbatches of `order`, and return the array of each point."""
        results = zip(self._operations.values(), self.body.outputs, strict=False)
        states = [op.state(self._length, struct_of(of.aval)) for op, of in results]

        def microbatch(before: Any, i: Any) -> tuple[Any, None]:
            carried, states = before
            known = {**operands, self._index: i, **dict(zip(self.carried, carried, strict=True))}
            known |= {value: arrays[name][i] for value, name in self.recorded.items()}
            found = self.body.run(*[known[value] for value in self.body.inputs])
            pairs = zip(self._operations.values(), states, strict=True)
            states = [op.update(state, y, i) for (op, state), y in zip(pairs, found, strict=False)]
            return (found[len(states) :], states), None

        start = [operands[value] for value in self.carried]
        (carried, states), _ = jax.lax.scan(microbatch, (start, states), order)
        last = dict(zip(self.carried, carried, strict=True))
        made = {p: last[v] for p, v in self._last.items()} | dict(zip(self._operations, states, strict=True))
        return [made[point] for point in self.points]


def _cut_graphs(step: TracedStep) -> tuple[_Cut, list[tuple[OpenedLoop, _Cut]]]:
    """Return the graph outside of the loops, and the body of each, cut at recorded values."""
    results = {v: look.point for of in step.loops for v, look in zip(of.equation.outputs, of.results, strict=True)}
    names = {value: i for i, value in enumerate(step.graph.inputs)}
    recorded = [{look.made: look.point for look in loop.inside if look.made is not None} for loop in step.loops]
    bodies = [(loop, _Cut(loop.given, {}, of)) for loop, of in zip(step.loops, recorded, strict=True)]
    return _Cut(step.graph, names, {**results, **step.scalars}), bodies


def _cut_without_levels(loop: OpenedLoop) -> _Cut:
    """Return the body of a loop, cut at recorded values other than levels."""
    recorded = {look.made: look.point for look in loop.inside if look.made is not None and not _is_level(look.point)}
    return _Cut(loop.body, {}, recorded)


def _is_level(point: Point) -> bool:
    return point.kind in CHOSEN and rounds_to_level(point.primitive)


def cut(step: TracedStep) -> tuple[Piece, ...]:
    """Cut a step into pieces, in about the order of computation; their `reads` count its constants as arguments."""
    outside, loops = _cut_graphs(step)
    pieces: list[Piece] = []
    for loop, body in loops:
        makes = {look.point: look.atom for look in (*loop.inside, *loop.results)}
        for block in dict.fromkeys(point.block for point in makes):
            own = {p: atom for p, atom in makes.items() if p.block == block}
            part, free = _LoopPart(loop, body, own), None
            if any(_is_level(point) for point in own):
                free = _LoopPart(loop, _cut_without_levels(loop), own)
                free = Piece(outside, free.operands, free)
            pieces.append(Piece(outside, part.operands, part, free))
    results = (look.point for loop in step.loops for look in loop.results)
    blocks = {f"/{p.leaf}": (p.phase, p.block) for p in results if p.kind == "gradient"}
    ends = {point: value for value, point in step.scalars.items()}
    ends |= points_after(jax.tree.unflatten(step.results, step.graph.outputs), blocks)
    groups: dict[Any, dict[Point, Atom]] = {}
    for p, atom in ends.items():  # of a block together, if it is computed
        groups.setdefault(p.block if p.block and atom in step.graph.producer else p, {})[p] = atom
    return *pieces, *(Piece(outside, makes) for makes in groups.values())


def early_host_calls(step: TracedStep) -> Iterator[Piece]:
    """Yield a piece for each call of the host that needs no more than arguments, with what it depends on.

    What others depend on is known once the pipeline has run: a device need not hold more than one block.
    """
    outside, loops = _cut_graphs(step)
    for loop, body in [*loops, (None, outside)]:
        for e in (step.graph if loop is None else loop.given).equations:
            if e.primitive is treduce_p or not any(map(_calls_host, (e, *inside(e.params)))):
                continue
            makes = {Point("result", f"{e.name} at {e.where}", occurrence=j): v for j, v in enumerate(e.outputs)}
            part = loop and _LoopPart(loop, body, makes)
            piece = Piece(outside, part.operands if part else makes, part)
            if not any(isinstance(name, Point) for name in piece.reads):
                yield piece


def _calls_host(equation: Any) -> bool:
    """Return True for a call of the host that returns something: printing changes no number."""
    return equation.primitive.name.endswith("_callback") and bool(avals_of(equation)[1])


def points_after(
    results: tuple[Any, Mapping[str, Any]], blocks: Mapping[str, tuple[int, str]] | None = None
) -> dict[Point, Any]:
    """Return the metrics and the leaves of the new state by their points: behind all loops, in the gradients' order.

    `blocks` has, by the path of each gradient, the number of marks before it and its block.
    """
    state, metrics = results
    found = {Point("metric", name, _BEHIND): value for name, value in metrics.items()}
    for path, leaf in flatten(state)[0].items():
        place, block = max((place for name, place in (blocks or {}).items() if path.endswith(name)), default=(0, ""))
        found[Point("state", path, _BEHIND, block=block, phase=1 + place)] = leaf
    return found


def rounding_of(equations: Iterable[Any], *, bytes_of_levels: int = 0) -> float:
    """Return the unit of rounding, relative to 1, of the narrowest type of float that these compute with.

    Floats of so few bytes are levels, and do not count.
    """
    made = (aval.dtype for equation in equations for aval in avals_of(equation)[1] if hasattr(aval, "dtype"))
    floats = [of for of in {*made} if jnp.issubdtype(of, jnp.floating) and of.itemsize > bytes_of_levels]
    return max((float(jnp.finfo(of).eps) for of in floats), default=0.0)
