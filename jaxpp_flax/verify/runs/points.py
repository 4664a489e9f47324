"""The points of a step at which both sides are looked at, in order of computation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from jaxpp_flax.engine.tracing.ir import Atom, Equation, Graph, Value, values
from jaxpp_flax.engine.tracing.markers import FORWARD, Mark, marker_p, segment_names
from jaxpp_flax.verify.runs.choices import EquationChoices, num_gradients

__all__ = ["AGAIN", "CHOSEN", "Kind", "Look", "Point", "looks_in"]

Kind: TypeAlias = Literal[
    "choice", "chosen", "forward", "result", "recomputed", "chosen again", "backward", "gradient", "carry", "scalar",
    "metric", "state",
]  # fmt: skip

CHOSEN: tuple[Kind, Kind] = ("chosen", "chosen again")
AGAIN: tuple[Kind, Kind] = ("recomputed", "chosen again")


@dataclass(frozen=True)
class Point:
    """One array of a step.

    Args:
      kind: what crosses a mark forward or backward; what a choice reads, or has chosen, in the forward pass or when it
        is recomputed; a result, a gradient or the last carry of a loop; a scalar made of arrays, such as a norm; a
        metric; a leaf of the new state.
      leaf: its name there.
      loop: the number of its loop in the step; what is computed behind the loops has the next number.
      occurrence: tells apart marks of one name, in order of the program.
      block: the block that computes it.
      phase: the number of marks that stand before it: points are compared in order of loop and phase.
      region: tells apart what is recomputed for different backwards; 0 for what is not.
      line: the user's, of a choice.
    """

    kind: Kind
    leaf: str
    loop: int = 0
    occurrence: int = 0
    block: str = field(default="", compare=False)
    phase: int = field(default=0, compare=False)
    region: int = field(default=0, compare=False)
    line: str = field(default="", compare=False)

    @property
    def primitive(self) -> str:
        """The primitive of a choice."""
        return self.leaf.rpartition("[")[0]

    @property
    def name(self) -> str:
        """The leaf, and the line of a choice."""
        return f"{self.leaf} at {self.line}" if self.line else self.leaf

    def __str__(self) -> str:
        """Say which array it is."""
        return f"{self.kind} {self.name}" + (f" of block {self.block}" if self.block else "")


@dataclass(frozen=True)
class Look:
    """A look at a value of a loop's body.

    Args:
      point: which one it is.
      atom: the value.
      made: the value that the equation at `position` makes of it, or chooses: what is recorded stands for that; None
        for what a choice reads, and for results of the body.
      position: the position of the equation.
    """

    point: Point
    atom: Atom
    made: Value | None = None
    position: int = 0


def looks_in(
    loop: int,
    graph: Graph,
    choices: Mapping[Equation, Sequence[EquationChoices]],
    num_carry: int,
    parameters: Sequence[str],
) -> Iterator[Look]:
    """Yield the looks at the body of a loop: at its marks and choices, which stand at its top, and at its results.

    Args:
      loop: the number of the loop in the step.
      graph: the body.
      choices: those of its equations.
      num_carry: the number of results that are its carry, the first ones.
      parameters: the paths of the trained parameters; the body's last results are their gradients, if it has so many.
    """
    marks = [e for e in graph.equations if e.primitive is marker_p and e.params["direction"] == FORWARD]
    names = segment_names([Mark(e.params["name"], e.params["closes_block"], e.where) for e in marks])
    phases = dict.fromkeys(graph.inputs, 0)
    counts = Counter[Any]()
    backwards = 0

    def point(kind: Kind, leaf: str, phase: int, region: int = 0, line: str = "") -> Point:
        counts[kind, leaf] += 1
        block = names[max(0, phase if phase <= len(marks) else 2 * len(marks) - phase)]  # up the blocks, and down again
        return Point(kind, leaf, loop, counts[kind, leaf], block, phase, region, line)

    for i, e in enumerate(graph.equations):
        backwards += e.transposed
        phase = max((phases[value] for value in values(e.inputs)), default=0)
        if e.primitive is marker_p:
            for j, (atom, made) in enumerate(zip(e.inputs, e.outputs, strict=True)):
                yield Look(point(e.params["direction"], f"{e.params['name'] or 'mark'}[{j}]", phase), atom, made, i)
            phase += 1
        for of in choices.get(e, ()):
            read, own = AGAIN if of.again else ("choice", "chosen")
            for j, value in enumerate([*of.reads, *of.made]):
                is_made = j >= len(of.reads)
                at = point(own if is_made else read, f"{of.name}[{j}]", phase, (backwards + 1) * of.again, of.line)
                yield Look(at, value, value if is_made else None, i)
        phases |= dict.fromkeys(e.outputs, phase)
    begin = len(graph.outputs) - num_gradients(len(graph.outputs), num_carry, parameters)
    for i, atom in enumerate(graph.outputs):
        kind, leaf = ("carry", str(i)) if i < num_carry else ("result", str(i - num_carry))
        if i >= begin:
            kind, leaf = "gradient", parameters[i - begin]
        elif i == num_carry and begin < len(graph.outputs):  # a training loop returns the terms of the loss first
            leaf = "summed loss"
        yield Look(point(kind, leaf, phases[atom] if isinstance(atom, Value) else 0), atom)
