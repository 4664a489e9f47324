"""Let each loop return its accumulators, followed by the sums of its partial results.

Each accumulator and each output is paired with the argument that it updates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import jax

from jaxpp_flax.engine.passes.loop.loop import CutLoop, LoweredLoop, advanced, loops_of
from jaxpp_flax.engine.passes.updated_arguments import updated_arguments
from jaxpp_flax.engine.tracing.ir import Atom, Equation, Graph, Value, emit, struct_of

__all__ = ["LoweredStep", "lower_loops"]


@dataclass(frozen=True, eq=False)
class LoweredStep(Graph):
    """A step whose loops are lowered.

    `sums` are the equations that add up partial results of loops: they mix ranks by design. `updated` gives for each
    output the position of the argument whose new value it is, or None.
    """

    sums: frozenset[Equation]
    updated: tuple[int | None, ...]


def lower_loops(step: Graph) -> LoweredStep:
    """Lower each loop that is cut into tasks."""
    equations, sums = list[Equation](), set[Equation]()
    for equation in step.equations:
        if isinstance(equation, CutLoop):
            before, loop, after = _lowered(equation)
            equations += [*before, loop, *after]
            sums.update(after)
        else:
            equations.append(equation)
    graph = replace(step, equations=tuple(equations))
    updated, by_loop = updated_arguments(graph, sums, loops_of(graph, CutLoop))
    lowered = (advanced(LoweredLoop, e, like=by_loop[e]) if isinstance(e, CutLoop) else e for e in equations)
    return LoweredStep(step.inputs, step.outputs, tuple(lowered), frozenset(sums), updated)


def _lowered(loop: CutLoop) -> tuple[list[Equation], CutLoop, list[Equation]]:
    """Return a loop that returns its accumulators, with the equations before and after it."""
    before, operands = list[Equation](), list[Atom]()
    for atom in loop.inputs:
        if not isinstance(atom, Value):  # tasks take arrays
            copies, (atom,) = emit(jax.lax.copy_p.bind, [atom])
            before += copies
        operands.append(atom)
    accumulators, after = loop.partition.accumulators, list[Equation]()
    results = [Value(accumulator.result.aval) for accumulator in accumulators]
    for number, (axes, target) in enumerate(zip(loop.data_axes, loop.results, strict=True)):
        parts = [k for k, accumulator in enumerate(accumulators) if accumulator.part_of == number]
        if axes is None and len(parts) == 1:
            results[parts[0]] = target
        else:
            after += _sum([results[k] for k in parts], axes, target, loop)
    batch_dims = tuple(loop.batch_dims[accumulator.part_of] for accumulator in accumulators)
    outputs = (*loop.carry_results, *results)
    return before, replace(loop, inputs=tuple(operands), outputs=outputs, batch_dims=batch_dims), after


def _sum(parts: Sequence[Value], axes: Any, target: Value, loop: Equation) -> list[Equation]:
    """Let `target` be the sum of the parts, each summed over the shards before."""
    typed = struct_of(target.aval).sharding

    def over_shards(state: Any) -> Any:
        """Make the one reduction over the data axis: the sum of the shards' partial gradients."""
        total = jax.lax.reduce_sum(state, (0,))
        return total if typed in (None, jax.typeof(total).sharding) else jax.sharding.reshard(total, typed)

    def total(*states: Any) -> Any:
        return reduce(jax.lax.add, states if axes is None else map(over_shards, states))

    equations, _ = emit(total, parts, [target])
    return [replace(equation, source=loop.source) for equation in equations]
