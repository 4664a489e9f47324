"""The points of a step at which both sides are looked at, in order of computation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from jaxpp_flax.verify.runs.choices import num_gradients
from jaxpp_flax.verify.runs.crossings import AGAIN, Crossing, block_at, number_of

__all__ = ["CHOSEN", "Kind", "LoopPoints", "Point", "name_loop", "points_of"]

Kind: TypeAlias = Literal[
    "choice", "chosen", "forward", "result", "recomputed", "chosen again", "backward", "gradient", "carry", "scalar",
    "metric", "state",
]  # fmt: skip


CHOSEN: tuple[Kind, Kind] = ("chosen", "chosen again")


@dataclass(frozen=True)
class Point:
    """One array of a step. Both sides find the same points; only the plain side knows their blocks and phases.

    Args:
      kind: what crosses a mark forward or backward; what a choice reads, or has chosen, in the forward pass or when it
        is recomputed; a result, a gradient or the last carry of a loop; a scalar made of arrays, such as a norm; a
        metric; a leaf of the new state.
      leaf: its name there.
      loop: the number of its loop in the step; what is computed behind the loops has the next number.
      occurrence: tells apart marks of one name, in order of the program.
      block: the block that computes it.
      phase: the number of marks that stand before it: points are compared in order of loop and phase.
      region: that of its crossing.
    """

    kind: Kind
    leaf: str
    loop: int = 0
    occurrence: int = 0
    block: str = field(default="", compare=False)
    phase: int = field(default=0, compare=False)
    region: int = field(default=0, compare=False)

    def __str__(self) -> str:
        """Say which array it is."""
        return f"{self.kind} {self.leaf}" + (f" of block {self.block}" if self.block else "")


@dataclass(frozen=True)
class LoopPoints:
    """The points of one loop: what crosses its marks, stacked by microbatch, and its results after the loop."""

    crossings: tuple[tuple[Point, ...], ...]
    results: tuple[Point, ...]


def points_of(crossing: Crossing, loop: int, number: int, block: str = "") -> Iterator[Point]:
    """Yield the points of a crossing's values; `number` counts crossings of its direction and name before it."""
    first_chosen = len(crossing.values) - crossing.num_chosen
    for i in range(len(crossing.values)):
        kind = crossing.direction if i < first_chosen else CHOSEN[crossing.direction == AGAIN]
        leaf = f"{crossing.mark.name or 'mark'}[{i}]"
        yield Point(kind, leaf, loop, number, block, crossing.phase, crossing.region)  # pyright: ignore[reportArgumentType]


def name_loop(
    loop: int, seen: Sequence[Crossing], phases: Sequence[int], num_carry: int, parameters: Sequence[str]
) -> LoopPoints:
    """Name the points of a loop.

    Args:
      loop: its number in the step.
      seen: the crossings of its body, in order.
      phases: for each result of the body (the carry first), the number of marks before it.
      num_carry: the number of results that are its carry.
      parameters: the paths of the trained parameters; the body's last results are their gradients, if it has so many.
    """
    crossings = [
        tuple(points_of(crossing, loop, number_of(crossing, seen[:i]), block_at(crossing.phase, seen)))
        for i, crossing in enumerate(seen)
    ]
    count = num_gradients(len(phases), num_carry, parameters)
    begin = len(phases) - count
    results: list[Point] = []
    for i, phase in enumerate(phases):
        kind, leaf = _result(i, num_carry, begin, parameters, has_gradients=count > 0)
        results.append(Point(kind, leaf, loop, block=block_at(phase, seen), phase=phase))
    return LoopPoints(tuple(crossings), tuple(results))


def _result(
    number: int, num_carry: int, begin: int, parameters: Sequence[str], *, has_gradients: bool
) -> tuple[Kind, str]:
    if number < num_carry:
        return "carry", str(number)
    if number < begin:  # a training loop returns the terms of the loss first
        is_loss = number == num_carry and has_gradients
        return "result", "summed loss" if is_loss else str(number - num_carry)
    return "gradient", parameters[number - begin]
