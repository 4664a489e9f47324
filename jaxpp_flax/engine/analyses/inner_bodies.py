"""The bodies of scans and shard_maps: open them, and leave sums out.

Versions of JAX differ in how a scan separates its constants, carry and slices. In all versions, the numbers of
dimensions of the scan's operands and of its body's arguments tell them apart.

If all data shards share a parameter, its gradient in the backward shard_map ends with a `psum` over the data axis.
Without the `psum`, the map returns each shard's part. `defer_reductions` keeps these partial sums until the loop
has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxpp_flax.engine.arrays.mesh import axes_in
from jaxpp_flax.engine.tracing.inline import body_of
from jaxpp_flax.engine.tracing.ir import Equation, Graph, Value
from jaxpp_flax.engine.tracing.primitives import facts_of
from jaxpp_flax.engine.tracing.regions import shielded

__all__ = ["Scan", "ends_in_sum", "open_scan", "shard_map_without_sums"]


@dataclass(frozen=True)
class Scan:
    """A scan's body, calls inlined: its inputs are constants, carry, slices; its outputs are carry, slices."""

    body: Graph
    num_consts: int
    num_carry: int

    @property
    def carry_in(self) -> tuple[Value, ...]:
        """The body's inputs that are its carry."""
        return self.body.inputs[self.num_consts : self.num_consts + self.num_carry]


def open_scan(equation: Equation) -> Scan:
    """Return the parts of a `scan` equation."""
    body = shielded(body_of(equation, remat=True))
    sliced = sum(a.aval.ndim > v.aval.ndim for a, v in zip(equation.inputs, body.inputs, strict=True))
    carried = sum(v.aval.ndim == a.aval.ndim for v, a in zip(equation.outputs, body.outputs, strict=True))
    return Scan(body, len(body.inputs) - carried - sliced, carried)


def ends_in_sum(equation: Equation, body: Graph, position: int, names: Sequence[str]) -> bool:
    """Return whether the body of a shard_map ends, in a result, with a sum over the mesh axes `names`."""
    params, spec = equation.params, equation.params["out_specs"][position]
    if equation.effects or spec.unreduced or spec.reduced or not set(names) <= set(params["newly_manual_axes"]):
        return False
    maker = body.producer.get(body.outputs[position])  # type: ignore[arg-type]
    if maker is None or not facts_of(maker.primitive).sums_over_devices or len(maker.inputs) != 1:
        return False
    return maker.params.get("axis_index_groups") is None and set(names) <= set(maker.params["axes"])


def shard_map_without_sums(equation: Equation, body: Graph, sums: Mapping[int, Any]) -> Callable[..., Sequence[Any]]:
    """Return a shard_map like `equation` with the `body` from `body_of`, but without the last sums of some results.

    `sums` gives, for each of these results, the mesh axes over which it must not be summed. In its place the shard_map
    returns its parts: D shards are stacked along a first dimension of size D.
    """
    params = equation.params
    last = {k: body.producer[body.outputs[k]] for k in sums}  # type: ignore[index]
    shown = replace(body, outputs=tuple(last[k].inputs[0] if k in sums else v for k, v in enumerate(body.outputs)))
    specs = [PartitionSpec(sums[k], *s.partitions) if k in sums else s for k, s in enumerate(params["out_specs"])]

    def shard(*operands: Any) -> tuple[Any, ...]:
        results = shown.run(*operands)
        for k, axes in sums.items():
            others = tuple(name for name in last[k].params["axes"] if name not in axes_in((axes,)))
            results[k] = (jax.lax.psum(results[k], others) if others else results[k])[None]
        return tuple(results)

    return jax.shard_map(
        shard, mesh=params["mesh"], in_specs=tuple(params["in_specs"]), out_specs=tuple(specs),
        axis_names=set(params["newly_manual_axes"]), check_vma=params["check_vma"],
    )  # fmt: skip
