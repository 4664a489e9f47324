"""What a loop over microbatches refuses in its body: references, host memory, a carry that changes its type."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax

from jaxpp_flax._compat_texts.traces import is_reference
from jaxpp_flax.engine.tracing.ir import Graph, memory_kind_of, opened
from jaxpp_flax.engine.tracing.primitives import facts_of

__all__ = ["check_carry", "refuse_other_memory", "refuse_references", "same_type", "says"]


def same_type(one: Any, other: Any) -> bool:
    """Return whether two values have one shape, dtype and, where types know it, partition."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    # A type has a partition only on an Explicit mesh.
    return None in (one.sharding, other.sharding) or one.sharding.spec == other.sharding.spec


def refuse_references(graph: Graph) -> None:
    """Refuse mutable arrays in the body of a loop, also in its plain calls: JAX gives its own loops alone a rule."""
    for value in filter(lambda value: is_reference(value.aval), graph.inputs):
        raise NotImplementedError(
            f"treduce's body reads or writes a mutable array of the step, {value.aval}. Microbatches run on several "
            "ranks at the same time. Return what is to be kept, and reduce it by an operation (`Add`, `Last`, ...), or "
            "pass it as `init=`."
        )
    for equation in graph.equations:
        body = facts_of(equation.primitive).body_in(equation.params)
        if any(is_reference(value.aval) for value in equation.outputs) or (body is not None and _makes_reference(body)):
            raise NotImplementedError(
                f"treduce's body makes a mutable array (`{equation.name}`) at {equation.where}. Stages are programs of "
                "their own, and cannot share one. Write the code with `x.at[...].set(...)`, or as the carry of a "
                "jax.lax.scan."
            )


def _makes_reference(jaxpr: Any) -> bool:
    """Return whether an equation of a called jaxpr makes a mutable array; those of Pallas kernels are none."""
    for equation in opened(jaxpr).eqns:
        body = facts_of(equation.primitive).body_in(equation.params)
        if any(is_reference(variable.aval) for variable in equation.outvars):
            return True
        if body is not None and _makes_reference(body):
            return True
    return False


def refuse_other_memory(what: str, tree: Any, avals: Iterable[Any]) -> None:
    """Refuse loop values outside device memory: microbatches are reduced in device memory."""
    for (path, _), aval in zip(jax.tree_util.tree_leaves_with_path(tree), avals, strict=True):
        if (kind := memory_kind_of(aval)) is not None:
            raise ValueError(
                f"{what} {aval.dtype}{list(aval.shape)} in {kind!r} memory (leaf {jax.tree_util.keystr(path)}), but "
                "microbatches are reduced in the devices' own memory. Move it there, `jax.device_put(x, "
                "jax.memory.Space.Device)`, and back after the loop (or by `out_shardings`); take gradients with "
                "respect to the moved parameter."
            )


def check_carry(before: Sequence[Any], treedef: Any, after: Any) -> None:
    """Refuse a carry that comes out of the body with another structure or type."""
    leaves, after_tree = jax.tree_util.tree_flatten_with_path(after)
    if after_tree != treedef:
        raise TypeError(f"treduce's carry changes its structure from {treedef} to {after_tree}; both must be the same.")
    for old, (path, new) in zip(before, leaves, strict=True):
        if not same_type(old, new):
            raise TypeError(
                f"treduce's carry changes its type at carry{jax.tree_util.keystr(path)}: {says(old)} goes in, "
                f"{says(new)} comes out. Cast, reshape or reshard it back in the body."
            )


def says(struct: Any) -> str:
    """Return a type in words."""
    spec = "" if struct.sharding is None else f" as {struct.sharding.spec}"
    return f"{struct.dtype}{list(struct.shape)}{spec}"
