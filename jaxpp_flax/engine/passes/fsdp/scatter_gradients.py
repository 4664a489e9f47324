"""Reduce and scatter the gradient of a sharded parameter in one collective, after the loop.

An accumulator of partial sums has one part for each shard of the batch. Their sum is wanted sharded as the parameter
is. Written as a sum, XLA may reduce the whole gradient onto each device and cut it there. Written as a `shard_map`, it
is a reduce-scatter on every platform. What the batch is sharded over besides the parameter's axes is summed on shards.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxpp_flax.engine.analyses.data_flow import ancestors, use_counts
from jaxpp_flax.engine.arrays.mesh import axes_in
from jaxpp_flax.engine.passes.fsdp.rule import FsdpRule, FsdpWarning
from jaxpp_flax.engine.passes.loop.loop_tasks import Accumulator
from jaxpp_flax.engine.passes.loop.lower_loops import Lowered
from jaxpp_flax.engine.passes.placed import Loop
from jaxpp_flax.engine.program.specs import accumulator_spec
from jaxpp_flax.engine.tracing.ir import Equation, Graph, Value, emit, producers, struct_of, values
from jaxpp_flax.engine.tracing.primitives import facts_of

__all__ = ["scatter_gradients", "scatter_sum"]


def scatter_gradients(step: Lowered, specs: Sequence[PartitionSpec], rule: FsdpRule | None) -> Lowered:
    """Replace the sums of partial gradients; without a rule, nothing changes.

    Args:
      step: with accumulators that know the argument that they update.
      specs: the partition of each input of the step inside a submesh.
      rule: the setting, or None.
    """
    if rule is None:
        return step
    places = _Places(step.nodes, step, specs)
    _warn_of_reductions(step.nodes, step.inputs, specs, rule)
    made: list[Equation | Loop] = []
    sums: set[Equation] = set()
    skipped: set[Equation] = set()
    for node in step.nodes:
        if isinstance(node, Loop) or node not in step.sums or (place := places.of(node)) is None:
            if node not in skipped:
                made.append(node)
                sums.update([node] if isinstance(node, Equation) and node in step.sums else [])
            continue
        last = places.placing_of(node) or node
        equations = scatter_sum(node, last.outputs[0], place, rule)
        skipped.update([last] if equations != [node] else [])
        made += equations
        sums.update(equations)
    return replace(step, nodes=tuple(made), sums=frozenset(sums))


def _warn_of_reductions(
    nodes: Sequence[Equation | Loop], inputs: Sequence[Value], specs: Sequence[PartitionSpec], rule: FsdpRule
) -> None:
    """Warn of gradients that cannot wait for the end of the loop."""
    spec_of = dict(zip(inputs, specs, strict=True))
    for loop in nodes:
        if not isinstance(loop, Loop):
            continue
        shards = [a for gather in loop.gathers.values() for a in gather.equation.inputs if a in spec_of]
        sharded = {(a.aval.shape, spec_of[a]) for a in shards}  # type: ignore[index]
        for accumulator, like, batch_dim in zip(loop.partition.accumulators, loop.like, loop.batch_dims, strict=True):
            aval = accumulator.state.aval
            if like is None or batch_dim is not None or (aval.shape, specs[like]) not in sharded:
                continue
            if _adds_something(loop.partition.tasks[accumulator.task].graph, accumulator):
                warnings.warn(
                    f"the gradient that updates {rule.name_of(inputs[like])}, {aval.str_short()}, is no sum over "
                    "examples in its dtype, so it is reduced in every microbatch, not once. Sum it in the dtype in "
                    "which it is computed; docs/internals/engine.md, 'Data axes', has the rules.",
                    FsdpWarning,
                    stacklevel=2,
                )


def _adds_something(graph: Graph, accumulator: Accumulator) -> bool:
    """Return whether a task adds more than constants to an accumulator: an unused parameter's gradient is zero."""
    made = producers(graph.equations)
    added = [a for a in made[accumulator.result].inputs if a is not accumulator.state]
    return not set(graph.inputs).isdisjoint(ancestors(added, made))


class _Places:
    """The partitions before and after each sum of partial gradients."""

    def __init__(self, nodes: Sequence[Equation | Loop], step: Lowered, specs: Sequence[PartitionSpec]) -> None:
        equations = [node for node in nodes if isinstance(node, Equation)]
        self.users = use_counts(equations, step.outputs)
        self.readers = {v: e for e in equations for v in values(e.inputs)}
        self.accumulated: dict[Value, tuple[PartitionSpec, PartitionSpec]] = {}
        for loop in nodes:
            for k, value in enumerate(loop.accumulator_results if isinstance(loop, Loop) else ()):
                like, batch_dim = loop.like[k], loop.batch_dims[k]  # type: ignore[union-attr]
                if like is not None and batch_dim is not None and batch_dim[0] == 0:
                    before = accumulator_spec(value.aval, batch_dim, specs[like], ())
                    self.accumulated[value] = before, specs[like]

    def of(self, equation: Equation) -> tuple[PartitionSpec, PartitionSpec] | None:
        """Return the partition of the parts and of the sum, if the equation sums the parts of a sharded gradient."""
        if equation.name != "reduce_sum" or equation.inputs[0] not in self.accumulated:
            return None
        before, after = self.accumulated[equation.inputs[0]]  # type: ignore[index]
        return (before, after) if _scattered_axes(before, after) else None

    def placing_of(self, equation: Equation) -> Equation | None:
        """Return the equation behind a sum that only places the sum."""
        (total,) = equation.outputs
        reader = self.readers.get(total)
        placing = reader is not None and facts_of(reader.primitive).placing is not None
        return reader if placing and self.users[total] == 1 else None


def _scattered_axes(before: PartitionSpec, after: PartitionSpec) -> set[str]:
    """Return the axes of the parts over which the sum is sharded."""
    return set(axes_in((before.partitions[0],))).intersection(axes_in(after))


def scatter_sum(equation: Equation, target: Value, place: tuple[PartitionSpec, PartitionSpec], rule: FsdpRule) -> Any:
    """Return the equations of the sum that make `target`; the equation itself if nothing better is known."""
    before, after = place
    axes = axes_in((before.partitions[0],))
    scattered = [tuple(n for n in axes_in((entry,)) if n in axes) for entry in after.partitions]
    trailing = all(
        tuple(axes_in((entry,)))[-len(names) :] == names
        for entry, names in zip(after.partitions, scattered, strict=True)
        if names
    )
    typed = struct_of(target.aval).sharding
    if typed is not None and (not trailing or set(axes_in(typed.spec)) != set(axes_in(after))):
        return [equation]
    function: Callable[..., Any]
    if trailing:
        function = jax.shard_map(_reduce_scatter(axes, scattered), mesh=rule.mesh, in_specs=before, out_specs=after)
    else:  # a shard of the parts has no contiguous shard of the sum: XLA finds the way
        sharding = NamedSharding(rule.mesh, after)
        function = lambda x: jax.lax.with_sharding_constraint(jax.lax.reduce_sum(x, (0,)), sharding)  # noqa: E731
    made, _ = emit(function, equation.inputs, [target])
    return [replace(e, source=equation.source) for e in made]


def _reduce_scatter(axes: Sequence[str], scattered: Sequence[tuple[str, ...]]) -> Callable[[jax.Array], jax.Array]:
    """Return a function of a device's part of shape (1, ...): `scattered` gives each dimension's axes of the sum."""
    rest = tuple(name for name in axes if not any(name in names for names in scattered))

    def run(part: jax.Array) -> jax.Array:
        total = jax.lax.squeeze(part, (0,))
        for dim, names in enumerate(scattered):
            if names:
                total = jax.lax.psum_scatter(total, names, scatter_dimension=dim, tiled=True)
        return jax.lax.psum(total, rest) if rest else total

    return run
