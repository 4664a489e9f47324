"""The bodies of scans and shard_maps: open them, find sums in them, and make the equations again from changed bodies.

Versions of JAX differ in how a scan separates its constants, carry and slices. In all versions, the numbers of
dimensions of the scan's operands and of its body's arguments tell them apart.

If all data shards share a parameter, its gradient in the backward shard_map ends with a `psum` over the data axis.
Without the `psum`, the map returns each shard's part. `defer_reductions` keeps these partial sums until the loop
has ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxpp_flax.engine.arrays.mesh import axes_in
from jaxpp_flax.engine.tracing.inline import body_of
from jaxpp_flax.engine.tracing.ir import Atom, Equation, Graph, Value, emit, producers
from jaxpp_flax.engine.tracing.primitives import facts_of

__all__ = ["Scan", "open_scan", "scan_again", "shard_map_without_sums", "summed_in_shard_map"]


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
    body = body_of(equation, remat=True)
    sliced = sum(a.aval.ndim > v.aval.ndim for a, v in zip(equation.inputs, body.inputs, strict=True))
    carried = sum(v.aval.ndim == a.aval.ndim for v, a in zip(equation.outputs, body.outputs, strict=True))
    return Scan(body, len(body.inputs) - carried - sliced, carried)


def scan_again(
    equation: Equation, scan: Scan, inputs: Sequence[Atom], outputs: Sequence[Value | None]
) -> tuple[list[Equation], list[Atom]]:
    """Make a scan like `equation` over another body; return the equations and the results, as `emit` does."""
    first, second = scan.num_consts, scan.num_consts + scan.num_carry

    def run(*operands: Any) -> list[Any]:
        consts = operands[:first]

        def body(carry: Any, xs: Any) -> tuple[Any, Any]:
            results = scan.body.run(*consts, *carry, *xs)
            return tuple(results[: scan.num_carry]), tuple(results[scan.num_carry :])

        carry, stacked = jax.lax.scan(
            body, operands[first:second], operands[second:], equation.params["length"],
            reverse=equation.params["reverse"], unroll=equation.params["unroll"],
        )  # fmt: skip
        return [*carry, *stacked]

    return emit(run, inputs, outputs, like=equation)


def summed_in_shard_map(equation: Equation, body: Graph, position: int, axes: Any) -> bool:
    """Return whether the body's last operation on a result is a sum over the mesh axes `axes` (as in a spec)."""
    names = set(axes_in((axes,)))
    spec = equation.params["out_specs"][position]
    if spec.unreduced or spec.reduced or not names <= set(equation.params["newly_manual_axes"]):
        return False
    total = body.outputs[position]
    if any(total is other for k, other in enumerate(body.outputs) if k != position):
        return False
    made = next((e for e in body.equations if total in e.outputs), None)
    return (
        made is not None
        and facts_of(made.primitive).sums_over_devices
        and len(made.inputs) == 1
        and made.params.get("axis_index_groups") is None
        and names <= set(made.params["axes"])
        and all(total not in e.inputs for e in body.equations)
    )


def shard_map_without_sums(
    equation: Equation, body: Graph, sums: Mapping[int, Any]
) -> tuple[list[Equation], dict[int, Atom]]:
    """Make a shard_map like `equation` with the `body` from `body_of`, but without the sums of some results.

    `sums` gives, for each of these results, the mesh axes over which it must not be summed. Return the equations, and
    for each of these results its parts: D shards are stacked along a first dimension of size D.
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
            others = tuple(name for name in parts[k].params["axes"] if name not in axes_in((axes,)))
            results[k] = (jax.lax.psum(results[k], others) if others else results[k])[None]
        return tuple(results)

    mapped = jax.shard_map(
        shard, mesh=params["mesh"], in_specs=tuple(params["in_specs"]), out_specs=specs,
        axis_names=set(params["newly_manual_axes"]), check_vma=params["check_vma"],
    )  # fmt: skip
    outputs = [None if k in sums else value for k, value in enumerate(equation.outputs)]
    equations, results = emit(mapped, equation.inputs, outputs, like=equation)
    return equations, {k: results[k] for k in sums}
