"""Sums of scalars by stage: the stages of parameters are known once the loop is cut, after the step was traced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core
from jax.interpreters import mlir

from jaxpp_flax.engine.passes.placed import Loop
from jaxpp_flax.engine.tracing.ir import Atom, Equation, Value, emit, values

__all__ = ["resolve_stage_sums", "sum_by_stage"]

_sum_by_stage_p = jex_core.Primitive("sum_by_stage")
_sum_by_stage_p.multiple_results = True


def sum_by_stage(scalars: Sequence[Any], parameters: Sequence[Any], num_stages: int) -> list[jax.Array]:
    """Add up one scalar for each parameter by the stage that reads the parameter, in the order of the parameters.

    Use it in a step, outside the loop. A parameter of several stages counts for the first of them, one of no
    stage for stage 0. Under plain `jax.jit` all parameters belong to the first stage.

    Args:
      scalars: scalars of one dtype.
      parameters: for each scalar a parameter, as the loop reads it.
      num_stages: the number of stages of the loop.

    Returns:
      A scalar of the same dtype for each stage; 0 for a stage without parameters.

    Example:
      >>> sum_by_stage([jnp.float32(2), jnp.float32(3)], [jnp.ones(4), jnp.ones(5)], num_stages=1)
      [Array(5., dtype=float32)]
    """
    return _sum_by_stage_p.bind(*scalars, *parameters, num_stages=num_stages)


def _all_in_first(*operands: Any, num_stages: int) -> list[Any]:
    first, *others = operands[: len(operands) // 2]
    return [sum(others, start=first), *[jnp.zeros_like(first)] * (num_stages - 1)]


_sum_by_stage_p.def_impl(_all_in_first)
_sum_by_stage_p.def_abstract_eval(lambda first, *_, num_stages: [first] * num_stages)
mlir.register_lowering(_sum_by_stage_p, mlir.lower_fun(_all_in_first, multiple_results=True))


def resolve_stage_sums(nodes: Sequence[Equation | Loop]) -> Iterator[Equation | Loop]:
    """Replace each `sum_by_stage` by the additions of its stages: each stage adds up what lies on its rank."""
    stages: dict[Value, int] | None = None
    for node in nodes:
        if isinstance(node, Equation) and node.primitive is _sum_by_stage_p:
            stages = _first_stages(nodes) if stages is None else stages
            yield from _additions(node, stages)
        else:
            yield node


def _first_stages(nodes: Sequence[Equation | Loop]) -> dict[Value, int]:
    """Return the first stage whose tasks read a value, or a value computed from it before the loop."""
    first: dict[Value, int] = {}
    for node in reversed(nodes):
        if isinstance(node, Loop):
            outer = dict(zip(node.partition.operands, node.operands, strict=True))
            reads = [(outer[v], task.stage) for task in node.partition.tasks for v in task.graph.inputs if v in outer]
        else:
            reads = [(v, first[made]) for made in node.outputs if made in first for v in values(node.inputs)]
        for value, stage in reads:
            first[value] = min(stage, first.get(value, stage))
    return first


def _additions(equation: Equation, stages: Mapping[Value, int]) -> Iterator[Equation]:
    half = len(equation.inputs) // 2
    groups: list[list[Atom]] = [[] for _ in equation.outputs]
    for scalar, parameter in zip(equation.inputs[:half], equation.inputs[half:], strict=True):
        groups[stages.get(parameter, 0) if isinstance(parameter, Value) else 0].append(scalar)

    def total(*scalars: Any) -> list[Any]:
        first, *others = scalars or [jnp.zeros((), equation.outputs[0].aval.dtype)]
        return [sum(others, start=first)]

    for group, output in zip(groups, equation.outputs, strict=True):
        yield from emit(total, group, [output], like=equation)[0]
