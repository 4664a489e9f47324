"""`MpmdArray` as a leaf of Orbax's own checkpointers."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import Sharding

from jaxpp_flax.checkpoint.format.leaves import assemble, is_key
from jaxpp_flax.engine.arrays.mesh import MpmdSharding
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray

__all__ = ["MpmdArrayHandler", "register"]

# The replica number of a stand-in for other processes' shards. Orbax writes only the first replicas.
_NEVER_WRITTEN = 1 << 30


class MpmdArrayHandler(ocp.type_handlers.ArrayHandler):
    """Orbax's handler of arrays, which also writes `MpmdArray`s and restores them where the sharding asks for one.

    On disk they are arrays like all others. Plain arrays are treated as before.

    Args:
      stock: the handler whose settings it takes over; exactly one handler may keep Orbax's metadata of arrays.
    """

    def __init__(self, stock: ocp.type_handlers.ArrayHandler | None = None) -> None:
        super().__init__()
        vars(self).update(vars(stock or ocp.type_handlers.get_type_handler(jax.Array)))

    async def serialize(self, values: Sequence[Any], infos: Any, args: Any = None) -> Any:
        """Write each as the one array over all its ranks; with several processes, each writes the shards it has."""
        arrays = [value.as_jax_array() if isinstance(value, MpmdArray) else value for value in values]
        if jax.process_count() > 1:
            for array, info in zip(arrays, infos, strict=True):
                if is_key(array):
                    raise TypeError(
                        f"{info.name} holds random keys, which several processes cannot write as such. Save "
                        "`jax.random.key_data(keys)`, as jaxpp_flax.checkpoint.save does."
                    )
            arrays = [_shards_of(array) for array in arrays]
        return await super().serialize(arrays, infos, args)  # pyright: ignore[reportArgumentType]

    async def deserialize(self, infos: Any, args: Any = None) -> Any:
        """Read the shards of all ranks, and give those with an `MpmdSharding` back as `MpmdArray`s.

        Of those that live in other processes alone, nothing is read.
        """
        shardings = [getattr(arg, "sharding", None) for arg in args or [None] * len(infos)]
        elsewhere = [isinstance(s, MpmdSharding) and not _has_local_devices(s) for s in shardings]
        here = [i for i, is_elsewhere in enumerate(elsewhere) if not is_elsewhere]
        read = await super().deserialize([infos[i] for i in here], [args[i] for i in here]) if here else []
        found: dict[int, Any] = dict(zip(here, read, strict=True))
        absent = [i for i, is_elsewhere in enumerate(elsewhere) if is_elsewhere]
        if any(args[i].global_shape is None or args[i].dtype is None for i in absent):
            types: Any = await self.metadata([infos[i] for i in absent])
        else:
            types = [jax.ShapeDtypeStruct(args[i].global_shape, args[i].dtype) for i in absent]
        for i, like in zip(absent, types, strict=True):
            found[i] = MpmdArray({}, shardings[i], shape=like.shape, dtype=args[i].dtype or like.dtype)
        return [
            assemble(found[i], sharding) if isinstance(sharding, MpmdSharding) and not elsewhere[i] else found[i]
            for i, sharding in enumerate(shardings)
        ]


def register() -> None:
    """Let Orbax's checkpointers take `MpmdArray`s as leaves, in this process; doing it again changes nothing.

    `StandardCheckpointer`, `CheckpointManager` with `StandardSave` or `PyTreeSave`, and their restoring twins then work
    on trees of `MpmdArray`s. A target's leaf may be an `MpmdArray` or a `jax.ShapeDtypeStruct` with an `MpmdSharding`.

    Example:
      >>> import tempfile, jax.numpy as jnp, numpy as np
      >>> from jax.sharding import Mesh, PartitionSpec as P
      >>> from jaxpp_flax.engine.arrays.mesh import MpmdMesh
      >>> register()
      >>> mesh = MpmdMesh(Mesh(np.array(jax.devices()[:2]), ("stage",)), "stage")
      >>> sharding = MpmdSharding(mesh, {1}, P())
      >>> x = MpmdArray([jax.device_put(jnp.arange(3.0), sharding.local_sharding(1))], sharding)
      >>> with ocp.StandardCheckpointer() as checkpointer:
      ...     path = tempfile.mkdtemp() + "/x"
      ...     checkpointer.save(path, {"x": x})
      ...     checkpointer.wait_until_finished()
      ...     checkpointer.restore(path, {"x": x})
      {'x': MpmdArray(shape=(3,), dtype=float32, mpmd_idxs=(1,), sharding=...)}
    """
    if isinstance(ocp.type_handlers.get_type_handler(jax.Array), MpmdArrayHandler):
        return
    ocp.type_handlers.register_type_handler(
        jax.Array, MpmdArrayHandler(), func=lambda kind: issubclass(kind, (jax.Array, MpmdArray)), override=True
    )
    _teach_standard_handler()


def _teach_standard_handler() -> None:
    """Patch `StandardCheckpointHandler`: it accepts few types, so it gets arrays in place of `MpmdArray`s."""
    cls: Any = ocp.StandardCheckpointHandler
    save, restore = cls.async_save, cls.restore

    @functools.wraps(save)
    async def async_save(self: Any, directory: Any, item: Any = None, save_args: Any = None, args: Any = None) -> Any:
        if args is not None:
            args = replace(args, item=_replace(args.item, MpmdArray.as_jax_array))
        return await save(self, directory, _replace(item, MpmdArray.as_jax_array), save_args, args)

    @functools.wraps(restore)
    def restore_(self: Any, directory: Any, item: Any = None, args: Any = None) -> Any:
        if args is not None:
            args = replace(args, item=_replace(args.item, _abstract))
        return restore(self, directory, _replace(item, _abstract), args)

    cls.async_save, cls.restore = async_save, restore_


def _replace(tree: Any, function: Any) -> Any:
    return jax.tree.map(lambda leaf: function(leaf) if isinstance(leaf, MpmdArray) else leaf, tree)


def _abstract(array: MpmdArray) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


@dataclass(frozen=True, kw_only=True)
class ShardsOf:
    """The parts of an array that Orbax's handler needs to write it. Not a `jax.Array`, so Orbax needs no other process.

    Args:
      shape, dtype, sharding: the values of the whole array, the same in every process.
      addressable_shards: this process's shards, or one shard without data if the process has none.
    """

    shape: tuple[int, ...]
    dtype: Any
    sharding: Sharding
    addressable_shards: Sequence[Any]

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return self.size * self.itemsize


@dataclass(frozen=True, kw_only=True)
class _NoData:
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class _NoShard:
    """A shard that has only a shape: all processes must compute the same chunks on disk."""

    index: tuple[slice, ...]
    data: _NoData
    replica_id: int = _NEVER_WRITTEN


def _shards_of(array: jax.Array) -> ShardsOf:
    """Return the shards of an array that this process writes.

    Process 0 writes an array that each process holds as a whole (fully addressable, and not an `MpmdArray`), as it
    writes NumPy arrays and numbers.

    Example:
      >>> import jax.numpy as jnp
      >>> [shard] = _shards_of(jnp.arange(3)).addressable_shards
      >>> shard.index, shard.replica_id, shard.data.shape
      ((slice(None, None, None),), 0, (3,))
    """
    shards: Sequence[Any] = array.addressable_shards
    everywhere = array.is_fully_addressable and not isinstance(array.sharding, MpmdSharding)
    if not shards or (everywhere and jax.process_index() != 0):
        shape = array.sharding.shard_shape(array.shape)
        shards = [_NoShard(index=tuple(slice(0, size) for size in shape), data=_NoData(shape=shape))]
    return ShardsOf(shape=array.shape, dtype=array.dtype, sharding=array.sharding, addressable_shards=shards)


def _has_local_devices(sharding: Any) -> bool:
    """Return True if some devices of a sharding belong to this process."""
    return any(device.process_index == jax.process_index() for device in sharding.device_set)
