"""Choices: results that jump where a float moves a little: arg-max, top-k, comparisons, casts to integers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax

from jaxpp_flax.engine.analyses.inner_bodies import open_scan
from jaxpp_flax.engine.tracing.ir import Atom, Equation, Graph, Value, bodies, emit, prune, values
from jaxpp_flax.engine.tracing.primitives import Batch, facts_of
from jaxpp_flax.verify.rounding import is_float

__all__ = ["EquationChoices", "choice_places", "num_gradients", "open_choices", "rounds_to_level"]

# What rounds a number to the nearest of some levels, as quantised products do.
_ROUNDING = ("ceil", "convert_element_type", "floor", "round")

Places: TypeAlias = frozenset[tuple[str, str]]
"""The primitives, and the user's lines, of choices."""


@dataclass(frozen=True, eq=False)
class EquationChoices:
    """The choices of an equation: what they read, and have chosen; those inside a scan are stacked by its steps.

    `name` is the primitive, `line` the user's. `again` says that they are made again for the backward pass.
    """

    name: str
    line: str
    reads: tuple[Value, ...]
    made: tuple[Value, ...]
    again: bool

    def at(self, stacked: Mapping[Value, Value]) -> EquationChoices:
        """Return the same where a scan returns them."""
        reads, made = (tuple(stacked[value] for value in of) for of in (self.reads, self.made))
        return replace(self, reads=reads, made=made)


def rounds_to_level(name: str) -> bool:
    """Return True if the choices of this primitive are levels of a quantised number: one level is rounding there.

    Example:
      >>> rounds_to_level("round"), rounds_to_level("top_k")
      (True, False)
    """
    return name in _ROUNDING


def num_gradients(num_results: int, num_carry: int, parameters: Sequence[str]) -> int:
    """Return how many of a loop's results are gradients, its last ones: one for each parameter, or none."""
    return len(parameters) if num_results - num_carry >= len(parameters) else 0


def choice_places(flat: Graph, num_carry: int, parameters: Sequence[str]) -> Places:
    """Return where a loop's opened body makes choices on which more depends than gradients of these parameters.

    What derivatives alone compare, such as the side of a ReLU, is none (unless the forward pass chooses by the same
    operation); nor is what depends on keys alone, such as the mask of a dropout; nor what a `cond`, `while` or
    `shard_map` chooses.
    """
    count = len(flat.outputs)
    forward = replace(flat, outputs=flat.outputs[: count - num_gradients(count, num_carry, parameters)])
    return frozenset(_places_in(prune(forward), {value for value in flat.inputs if is_float(value.aval)}))


def _places_in(graph: Graph, moving: set[Value]) -> Iterator[tuple[str, str]]:
    """Yield the places of choices; `moving` are the inputs that rounding may move."""
    for e in graph.equations:
        if moving.isdisjoint(e.inputs):
            continue
        moving.update(e.outputs)
        if _is_scan(e):
            scan = open_scan(e)
            pairs = enumerate(zip(scan.body.outputs, e.outputs, strict=True))
            read = tuple(atom for i, (atom, value) in pairs if i < scan.num_carry or graph.reads[value])
            inputs = zip(e.inputs, scan.body.inputs, strict=True)
            inner = {
                value for atom, value in inputs if atom in moving or (value in scan.carry_in and is_float(value.aval))
            }
            yield from _places_in(prune(replace(scan.body, outputs=read)), inner)
        elif _made_by(graph, e):
            yield e.name, e.where


def open_choices(
    graph: Graph, places: Places, *, again: bool = False
) -> tuple[Graph, Graph, dict[Equation, list[EquationChoices]]]:
    """Return a graph whose scans return their choices, too; the same for given choices; and the choices by equation.

    In the graph for given choices, a scan makes the same, but goes on with what stands for its choices: it reads the
    values that it makes. Whoever runs it gives others to read. `again`: the graph is of a scan for the backward pass.
    """
    shown, given, found = list[Equation](), list[Equation](), dict[Equation, list[EquationChoices]]()
    for e in graph.equations:
        later = again or e.late or e.transposed
        if _is_scan(e):
            own, others, choices = _open_scan(e, places, later)
        else:
            own, others, choices = [e], [e], _choices_of(graph, e, places, later)
        shown += own
        given += others
        if choices:
            found[next(x for x in own if choices[0].made[0] in x.outputs)] = choices
    return replace(graph, equations=tuple(shown)), replace(graph, equations=tuple(given)), found


def _choices_of(graph: Graph, e: Equation, places: Places, again: bool) -> list[EquationChoices]:
    # What a backward makes has a line that depends on what JAX has traced before, so it counts by its primitive alone.
    is_one = any(e.name == name for name, _ in places) if again else (e.name, e.where) in places
    made = _made_by(graph, e) if is_one else ()
    return [EquationChoices(e.name, e.where, tuple(values(e.inputs)), made, again)] if made else []


def _open_scan(
    e: Equation, places: Places, again: bool
) -> tuple[list[Equation], list[Equation], list[EquationChoices]]:
    scan = open_scan(e)
    shown, given, found = open_choices(scan.body, places, again=again)
    inner = [choices for of in found.values() for choices in of]
    if not inner:
        return [e], [e], []
    made = dict.fromkeys(value for choices in inner for value in choices.made)
    looked_at = tuple(dict.fromkeys([*made, *(value for choices in inner for value in choices.reads)]))
    stand_ins: dict[Atom, Value] = {value: Value(value.aval) for value in made}
    given = Graph(
        (*given.inputs, *stand_ins.values()),
        tuple(stand_ins.get(atom, atom) for atom in given.outputs),
        tuple(x.reading(tuple(stand_ins.get(atom, atom) for atom in x.inputs)) for x in given.equations),
    )

    def scanning(body: Graph) -> Callable[..., list[Any]]:
        body, first, second = replace(body, outputs=(*body.outputs, *looked_at)), scan.num_consts, scan.num_carry

        def run(*operands: Any) -> list[Any]:
            def step(carry: Any, xs: Any) -> tuple[Any, Any]:
                results = body.run(*operands[:first], *carry, *xs)
                return tuple(results[:second]), tuple(results[second:])

            split = tuple(operands[first : first + second]), tuple(operands[first + second :])
            carry, stacked = jax.lax.scan(step, *split, e.params["length"], reverse=e.params["reverse"])
            return [*carry, *stacked]

        return run

    own, results = emit(scanning(shown), e.inputs, [*e.outputs, *[None] * len(looked_at)], like=e)
    outputs = values(results)
    stacked = dict(zip(looked_at, outputs[len(e.outputs) :], strict=True))
    others, _ = emit(scanning(given), [*e.inputs, *(stacked[value] for value in made)], outputs, like=e)
    return own, others, [choices.at(stacked) for choices in inner]


def _is_scan(equation: Equation) -> bool:
    return facts_of(equation.primitive).batch is Batch.SCAN


def _made_by(graph: Graph, equation: Equation) -> tuple[Value, ...]:
    """Return the results of an equation that are choices, and that something reads."""
    jumps = facts_of(equation.primitive).jumps
    if jumps is False or bodies(equation.params) or not any(is_float(atom.aval) for atom in equation.inputs):
        return ()
    return tuple(v for v in equation.outputs if graph.reads[v] and (jumps or not is_float(v.aval)))
