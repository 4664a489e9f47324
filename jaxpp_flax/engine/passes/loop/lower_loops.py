"""Let each loop return its accumulators, followed by the sums of its partial results.

Each accumulator and each output is paired with the argument that it updates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import jax

from jaxpp_flax.engine.passes.loop.loop import Loop, Step
from jaxpp_flax.engine.passes.updated_arguments import updated_arguments
from jaxpp_flax.engine.tracing.ir import Atom, Equation, Value, emit, struct_of

__all__ = ["lower_loops"]


def lower_loops(step: Step) -> Step:
    equations, loops, sums = list[Equation](), list[Loop](), set[Equation]()
    for equation in step.graph.equations:
        loop = step.loop_of.get(equation)
        if loop is None:
            equations.append(equation)
            continue
        before, lowered, after = _lowered(loop)
        equations += [*before, lowered.equation, *after]
        loops.append(lowered)
        sums.update(after)
    graph = replace(step.graph, equations=tuple(equations))
    updated, by_loop = updated_arguments(graph, sums, {loop.equation: loop.batch_dims for loop in loops})
    loops = [replace(loop, like=by_loop[loop.equation]) for loop in loops]
    return Step(graph, tuple(loops), frozenset(sums), updated)


def _lowered(loop: Loop) -> tuple[list[Equation], Loop, list[Equation]]:
    """Return a loop that returns its accumulators, with the equations before and after it."""
    before, operands = list[Equation](), list[Atom]()
    for atom in loop.equation.inputs:
        if not isinstance(atom, Value):  # tasks take arrays
            copies, (atom,) = emit(jax.lax.copy_p.bind, [atom])
            before += copies
        operands.append(atom)
    accumulators, after = loop.partition.accumulators, list[Equation]()
    made = [Value(accumulator.result.aval) for accumulator in accumulators]
    for number, (axes, target) in enumerate(zip(loop.data_axes, loop.results, strict=True)):
        parts = [k for k, accumulator in enumerate(accumulators) if accumulator.part_of == number]
        if axes is None and len(parts) == 1:
            made[parts[0]] = target
        else:
            after += _sum([made[k] for k in parts], axes, target, loop.equation)
    equation = replace(loop.equation, inputs=tuple(operands), outputs=(*loop.carry_results, *made))
    batch_dims = tuple(loop.batch_dims[accumulator.part_of] for accumulator in accumulators)
    return before, replace(loop, equation=equation, batch_dims=batch_dims), after


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
