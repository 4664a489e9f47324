"""The flow of values in a graph: what a value is computed from, what reads it, and what makes it."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxpp_flax.engine.tracing.ir import Atom, Equation, Value, values
from jaxpp_flax.engine.tracing.primitives import Cost, facts_of

__all__ = ["Groups", "ancestors", "delayed", "makers_of", "source_of", "split_backward"]


class Groups:
    """Groups of values, and of other things, that are joined one after another.

    Example:
      >>> groups = Groups("abc")
      >>> groups.join("ac")
      >>> groups.find("c") == groups.find("a") != groups.find("b"), "d" in groups
      (True, False)
    """

    def __init__(self, members: Iterable[Hashable]) -> None:
        self._parent = {member: member for member in members}

    def __contains__(self, member: Hashable) -> bool:
        return member in self._parent

    def find(self, member: Hashable) -> Hashable:
        """Return the member that stands for the whole group."""
        while (parent := self._parent[member]) != member:
            self._parent[member] = self._parent[parent]
            member = parent
        return member

    def join(self, members: Iterable[Hashable]) -> None:
        """Make one group of the groups of some members; a new one comes with a group of its own."""
        first, *others = [self.find(self._parent.setdefault(member, member)) for member in members]
        for other in others:
            self._parent[other] = first

    def join_results(self, equation: Equation) -> None:
        """Join the known operands of an equation with its results, if it has any."""
        if operands := [value for value in values(equation.inputs) if value in self]:
            self.join([*operands, *equation.outputs])


def ancestors(atoms: Iterable[Atom], producer: Mapping[Value, Equation]) -> Iterator[Value]:
    """Yield the values from which `producer`'s equations compute atoms; the atoms themselves come first."""
    stack, seen = values(atoms), set[Value]()
    while stack:
        value = stack.pop()
        if value not in seen:
            seen.add(value)
            yield value
            stack.extend(values(producer[value].inputs) if value in producer else ())


def makers_of(
    equations: Sequence[Equation], wanted: Iterable[Value], kept: Collection[Value] = ()
) -> tuple[Equation, ...]:
    """Return those of some equations that compute the wanted values from the kept ones, in order."""
    needed = {v for v in wanted if v not in kept}
    makers: list[Equation] = []
    for equation in reversed(equations):
        if not needed.isdisjoint(equation.outputs):
            makers.append(equation)
            needed.update(v for v in values(equation.inputs) if v not in kept)
    return tuple(reversed(makers))


def split_backward(
    equations: Sequence[Equation], leaving: Iterable[Value]
) -> tuple[tuple[Equation, ...], tuple[Equation, ...]]:
    """Split backward work into what the cotangents need that leave its stage, and the rest: gradients of weights."""
    of_inputs = makers_of(equations, leaving)
    needed = set(of_inputs)
    return of_inputs, tuple(equation for equation in equations if equation not in needed)


def delayed(times: dict[Equation, int], kept: Collection[Equation]) -> list[tuple[int, list[Equation]]]:
    """Delay equations to the time of their first reader, so that no result is held before; return them by time.

    Args:
      times: the earliest time of each equation, in program order.
      kept: the equations that keep their time; so does an equation without a reader.
    """
    late = dict(times)
    first_use: dict[Value, int] = {}
    for equation in reversed(times):
        uses = [first_use[v] for v in equation.outputs if v in first_use]
        if uses and equation not in kept:
            late[equation] = min(uses)
        for value in values(equation.inputs):
            first_use[value] = min(late[equation], first_use.get(value, late[equation]))
    by_time: dict[int, list[Equation]] = {}
    for equation, time in late.items():
        by_time.setdefault(time, []).append(equation)
    return sorted(by_time.items())


def source_of(atom: Any, makers: Mapping[Value, Equation]) -> Value | None:
    """Return the value that this is, or is a view of; a transposed operand is read as it lies."""
    while isinstance(atom, Value) and atom in makers:
        equation = makers[atom]
        if equation.name != "transpose" and facts_of(equation.primitive).cost is not Cost.VIEW:
            break
        if not equation.inputs:
            return None
        place = equation.outputs.index(atom) if len(equation.outputs) == len(equation.inputs) else 0
        atom = equation.inputs[place]
    return atom if isinstance(atom, Value) else None
