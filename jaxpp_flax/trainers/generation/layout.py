"""The places of a generation's arrays: each cache leaf is on the devices of its stage, and never elsewhere."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpp_flax.checkpoint.format.paths import flatten
from jaxpp_flax.engine.arrays.device_memory import shortage
from jaxpp_flax.engine.arrays.mesh import MpmdMesh, MpmdSharding
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.engine.arrays.placing import place, place_on_ranks
from jaxpp_flax.messages import amount
from jaxpp_flax.trainers.errors import ModelError
from jaxpp_flax.trainers.mesh import batch_spec
from jaxpp_flax.trainers.state.first_values import LeafPrograms

__all__ = ["check_fits", "make_carried", "put", "rank_specs", "repeat_leaf"]


def rank_specs(mesh: MpmdMesh, cache: Any, dimensions: Sequence[int | None], progress: Any) -> tuple[Any, ...]:
    """Return the specs of `(carried, tokens, padding)` on a rank: sequences are divided like the examples of a batch.

    `dimensions` has that of the sequences in each leaf of the cache.
    """
    axes = tuple(batch_spec(mesh, 2))[1:]

    def divided(dimension: int | None) -> PartitionSpec:
        return PartitionSpec() if dimension is None or not axes else PartitionSpec(*[None] * dimension, *axes)

    of_cache = jax.tree.unflatten(jax.tree.structure(cache), list(map(divided, dimensions)))
    of_progress = jax.tree.map(lambda leaf: divided(0 if leaf.ndim else None), progress)
    return (of_cache, of_progress), PartitionSpec(*axes), PartitionSpec(*axes)


def repeat_leaf(leaf: Any, dimension: int | None, times: int) -> Any:
    """Repeat each sequence of a cache leaf, where it lies: every device repeats its own ones."""
    if dimension is None:
        return leaf
    if not isinstance(leaf, MpmdArray):
        return _repeat(leaf, dimension, times)
    sharding, parts = leaf.sharding, dict[int, jax.Array]()
    for rank, part in leaf._partially_addressable_arrays.items():  # pyright: ignore[reportPrivateUsage]
        local = sharding.local_sharding(rank)
        parts[rank] = _repeat(part, dimension, times, local.mesh, local.spec)
    shape = (*leaf.shape[:dimension], leaf.shape[dimension] * times, *leaf.shape[dimension + 1 :])
    return MpmdArray(parts, sharding, shape=shape, dtype=leaf.dtype)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _repeat(values: Any, dimension: int, times: int, mesh: Any = None, spec: Any = None) -> Any:
    repeat = functools.partial(jnp.repeat, repeats=times, axis=dimension)
    return repeat(values) if mesh is None else jax.shard_map(repeat, mesh=mesh, in_specs=spec, out_specs=spec)(values)


def make_carried(cache: LeafPrograms, progress: Any, shardings: Any) -> tuple[Any, Any]:
    """Make a cache, and copies of a progress in NumPy values, each leaf at its place."""
    places, structure = flatten(shardings[0])
    made = cache.compute((), places)
    return jax.tree.unflatten(structure, made.values()), jax.tree.map(put, progress, shardings[1])


def put(value: Any, sharding: Any) -> Any:
    """Copy a NumPy value to its place."""
    if isinstance(sharding, MpmdSharding):
        return place_on_ranks(value, sharding)
    return place(value, sharding, may_alias=False)


def check_fits(cache: Any, shardings: Any, num_groups: int, samples: int) -> None:
    """Refuse caches that do not fit, before one is made: `num_groups` of them, repeated for each sample.

    Raises:
      ModelError: the message names a device and its share.
    """
    needed: Counter[Any] = Counter()
    copies = num_groups * (samples + (samples > 1))  # while a cache is repeated, it stands there twice
    for leaf, sharding in zip(jax.tree.leaves(cache), jax.tree.leaves(shardings), strict=True):
        on_ranks = isinstance(sharding, MpmdSharding)
        for local in map(sharding.local_sharding, sharding.ranks) if on_ranks else [sharding]:
            share = math.prod(local.shard_shape(leaf.shape)) * leaf.dtype.itemsize * copies
            needed.update(dict.fromkeys(local.device_set, share))
    short = shortage(needed)
    if short is not None:
        raise ModelError(
            f"the cache of this generation does not fit: {short.device} would hold "
            f"{amount(needed[short.device], 'B')} of it, and has {amount(short.free, 'B')} free. Nothing was placed. "
            "Pass fewer prompts in one call, fewer samples or max_new_tokens, or a narrower cache_dtype, or use more "
            "stages."
        )
