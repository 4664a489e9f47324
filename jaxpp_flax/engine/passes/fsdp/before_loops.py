"""What becomes of sharded parameters before the loops that read them: the partition is followed, or the user warned."""

from __future__ import annotations

from collections.abc import Iterable

from jax.sharding import PartitionSpec

from jaxpp_flax.engine.passes.fsdp.rule import FsdpRule, FsdpWarning
from jaxpp_flax.engine.program.specs import followed_spec
from jaxpp_flax.engine.tracing.ir import Equation, Value, values
from jaxpp_flax.engine.tracing.primitives import facts_of
from jaxpp_flax.engine.tracing.treduce import treduce_p
from jaxpp_flax.messages import warn_user

__all__ = ["follow", "warn_of_derived"]


def follow(equations: Iterable[Equation], spec_of: dict[Value, PartitionSpec]) -> dict[Value, tuple[Value, ...]]:
    """Follow the inputs of a step to its loops, and return the inputs behind each value of unknown partition.

    `spec_of` has the partitions of the inputs, and gets those of values that are converted, scaled, transposed or
    fetched from the host. Sums are left out, and results of loops, and arrays whose partition the user asks for: these
    are as they should be.
    """
    inputs = set(spec_of)
    behind: dict[Value, tuple[Value, ...]] = {value: (value,) for value in inputs}
    for equation in equations:
        facts = facts_of(equation.primitive)
        if (spec := followed_spec(equation, spec_of)) is not None:
            spec_of[equation.outputs[0]] = spec
        found = tuple(dict.fromkeys(p for v in values(equation.inputs) for p in behind.get(v, ())))
        if found and equation.primitive is not treduce_p and not facts.is_reduction and not facts.placing:
            behind.update((v, found) for v in equation.outputs if v.aval.size > 1)
    return {value: found for value, found in behind.items() if value not in spec_of}


def warn_of_derived(operand: Value, parameter: Value, rule: FsdpRule) -> None:
    """Warn of a value that a loop reads, whose partition XLA chooses, although a parameter behind it is sharded."""
    warn_user(
        f"a loop reads {operand.aval.str_short()}, which is made before the loop of {rule.name_of(parameter)}, "
        f"{parameter.aval.str_short()}, a sharded parameter. Every microbatch gathers it again: only parameters "
        "that are converted, scaled by a number, transposed or fetched from the host are gathered once. Do the rest of "
        "this work inside the loop.",
        FsdpWarning,
    )
