"""`mpmd_jit_rev`: compute each result on the ranks that are to hold it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxpp_flax.api.jit import say_about_pgle
from jaxpp_flax.engine.arrays.mesh import MpmdMesh, MpmdSharding
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray

__all__ = ["mpmd_jit_rev"]


def mpmd_jit_rev(
    fun: Callable[..., Any],
    mpmd_mesh: MpmdMesh,
    *,
    out_refs: Any,
    in_shardings: Any = None,
    out_shardings: Any = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    abstracted_axes: Any | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    use_pgle: bool = False,
) -> Callable[..., Any]:
    """Compile a function whose results are made on given ranks: initial parameters on the ranks of their stages.

    Each rank computes its own results alone, so no device ever holds the others'.

    Args:
      fun: a function of arrays.
      mpmd_mesh: the ranks.
      out_refs: a tree like the results', of the sets of ranks that hold each of them: `mesh_ids` of a compiled step's
        `in_shardings`. A result of no rank goes to rank 0.
      in_shardings, out_shardings: prefix trees of `PartitionSpec`s or shardings, for the positional arguments and for
        the results; default: replicated.
      static_argnums, static_argnames, donate_argnums, donate_argnames, abstracted_axes: not supported; must be None.
      compiler_options: as in `jax.jit`.
      use_pgle: has no effect.

    Returns:
      A function with the results as `MpmdArray`s.

    Raises:
      NotImplementedError: if an argument that is not supported is given.
      ValueError: if `out_refs` or `out_shardings` does not fit to the results.

    Example:
      >>> import jax, jax.numpy as jnp, numpy as np
      >>> import jaxpp_flax.api as jaxpp
      >>> mesh = jaxpp.MpmdMesh(jax.sharding.Mesh(np.array(jax.devices()[:2]), ("stage",)), "stage")
      >>> init = jaxpp.mpmd_jit_rev(lambda x: {"a": x, "b": x + 1}, mesh, out_refs={"a": {0}, "b": {1}})
      >>> {name: (array.mpmd_idxs, np.asarray(array)) for name, array in init(jnp.zeros(2)).items()}
      {'a': ((0,), array([0., 0.], dtype=float32)), 'b': ((1,), array([1., 1.], dtype=float32))}
    """
    given = {
        "static_argnums": static_argnums, "static_argnames": static_argnames, "donate_argnums": donate_argnums,
        "donate_argnames": donate_argnames, "abstracted_axes": abstracted_axes,
    }  # fmt: skip
    for name, value in given.items():
        if value is not None:
            raise NotImplementedError(
                f"mpmd_jit_rev got {name}={value!r}: every rank runs the function on its own copy of all arguments. "
                "Leave it out; close over static values, as in `lambda key: init(key, config)`."
            )
    say_about_pgle("mpmd_jit_rev", use_pgle)

    def run(*args: Any) -> Any:
        types, tree = jax.tree.flatten(jax.eval_shape(fun, *args))
        held_by = [frozenset(ranks) or frozenset({0}) for ranks in tree.flatten_up_to(out_refs)]
        specs = _specs(out_shardings, jax.tree.unflatten(tree, types), mpmd_mesh)
        parts: list[list[jax.Array]] = [[] for _ in types]
        for rank in sorted(frozenset().union(*held_by)):
            submesh = mpmd_mesh.unstack[rank]
            if jax.process_index() in {device.process_index for device in submesh.devices.flat}:
                mine = [position for position, ranks in enumerate(held_by) if rank in ranks]
                arguments = [NamedSharding(submesh, spec) for spec in _specs(in_shardings, args, mpmd_mesh)]
                placed = jax.tree.map(jax.device_put, args, jax.tree.unflatten(jax.tree.structure(args), arguments))
                made = jax.jit(
                    lambda *args, mine=mine: [jax.tree.leaves(fun(*args))[position] for position in mine],
                    out_shardings=[NamedSharding(submesh, specs[position]) for position in mine],
                    compiler_options=dict(compiler_options) if compiler_options else None,
                )(*placed)
                for position, array in zip(mine, made, strict=True):
                    parts[position].append(array)
        arrays = [
            MpmdArray(part, MpmdSharding(mpmd_mesh, ranks, spec), shape=type_.shape, dtype=type_.dtype)
            for part, ranks, spec, type_ in zip(parts, held_by, specs, types, strict=True)
        ]
        return jax.tree.unflatten(tree, arrays)

    return run


def _specs(shardings: Any, tree: Any, mpmd_mesh: MpmdMesh) -> list[PartitionSpec]:
    """Return a spec without the ranks' axis for each leaf of a tree."""
    leaves = jax.tree.leaves(
        jax.tree.broadcast(shardings, tree, is_leaf=_is_sharding), is_leaf=_is_sharding
    )  # fmt: skip
    specs = (PartitionSpec() if s is None else s if isinstance(s, PartitionSpec) else s.spec for s in leaves)
    return [MpmdSharding(mpmd_mesh, {0}, spec).spec for spec in specs]


def _is_sharding(node: Any) -> bool:
    return node is None or isinstance(node, PartitionSpec | NamedSharding)
