"""`MpmdArray` as a leaf of Orbax's own checkpointers."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxpp_flax.checkpoint.format.leaves import abstract_leaf, assemble, is_key
from jaxpp_flax.engine.arrays.mesh import MpmdSharding
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray

# The replica number of a stand-in for other processes' shards. Orbax writes only the first replicas.
_NEVER_WRITTEN = 1 << 30


class MpmdArrayHandler(ocp.type_handlers.ArrayHandler):
    """Orbax's handler of arrays, which also saves and restores `MpmdArray`s.

    On disk, an `MpmdArray` is an ordinary array. A leaf of the target with an `MpmdSharding` is restored as an
    `MpmdArray`. Other arrays are handled as Orbax handles them.

    Args:
      stock: the handler whose settings this one takes. Only one handler may keep Orbax's metadata of arrays.
    """

    def __init__(self, stock: ocp.type_handlers.ArrayHandler | None = None) -> None:
        super().__init__()
        vars(self).update(vars(stock or ocp.type_handlers.get_type_handler(jax.Array)))

    async def serialize(self, values: Sequence[Any], infos: Any, args: Any = None) -> Any:
        """Write each value as one array over all its ranks. Each process writes the shards that it has."""
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
        """Read the leaves; a leaf with an `MpmdSharding` becomes an `MpmdArray`.

        This process reads nothing of a leaf whose devices all belong to other processes.
        """
        shardings: list[Any] = [getattr(arg, "sharding", None) for arg in args or [None] * len(infos)]
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
    """Let Orbax's checkpointers in this process save and restore `MpmdArray`s; a second call changes nothing.

    This covers `StandardCheckpointer`, and `CheckpointManager` with `StandardSave` or `PyTreeSave` and their
    counterparts for restoring. A leaf of the target may be an `MpmdArray`, or a `jax.ShapeDtypeStruct` with an
    `MpmdSharding`. Do not call them inside `jax.set_mesh`. With several processes give them `MultiprocessingOptions(
    primary_host=0, active_processes=set(range(jax.process_count())), barrier_sync_key_prefix="...")`.

    Example:
      >>> import tempfile, jax.numpy as jnp, numpy as np
      >>> from jax.sharding import Mesh, PartitionSpec as P
      >>> from jaxpp_flax import MpmdMesh
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
    """Patch `StandardCheckpointHandler`, which accepts few types: convert `MpmdArray`s to arrays first."""
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
            args = replace(args, item=_replace(args.item, abstract_leaf))
        return restore(self, directory, _replace(item, abstract_leaf), args)

    cls.async_save, cls.restore = async_save, restore_


def _replace(tree: Any, function: Any) -> Any:
    return jax.tree.map(lambda leaf: function(leaf) if isinstance(leaf, MpmdArray) else leaf, tree)


def _shards_of(array: jax.Array) -> SimpleNamespace:
    """Return the attributes of an array that Orbax reads, with the shards that this process writes.

    Stock Orbax refuses an array that one process owns, and cannot handle an array without a shard in this process. Such
    a process gets one shard without data: all processes must compute the same chunks on disk.

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
        index = tuple(slice(0, size) for size in shape)
        data = SimpleNamespace(shape=shape, size=math.prod(shape))
        shards = [SimpleNamespace(index=index, data=data, replica_id=_NEVER_WRITTEN)]
    names = ("shape", "dtype", "sharding", "ndim", "size", "itemsize", "nbytes")
    return SimpleNamespace(**{name: getattr(array, name) for name in names}, addressable_shards=shards)


def _has_local_devices(sharding: Any) -> bool:
    return any(device.process_index == jax.process_index() for device in sharding.device_set)
