"""What crosses the marks of a loop's body, and its choices; and how far each value is in the computation."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend import source_info_util

from jaxpp_flax.engine.tracing.inline import forward_markers, is_recomputation
from jaxpp_flax.engine.tracing.ir import Atom, Constant, Equation, Graph, bodies, from_jaxpr, inside, opened, values
from jaxpp_flax.engine.tracing.markers import FORWARD, Mark, marker_p, segment_names
from jaxpp_flax.engine.tracing.primitives import facts_of
from jaxpp_flax.verify.runs.choices import Places, chosen

__all__ = ["AGAIN", "CHOICE", "BodyRun", "Crossing", "block_at", "crossings_at_top", "number_of"]

CHOICE, AGAIN = "choice", "recomputed"
_LITERAL = -1  # the phase of a value that is written into the program


@dataclass(frozen=True)
class Crossing:
    """The values that go through one mark, in one direction. `phase` is the number of marks that stand before it.

    Or a choice, of direction `CHOICE` or, recomputed for the backward pass, `AGAIN`: what it reads, and what it has
    chosen, the last `num_chosen` values. Choices of one `region` are recomputed together.
    """

    direction: str
    mark: Mark
    phase: int
    values: tuple[Any, ...]
    num_chosen: int = 0
    region: int = 0


def number_of(crossing: Crossing, before: Sequence[Crossing]) -> int:
    """Return how many of the crossings before have the direction and name of this one."""
    return sum(c.direction == crossing.direction and c.mark.name == crossing.mark.name for c in before)


class BodyRun:
    """Evaluates a loop's body as it is written.

    This runs the plain step, so it uses none of the compiler's passes: it only enters calls with a mark or a choice.

    Args:
      places: where choices are made.
      record: returns the values that take the place of those of a crossing, given with its number.

    Attributes:
      seen: what has crossed the marks, and the choices, in order of the program.
    """

    def __init__(
        self,
        places: Places = frozenset(),
        record: Callable[[Crossing, int], Sequence[Any]] = lambda crossing, number: crossing.values,
    ) -> None:
        self._places, self._record = places, record
        self.seen: list[Crossing] = []

    def __call__(self, graph: Graph, operands: Sequence[Any]) -> tuple[list[Any], list[int]]:
        """Return the results of the body, and for each the number of marks before it."""
        return self._run(graph, operands, [0] * len(operands), _Region(0))

    def _run(
        self, graph: Graph, operands: Sequence[Any], phases: Sequence[int], region: _Region
    ) -> tuple[list[Any], list[int]]:
        environment = dict(zip(graph.inputs, zip(operands, phases, strict=True), strict=True))

        def read(atom: Atom) -> tuple[Any, int]:
            return (atom.value, _LITERAL) if isinstance(atom, Constant) else environment[atom]

        outer = source_info_util.current_name_stack()
        for equation in graph.equations:
            inputs = [read(atom) for atom in equation.inputs]
            given, before = [value for value, _ in inputs], [phase for _, phase in inputs]
            phase = max([0, *before])
            inner = _entered(equation, self._places)
            if equation.primitive is marker_p:
                results, phase = self._mark(equation, phase, given, region)
                after = [phase] * len(given)
            elif inner is not None:
                results, after = self._call(equation, inner, given, before, region)
            else:
                with equation.named_within(outer):
                    results = list(equation.bind(*given))
                after = [phase] * len(results)
                if which := chosen(graph, equation, self._places):
                    number = region.number or (len(self.seen) + 1) * equation.transposed
                    reads = [value for value, before in inputs if before != _LITERAL]
                    made = self._cross(_choice(equation, phase, reads, [results[i] for i in which], number))
                    for i, value in zip(which, made[-len(which) :], strict=True):
                        results[i] = value
            environment.update(zip(equation.outputs, zip(results, after, strict=True), strict=True))
        found = [read(atom) for atom in graph.outputs]
        return [value for value, _ in found], [phase for _, phase in found]

    def _cross(self, crossing: Crossing) -> Sequence[Any]:
        self.seen.append(crossing)
        return self._record(crossing, len(self.seen) - 1)

    def _mark(self, equation: Equation, phase: int, given: Sequence[Any], region: _Region) -> tuple[Sequence[Any], int]:
        is_forward, identifier = equation.params["direction"] == FORWARD, equation.params["identifier"]
        if region.number and is_forward:  # what was recorded there stands for it: no block recomputes another
            number = region.originals[identifier].pop(0)
            region.marks[identifier].append(number)
            return self._record(self.seen[number], number), self.seen[number].phase + 1
        if is_forward:
            region.marks[identifier].append(len(self.seen))
        return self._cross(_crossing(equation, phase, given)), phase + 1

    def _call(
        self, equation: Equation, inner: Any, given: Sequence[Any], before: Sequence[int], region: _Region
    ) -> tuple[list[Any], list[int]]:
        again = is_recomputation(equation)
        graph, constants = from_jaxpr(inner, transposed=equation.transposed and not again)
        if again:
            region = region.recomputed(region.number or len(self.seen) + 1, forward_markers(opened(inner).eqns))
        return self._run(graph, [*constants, *given], [_LITERAL] * len(constants) + [*before], region)


class _Region:
    """A part of a body that is computed together: all of it, or what one backward recomputes, then not of number 0.

    Args:
      number: tells regions apart.
      originals: for each identifier of a mark, the numbers of the crossings that it recomputes, in order.

    Attributes:
      marks: for each identifier, the numbers of the crossings in it that no region inside has recomputed yet.
    """

    def __init__(self, number: int, originals: Mapping[int, list[int]] | None = None) -> None:
        self.number, self.originals = number, originals or {}
        self.marks = defaultdict[int, list[int]](list)

    def recomputed(self, number: int, identifiers: Iterable[int]) -> _Region:
        """Return the region that recomputes these marks: the last ones, since backwards run in reverse order."""
        counts = Counter(identifiers)
        originals = {of: self.marks[of][-count:] for of, count in counts.items()}
        for of, count in counts.items():
            del self.marks[of][-count:]
        return _Region(number, originals)


def _entered(equation: Equation, places: Places) -> Any:
    """Return the jaxpr of a call that holds a mark, or may hold a choice; None for other equations."""
    if not bodies(equation.params) or not (places or any(e.primitive is marker_p for e in inside(equation.params))):
        return None
    return facts_of(equation.primitive).body_in(equation.params)


def _choice(equation: Equation, phase: int, reads: Sequence[Any], made: Sequence[Any], region: int) -> Crossing:
    mark = Mark(f"{equation.name} at {equation.where}", False, equation.where)
    return Crossing(AGAIN if region else CHOICE, mark, phase, (*reads, *made), len(made), region)


def _crossing(equation: Any, phase: int, values: Sequence[Any]) -> Crossing:
    params = equation.params
    return Crossing(
        params["direction"], Mark(params["name"], params["closes_block"], equation.where), phase, tuple(values)
    )


def crossings_at_top(graph: Graph, places: Places) -> list[Crossing]:
    """Return the crossings of a graph whose marks and choices stand at its top; their values are its own atoms.

    The region of a recomputed choice is the position behind its equation.
    """
    found: list[Crossing] = []
    for i, e in enumerate(graph.equations):
        if e.primitive is marker_p:
            found.append(_crossing(e, 0, e.inputs))
        elif which := chosen(graph, e, places):
            found.append(
                _choice(e, 0, values(e.inputs), [e.outputs[j] for j in which], (i + 1) * (e.late or e.transposed))
            )
    return found


def block_at(phase: int, seen: Sequence[Crossing]) -> str:
    """Return the name of the block that computes a value after so many marks: up the blocks, and down again.

    Example:
      >>> there = [Crossing(FORWARD, Mark(name, True, ""), i, ()) for i, name in enumerate("ab")]
      >>> back = [Crossing("backward", Mark(name, True, ""), i + 2, ()) for i, name in enumerate("ba")]
      >>> [block_at(phase, [*there, *back]) for phase in range(5)]
      ['a', 'b', 'after_b', 'b', 'a']
    """
    marks = [crossing.mark for crossing in seen if crossing.direction == FORWARD]
    names = segment_names(marks)
    last = len(marks)
    return names[max(0, phase if phase <= last else 2 * last - phase)]
