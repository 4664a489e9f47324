"""Sums over the batch in the body of a `jax.shard_map`: find the summed results, and make the map without the sums.

If all data shards share a parameter, its gradient in the backward shard_map ends with a `psum` over the data axis.
Without the `psum`, the map returns each shard's part. `defer_reductions` keeps these partial sums until the loop
has ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxpp_flax.engine.tracing.dataflow import producers
from jaxpp_flax.engine.tracing.ir import Atom, Equation, Graph, emit

__all__ = ["shard_map_without_sums", "summed_in_shard_map"]

_SUMS = ("psum", "psum_invariant")


def summed_in_shard_map(equation: Equation, body: Graph, position: int, axes: Any) -> bool:
    """Return whether the body's last operation on a result is a sum over the mesh axes `axes` (as in a spec)."""
    names = set(axes) if isinstance(axes, tuple) else {axes}
    spec = equation.params["out_specs"][position]
    if spec.unreduced or spec.reduced or not names <= set(equation.params["newly_manual_axes"]):
        return False
    total = body.outputs[position]
    if any(total is other for k, other in enumerate(body.outputs) if k != position):
        return False
    made = next((e for e in body.equations if total in e.outputs), None)
    return (
        made is not None
        and made.name in _SUMS
        and len(made.inputs) == 1
        and made.params.get("axis_index_groups") is None
        and names <= set(made.params["axes"])
        and all(total not in e.inputs for e in body.equations)
    )


def shard_map_without_sums(
    equation: Equation, body: Graph, sums: Mapping[int, Any]
) -> tuple[list[Equation], dict[int, Atom]]:
    """Make a shard_map like `equation` without the sums of some results.

    Args:
      equation: the shard_map.
      body: its body, from `body_of`.
      sums: for each of these results, the mesh axes over which it must not be summed.

    Returns:
      The equations, and for each of these results its parts: D shards are stacked along a first dimension of size D.
    """
    params = equation.params
    made = producers(body.equations)
    parts = {k: made[body.outputs[k]] for k in sums}  # type: ignore[index]
    shown = replace(body, outputs=tuple(parts[k].inputs[0] if k in sums else v for k, v in enumerate(body.outputs)))
    specs = tuple(
        PartitionSpec(sums[k], *spec.partitions) if k in sums else spec for k, spec in enumerate(params["out_specs"])
    )

    def shard(*operands: Any) -> tuple[Any, ...]:
        results = shown.run(*operands)
        for k, axes in sums.items():
            names = axes if isinstance(axes, tuple) else (axes,)
            others = tuple(name for name in parts[k].params["axes"] if name not in names)
            results[k] = (jax.lax.psum(results[k], others) if others else results[k])[None]
        return tuple(results)

    mapped = jax.shard_map(
        shard, mesh=params["mesh"], in_specs=tuple(params["in_specs"]), out_specs=specs,
        axis_names=set(params["newly_manual_axes"]), check_vma=params["check_vma"],
    )  # fmt: skip
    outputs = [None if k in sums else value for k, value in enumerate(equation.outputs)]
    equations, results = emit(mapped, equation.inputs, outputs, like=equation)
    return equations, {k: results[k] for k in sums}
