"""What becomes of sharded parameters before the loops that read them: the partition is followed, or the user warned."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from jax.sharding import PartitionSpec

from jaxpp_flax.engine.arrays.mesh import axes_in
from jaxpp_flax.engine.passes.fsdp.rule import FsdpRule, FsdpWarning, Gather
from jaxpp_flax.engine.tracing.ir import Equation, Value, values
from jaxpp_flax.engine.tracing.primitives import Batch, facts_of
from jaxpp_flax.engine.tracing.treduce import treduce_p

__all__ = ["follow_specs", "parameters_behind", "warn_of_derived", "warn_of_loops", "warn_of_order"]


def follow_specs(equations: Iterable[Equation], spec_of: dict[Value, PartitionSpec]) -> None:
    """Add the partitions of values that are converted, scaled, transposed or fetched from the host before a loop."""
    for equation in equations:
        arrays = [v for v in values(equation.inputs) if v.aval.shape]
        if len(arrays) == 1 == len(equation.outputs) and (spec := spec_of.get(arrays[0])) is not None:
            batch = facts_of(equation.primitive).batch
            if batch is Batch.TRANSPOSE:
                entries = (*spec.partitions, *[None] * (arrays[0].aval.ndim - len(spec.partitions)))
                spec_of[equation.outputs[0]] = PartitionSpec(*(entries[i] for i in equation.params["permutation"]))
            elif batch is Batch.ELEMENTWISE or equation.name == "device_put":
                spec_of[equation.outputs[0]] = spec


def parameters_behind(equations: Iterable[Equation], inputs: Iterable[Value]) -> dict[Value, tuple[Value, ...]]:
    """Return for each array that is made of inputs of the step these inputs.

    Sums are left out, and results of loops, and arrays whose partition the user asks for: these are as they should be.
    """
    behind: dict[Value, tuple[Value, ...]] = {value: (value,) for value in inputs}
    for equation in equations:
        facts = facts_of(equation.primitive)
        if equation.primitive is treduce_p or facts.is_reduction or facts.placing:
            continue
        found = tuple(dict.fromkeys(p for v in values(equation.inputs) for p in behind.get(v, ())))
        if found:
            behind.update((v, found) for v in equation.outputs if v.aval.size > 1)
    return behind


def warn_of_derived(operand: Value, parameter: Value, rule: FsdpRule) -> None:
    """Warn of a value that a loop reads, whose partition XLA chooses, although a parameter behind it is sharded."""
    warnings.warn(
        f"a loop reads {operand.aval.str_short()}, which is made before the loop of {rule.name_of(parameter)}, "
        f"{parameter.aval.str_short()}, a sharded parameter. Every microbatch gathers it again: only parameters "
        "that are converted, scaled by a number, transposed or fetched from the host are gathered once. Do the rest of "
        "this work inside the loop.",
        FsdpWarning,
        stacklevel=2,
    )


def warn_of_order(operand: Value, spec: PartitionSpec, axes: set[str], rule: FsdpRule) -> None:
    """Warn of a dimension that is sharded over an axis of the batch and then, inside each shard, over another axis."""
    for entry in spec.partitions:
        names = axes_in((entry,))
        last = [*(name for name in names if name not in axes), *(name for name in names if name in axes)]
        if list(names) != last:
            warnings.warn(
                f"{rule.name_of(operand)}, {operand.aval.str_short()}, is sharded over {tuple(names)} in one dimension:"
                " the gathered parts of a device do not lie side by side, so its gradient is summed whole and then "
                f"exchanged, not scattered. Shard it over {tuple(last)}.",
                FsdpWarning,
                stacklevel=2,
            )


def warn_of_loops(loops: Sequence[Mapping[Value, Gather]], rule: FsdpRule) -> None:
    """Warn of parameters that several loops gather, each for itself; `loops` are the gathers of each."""
    counts = Counter(v for gathers in loops for gather in gathers.values() for v in values(gather.equation.inputs))
    for value, count in counts.items():
        if count > 1:
            warnings.warn(
                f"{rule.name_of(value)}, {value.aval.str_short()}, is read by {count} loops, and each of them gathers "
                "it and scatters its gradient. For one gather a step, compute both losses in one loop.",
                FsdpWarning,
                stacklevel=2,
            )
