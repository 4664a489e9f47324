"""Replace each `treduce` equation by its loop of tasks, followed by the sums of its partial results.

Each accumulator and each output is paired with the argument that it updates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import jax

from jaxpp_flax.engine.passes.loop.loop_tasks import Accumulator, Partition
from jaxpp_flax.engine.passes.loop.open_loops import Opened, OpenLoop
from jaxpp_flax.engine.passes.placed import Loop
from jaxpp_flax.engine.passes.updated_arguments import Position, updated_arguments
from jaxpp_flax.engine.tracing.ir import Atom, Equation, Value, emit, graph_of, struct_of, values, verify_order

__all__ = ["Lowered", "lower_loops"]


@dataclass(frozen=True, eq=False)
class Lowered:
    """A step of equations and loops in program order; `sums` add up partial results and mix ranks by design.

    `updated` gives for each output the position of the argument whose new value it is, or None.
    """

    nodes: tuple[Equation | Loop, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Atom, ...]
    sums: frozenset[Equation]
    updated: tuple[Position, ...]

    def verify(self) -> None:
        """Check that every value is defined once, before its first use."""

        def reads(node: Equation | Loop) -> list[Value]:
            return values(node.inputs) if isinstance(node, Equation) else [value for value, _ in node.inputs()]

        steps = ((f"node {k} of the step", reads(node), node.outputs) for k, node in enumerate(self.nodes))
        verify_order(self.inputs, steps, self.outputs)

    def as_text(self) -> str:
        """Return the equations between the loops as graphs, and a line for each loop and its accumulators."""
        results = set(values(self.outputs))
        texts: list[str] = []
        equations: list[Equation] = []
        for node in (*self.nodes, None):
            if isinstance(node, Equation):
                equations.append(node)
                continue
            texts += [graph_of(equations, results).as_text()] if equations else []
            texts += [node.as_text()] if node is not None else []
            equations = []
        return "\n".join(texts)


def lower_loops(step: Opened) -> Lowered:
    lowerings = {loop.equation: _Lowering(loop, loop.partition) for loop in step.loops if loop.partition is not None}
    nodes: list[Equation | Loop] = []
    sums: set[Equation] = set()
    for equation in step.graph.equations:
        if equation not in lowerings:
            nodes.append(equation)
            continue
        lowering = lowerings[equation]
        loop = lowering.loop()
        nodes += [*lowering.before, loop, *lowering.after]
        sums.update(lowering.after)
    inputs, outputs = step.graph.inputs, step.graph.outputs
    updated, by_loop = updated_arguments(nodes, inputs, outputs, sums)
    nodes = [replace(node, like=by_loop[node]) if isinstance(node, Loop) else node for node in nodes]
    return Lowered(tuple(nodes), inputs, outputs, frozenset(sums), updated)


@dataclass(frozen=True, eq=False)
class _Lowering:
    """The equations before and after one loop."""

    opened: OpenLoop
    part: Partition
    before: list[Equation] = field(default_factory=list)
    after: list[Equation] = field(default_factory=list)

    def loop(self) -> Loop:
        """Make the loop as a node; fill `before` and `after`."""
        opened, part = self.opened, self.part
        operands, carry_init = self._materialise(opened.constants), self._materialise(opened.carry_init)
        parts: list[list[Accumulator]] = [[] for _ in opened.results]
        for accumulator in part.accumulators:
            parts[accumulator.part_of].append(accumulator)
        results: dict[Accumulator, Value] = {}
        for members, axes, target in zip(parts, opened.data_axes, opened.results, strict=True):
            results.update(self._add_up(members, axes, target))
        return Loop(
            partition=part,
            schedule=opened.schedule,
            length=opened.body.length,
            operands=operands,
            carry_init=carry_init,
            carry_results=opened.carry_results,
            accumulator_results=tuple(results[accumulator] for accumulator in part.accumulators),
            batch_dims=tuple(opened.batch_dims[accumulator.part_of] for accumulator in part.accumulators),
            marks=opened.body.marks,
            cuts=opened.cuts,
        )

    def _materialise(self, atoms: Sequence[Atom]) -> tuple[Value, ...]:
        """Turn literal operands into values: tasks take arrays."""
        found: list[Value] = []
        for atom in atoms:
            if not isinstance(atom, Value):
                (copy,), _ = emit(jax.lax.copy_p.bind, [atom])
                self.before.append(copy)
                atom = copy.outputs[0]
            found.append(atom)
        return tuple(found)

    def _add_up(self, parts: Sequence[Accumulator], axes: Any, target: Value) -> dict[Accumulator, Value]:
        """Let `target` be the sum of the parts, each summed over the shards before."""
        if axes is None and len(parts) == 1:
            return {parts[0]: target}
        results = {part: Value(part.result.aval) for part in parts}
        typed = struct_of(target.aval).sharding

        def over_shards(state: Any) -> Any:
            """Make the one reduction over the data axis: the sum of the shards' partial gradients."""
            total = jax.lax.reduce_sum(state, (0,))
            return total if typed in (None, jax.typeof(total).sharding) else jax.sharding.reshard(total, typed)

        def total(*states: Any) -> Any:
            return reduce(jax.lax.add, states if axes is None else map(over_shards, states))

        equations, _ = emit(total, list(results.values()), [target])
        self.after.extend(replace(equation, source=self.opened.equation.source) for equation in equations)
        return results
