"""`mpmd_jit_rev`: compute each result on the ranks that hold it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.core import ShapedArray
from jax.sharding import NamedSharding, PartitionSpec

from jaxpp_flax.api.jit import say_about_pgle
from jaxpp_flax.engine.arrays.ambient_mesh import context_mesh
from jaxpp_flax.engine.arrays.mesh import MpmdMesh, MpmdSharding
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.engine.arrays.placing import place
from jaxpp_flax.engine.arrays.rank_shardings import broadcast_prefix, broadcast_shardings

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
    """Compile a function whose results are computed on given ranks, such as initial parameters on their stages' ranks.

    Each rank computes only its own results, so no device ever holds the results of another rank.

    Args:
      fun: a function of arrays.
      mpmd_mesh: the ranks.
      out_refs: a prefix tree of the results, with the set of ranks that hold each result, such as the `mesh_ids` of a
        compiled step's `in_shardings`. For an empty set, rank 0 holds the result.
      in_shardings, out_shardings: prefix trees of `PartitionSpec`s or shardings, for the positional arguments and for
        the results; default: replicated.
      static_argnums, static_argnames, donate_argnums, donate_argnames, abstracted_axes: not supported; must be None.
      compiler_options: as in `jax.jit`.
      use_pgle: has no effect.

    Returns:
      A function that returns `MpmdArray`s.

    Raises:
      NotImplementedError: if an argument that is not supported is given.
      TypeError: if `out_refs` holds anything but sets.
      ValueError: if `out_refs` or `out_shardings` does not fit the results, or `in_shardings` the arguments.

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

    @functools.cache
    def compiled(mine: tuple[int, ...], shardings: tuple[NamedSharding, ...]) -> Callable[..., list[jax.Array]]:
        return jax.jit(
            lambda *args: [jax.tree.leaves(fun(*args))[position] for position in mine],
            out_shardings=list(shardings),
            compiler_options=dict(compiler_options) if compiler_options else None,
        )

    def run(*args: Any) -> Any:
        with context_mesh(mpmd_mesh.abstract_submesh):  # as a step is traced; the caller's mesh may be of all ranks
            return run_on_ranks(*args)

    def run_on_ranks(*args: Any) -> Any:
        leaves = jax.tree.leaves(args)
        results = jax.eval_shape(fun, *args)
        types, tree = jax.tree.flatten(results)
        ranks = [_ranks(ids, where) for where, ids in broadcast_prefix(out_refs, results, "out_refs")]
        wanted = _shardings(out_shardings, results, "out_shardings", mpmd_mesh, ranks)
        read = _shardings(in_shardings, args, "in_shardings", mpmd_mesh, [frozenset({0})] * len(leaves))
        parts: list[dict[int, jax.Array]] = [{} for _ in types]
        for rank in filter(mpmd_mesh.is_local, range(mpmd_mesh.mpmd_dim)):
            mine = tuple(position for position, sharding in enumerate(wanted) if rank in sharding.ranks)
            if not mine:
                continue
            placed = [place(leaf, target.local_sharding(rank)) for leaf, target in zip(leaves, read, strict=True)]
            make = compiled(mine, tuple(wanted[position].local_sharding(rank) for position in mine))
            for position, array in zip(mine, make(*jax.tree.unflatten(jax.tree.structure(args), placed)), strict=True):
                parts[position][rank] = array
        # Weak types stay weak: a step that was compiled for the function's shapes takes these arrays as they are.
        avals = [ShapedArray(type_.shape, type_.dtype, weak_type=type_.weak_type) for type_ in types]
        arrays = map(MpmdArray._from_parts, wanted, parts, avals)  # pyright: ignore[reportPrivateUsage]
        return jax.tree.unflatten(tree, list(arrays))

    return run


def _ranks(ids: Any, where: str) -> frozenset[int]:
    if not isinstance(ids, (set, frozenset)):
        raise TypeError(f"{where} is {ids!r}, but it must be a set of ranks, such as {{0}}; an empty set means rank 0.")
    return frozenset(ids) or frozenset({0})


def _shardings(
    prefix: Any, tree: Any, what: str, mpmd_mesh: MpmdMesh, ranks: Sequence[frozenset[int]]
) -> list[MpmdSharding]:
    """Return the sharding of each leaf of a tree, on its ranks; a leaf without a request is replicated there."""
    shardings = broadcast_shardings(prefix, tree, what, mpmd_mesh)
    return [
        MpmdSharding(mpmd_mesh, ids, sharding.placement or PartitionSpec(), sharding.memory_kind)
        for ids, sharding in zip(ranks, shardings, strict=True)
    ]
