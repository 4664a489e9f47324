"""The places of a generation's arrays: each cache leaf is on the devices of its stage, and never elsewhere."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxpp_flax.checkpoint.format.paths import flatten
from jaxpp_flax.engine.arrays.device_memory import shortage
from jaxpp_flax.engine.arrays.mesh import MpmdMesh, MpmdSharding
from jaxpp_flax.engine.arrays.placing import place, place_on_ranks
from jaxpp_flax.messages import amount
from jaxpp_flax.trainers.errors import ModelError
from jaxpp_flax.trainers.mesh import batch_spec
from jaxpp_flax.trainers.state.first_values import LeafPrograms

__all__ = ["check_fits", "make_carried", "rank_specs"]


def rank_specs(mesh: MpmdMesh, make_cache: Callable[[int], Any], progress: Any) -> tuple[Any, Any]:
    """Return the specs of `(carried, tokens)` on a rank: sequences are divided like the examples of a batch."""
    axes, rows = tuple(batch_spec(mesh, 2))[1:], len(progress["tokens"])

    def divided(dimension: int | None) -> PartitionSpec:
        return PartitionSpec() if dimension is None or not axes else PartitionSpec(*[None] * dimension, *axes)

    def of_cache(leaf: Any, doubled: Any) -> PartitionSpec:
        # The dimension that counts the sequences is the one that differs in a cache of twice as many.
        sizes = enumerate(zip(leaf.shape, doubled.shape, strict=True))
        return divided(next((dimension for dimension, (one, two) in sizes if one != two), None))

    cache, doubled = jax.eval_shape(lambda: (make_cache(rows), make_cache(2 * rows)))
    of_progress = jax.tree.map(lambda leaf: divided(0 if leaf.ndim else None), progress)
    return (jax.tree.map(of_cache, cache, doubled), of_progress), PartitionSpec(*axes)


def make_carried(cache: LeafPrograms, progress: Any, shardings: Any) -> tuple[Any, Any]:
    """Make a cache, and copies of a progress in NumPy values, each leaf at its place."""
    places, structure = flatten(shardings[0])
    made = cache.compute((), places)

    def put(value: Any, sharding: Any) -> Any:
        if isinstance(sharding, MpmdSharding):
            return place_on_ranks(value, sharding)
        return place(value, sharding, may_alias=False)

    return jax.tree.unflatten(structure, made.values()), jax.tree.map(put, progress, shardings[1])


def check_fits(cache: Any, shardings: Any, num_groups: int) -> None:
    """Refuse caches that do not fit, before one is made.

    Raises:
      ModelError: the message names a device and its share.
    """
    needed: Counter[Any] = Counter()
    for leaf, sharding in zip(jax.tree.leaves(cache), jax.tree.leaves(shardings), strict=True):
        on_ranks = isinstance(sharding, MpmdSharding)
        for local in map(sharding.local_sharding, sharding.ranks) if on_ranks else [sharding]:
            share = math.prod(local.shard_shape(leaf.shape)) * leaf.dtype.itemsize * num_groups
            needed.update(dict.fromkeys(local.device_set, share))
    short = shortage(needed)
    if short is not None:
        raise ModelError(
            f"the cache of this generation does not fit: {short.device} would hold "
            f"{amount(needed[short.device], 'B')} of it, and has {amount(short.free, 'B')} free. Nothing was placed. "
            "Pass fewer prompts in one call, fewer max_new_tokens or a narrower cache_dtype, or use more stages."
        )
