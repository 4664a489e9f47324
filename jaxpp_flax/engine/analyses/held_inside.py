"""What a task makes for its own backward, and holds while it runs: a part of XLA's workspace that is known before.

A backward that recomputes its stage starts with the stage's forward, a region of `jax.checkpoint` with its own, and a
fused task is a forward and a backward. No instruction of the program sees these values.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from jaxpp_flax.engine.analyses.spec_flow import specs_after
from jaxpp_flax.engine.arrays.mesh import axes_in
from jaxpp_flax.engine.tracing.inline import inline, is_recomputation
from jaxpp_flax.engine.tracing.ir import Equation, Graph, Value
from jaxpp_flax.engine.tracing.primitives import Cost, facts_of
from jaxpp_flax.schedules.memory import Memory

__all__ = ["Stored", "held_inside", "source_of"]


def held_inside(
    graph: Graph, in_specs: Sequence[PartitionSpec], axis_sizes: Mapping[str, int], *, fused: bool = False
) -> float:
    """Return the most bytes at one time, on one device, of what a task recomputes for its backward.

    Args:
      graph: the task's.
      in_specs: the partition of each of its inputs.
      axis_sizes: those of the mesh.
      fused: the task is a forward and a backward: also count what the one makes for the other.
    """
    if not (fused or any(equation.late or is_recomputation(equation) for equation in graph.equations)):
        return 0.0
    flat = inline(graph, flatten=True, remat=True)
    last = dict(_last_reads(flat, fused))
    specs, memory = specs_after(flat, in_specs, axis_sizes), Memory()
    ends: dict[Equation, float] = {}
    for equation in flat.equations:
        for value in equation.outputs:
            if value in last:
                shards = math.prod(axis_sizes[name] for name in axes_in(specs.get(value, ())))
                nbytes = value.nbytes / shards
                memory.change(nbytes)
                ends[last[value]] = ends.get(last[value], 0.0) + nbytes
        memory.change(-ends.get(equation, 0.0))
    return memory.peak


def _last_reads(graph: Graph, fused: bool) -> Iterator[tuple[Value, Equation]]:
    """Yield each read of a value that the task makes for a backward, in program order."""
    is_ahead = {e: e.late or (fused and not e.transposed) for e in graph.equations}
    stored = Stored([e for e in graph.equations if is_ahead[e]], graph.equations)
    made: dict[Value, int] = {}
    turn, was_backward = 0, False  # a region that starts after some backward work reads what an earlier one has made
    for equation in graph.equations:
        ahead = is_ahead[equation]
        turn += ahead and was_backward
        was_backward = not ahead
        for value in (value for atom in equation.inputs for value in stored.for_readers_of(atom)):
            if value in made and not (ahead and made[value] == turn):
                yield value, equation
        if ahead:
            made.update(dict.fromkeys(equation.outputs, turn))


class Stored:
    """What is in memory of the values that some equations make, where XLA fuses them with their readers.

    Products, kernels and loops write what they make and read what is written. What is made element by element has no
    place of its own otherwise: its readers make it again, unless it takes less than what they would read for it.

    Args:
      equations: a forward, or what is recomputed of one.
      readers: the equations whose operands are written, where they are products, kernels or loops.
      written: other values that are written.
    """

    def __init__(
        self, equations: Sequence[Equation], readers: Sequence[Equation], written: Collection[Value] = ()
    ) -> None:
        self._makers = {value: equation for equation in equations for value in equation.outputs}
        self._written = {*written}
        for equation in readers:
            if not (_is_light(equation) or facts_of(equation.primitive).is_reduction):  # a reduction fuses, too
                self._written.update(v for atom in equation.inputs if (v := source_of(atom, self._makers)) is not None)
        self._found: dict[Value, frozenset[Value]] = {}
        for value in self._makers:  # in program order, so that no search goes deep
            self.for_readers_of(value)

    def for_readers_of(self, atom: Any) -> frozenset[Value]:
        """Return the values that are in memory for whoever reads this one."""
        value = source_of(atom, self._makers)
        if value is None:
            return frozenset()
        if value not in self._found:
            self._found[value] = self._of(value)
        return self._found[value]

    def _of(self, value: Value) -> frozenset[Value]:
        maker = self._makers.get(value)
        if maker is None or value in self._written or not _is_light(maker):
            return frozenset({value})
        operands = frozenset[Value]().union(*map(self.for_readers_of, maker.inputs))
        return frozenset({value}) if value.nbytes < sum(v.nbytes for v in operands) else operands


def _is_light(equation: Equation) -> bool:
    return (
        facts_of(equation.primitive).cost in (Cost.VIEW, Cost.LIGHT) and not facts_of(equation.primitive).is_reduction
    )


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
