"""Reduce and scatter the gradient of a sharded parameter in one collective, after the loop.

An accumulator of partial sums has one part for each shard of the batch. Their sum is wanted sharded as the parameter
is. Written as a sum, XLA may reduce the whole gradient onto each device and cut it there. Written as a `shard_map`, it
is a reduce-scatter on every platform. What the batch is sharded over besides the parameter's axes is summed on shards.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxpp_flax.engine.analyses.data_flow import ancestors
from jaxpp_flax.engine.arrays.mesh import axes_in
from jaxpp_flax.engine.passes.fsdp.rule import FsdpRule, FsdpWarning
from jaxpp_flax.engine.passes.loop.loop import Accumulator, LoweredLoop, loops_of
from jaxpp_flax.engine.passes.loop.lower_loops import LoweredStep
from jaxpp_flax.engine.program.specs import accumulator_spec
from jaxpp_flax.engine.tracing.ir import Equation, Graph, Value, emit, struct_of, values
from jaxpp_flax.engine.tracing.primitives import facts_of
from jaxpp_flax.messages import warn_user

__all__ = ["scatter_gradients", "scatter_sum"]


def scatter_gradients(step: LoweredStep, specs: Sequence[PartitionSpec], rule: FsdpRule | None) -> LoweredStep:
    """Replace the sums of partial gradients; without a rule, nothing changes.

    Args:
      step: with accumulators that know the argument that they update.
      specs: the partition of each input of the step inside a submesh.
      rule: the setting, or None.
    """
    if rule is None:
        return step
    readers = {v: e for e in step.equations for v in values(e.inputs)}
    replaced: dict[Equation, list[Equation]] = {}
    for loop in loops_of(step, LoweredLoop):
        _warn_of_reductions(loop, step.inputs, specs, rule)
        for value, like, batch_dim in zip(loop.results, loop.like, loop.batch_dims, strict=True):
            total = readers.get(value)
            if like is None or batch_dim is None or total not in step.sums or total.name != "reduce_sum":
                continue
            before = accumulator_spec(value.aval, batch_dim, specs[like], ())
            last = _placing_of(total.outputs[0], step, readers) or total
            if scatters := scatter_sum(total, last.outputs[0], (before, specs[like]), rule, step.inputs[like]):
                replaced |= {last: [], total: scatters}
    equations = tuple(kept for equation in step.equations for kept in replaced.get(equation, [equation]))
    sums = step.sums.difference(replaced).union(*replaced.values())
    return replace(step, equations=equations, sums=sums)


def _warn_of_reductions(
    loop: LoweredLoop, inputs: Sequence[Value], specs: Sequence[PartitionSpec], rule: FsdpRule
) -> None:
    """Warn of gradients that cannot wait for the end of the loop."""
    axes = {name for dim in loop.batch_dims if dim is not None for name in axes_in((dim[1],))}
    for accumulator, like, batch_dim in zip(loop.partition.accumulators, loop.like, loop.batch_dims, strict=True):
        aval = accumulator.state.aval
        if like is None or batch_dim is not None or axes.isdisjoint(axes_in(specs[like])):
            continue
        if _adds_something(loop.partition.tasks[accumulator.task].graph, accumulator):
            warn_user(
                f"the gradient that updates {rule.name_of(inputs[like])}, {aval.str_short()}, is no sum over "
                "examples in its dtype, so it is reduced in every microbatch, not once. Sum it in the dtype in "
                "which it is computed; docs/internals/engine.md, 'Data axes', has the rules.",
                FsdpWarning,
            )


def _adds_something(graph: Graph, accumulator: Accumulator) -> bool:
    """Return whether a task adds more than constants to an accumulator: an unused parameter's gradient is zero."""
    added = [a for a in graph.producer[accumulator.result].inputs if a is not accumulator.state]
    return not set(graph.inputs).isdisjoint(ancestors(added, graph.producer))


def _placing_of(total: Value, outer: Graph, readers: Mapping[Value, Equation]) -> Equation | None:
    """Return the equation behind a sum that only places the sum."""
    reader = readers.get(total)
    return reader if reader is not None and facts_of(reader.primitive).placing and outer.reads[total] == 1 else None


def scatter_sum(
    equation: Equation, target: Value, place: tuple[PartitionSpec, PartitionSpec], rule: FsdpRule, parameter: Value
) -> list[Equation]:
    """Return equations that make `target`, the sum of the parts of a parameter's gradient, as the parameter is placed.

    Return none if the parameter is not sharded over the axes of the parts, or if nothing better is known than the sum.
    """
    before, after = place
    axes, entries = axes_in((before.partitions[0],)), [tuple(axes_in((entry,))) for entry in after.partitions]
    scattered = [tuple(name for name in entry if name in axes) for entry in entries]
    if not any(scattered):
        return []
    apart = [entry for entry in entries if any(a in axes and b not in axes for a, b in itertools.pairwise(entry))]
    for entry in apart:
        _warn_of_order(entry, axes, parameter, rule)
    typed = struct_of(target.aval).sharding
    if typed is not None and (apart or set(axes_in(typed.spec)) != set(axes_in(after))):
        return []
    function: Callable[..., Any]
    if apart:  # a shard of the parts has no contiguous shard of the sum: XLA finds the way
        sharding = NamedSharding(rule.mesh, after)
        function = lambda x: jax.lax.with_sharding_constraint(jax.lax.reduce_sum(x, (0,)), sharding)  # noqa: E731
    else:
        function = jax.shard_map(_reduce_scatter(axes, scattered), mesh=rule.mesh, in_specs=before, out_specs=after)
    scatters, _ = emit(function, equation.inputs, [target])
    return [replace(e, source=equation.source) for e in scatters]


def _warn_of_order(entry: Sequence[str], axes: Sequence[str], parameter: Value, rule: FsdpRule) -> None:
    """Warn of a dimension that is sharded over an axis of the batch and then, inside each shard, over another axis."""
    last = (*(name for name in entry if name not in axes), *(name for name in entry if name in axes))
    warn_user(
        f"{rule.name_of(parameter)}, {parameter.aval.str_short()}, is sharded over {tuple(entry)} in one dimension: "
        "the gathered parts of a device do not lie side by side, so its gradient is summed whole and then exchanged, "
        f"not scattered. Shard it over {last}.",
        FsdpWarning,
    )


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
