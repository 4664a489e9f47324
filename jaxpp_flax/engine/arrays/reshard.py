"""Move trees of arrays from one mesh onto the ranks of a pipeline, and back, within a memory budget.

In one process every leaf is copied straight to its devices. With several processes, no process can reach all devices.
So all of them run one small compiled program for each group of leaves; the program moves the values by collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxpp_flax._compat import copy_arrays
from jaxpp_flax.engine.arrays.ambient_mesh import context_mesh
from jaxpp_flax.engine.arrays.mesh import MpmdMesh, MpmdSharding, named_memory
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray

__all__ = ["mpmd_to_spmd_reshard", "spmd_to_mpmd_reshard"]

# Used if a device has no memory statistics, and with several processes, which must form the same groups.
_DEFAULT_THRESHOLD = 256 << 20


def spmd_to_mpmd_reshard(
    mpmd_mesh: MpmdMesh, spmd_arrays: Any, mpmd_shardings: Any, threshold: int | None = None, *, donate: bool = True
) -> Any:
    """Move a tree of arrays onto the ranks that their shardings name.

    Args:
      mpmd_mesh: the mesh of all ranks.
      spmd_arrays: a pytree of `jax.Array`s on any devices, `MpmdArray`s, NumPy arrays or scalars. With several
        processes, `jax.Array`s lie on the devices of `mpmd_mesh`, and each process passes the same host values.
      mpmd_shardings: a pytree of `MpmdSharding`s over `mpmd_mesh`: of the same structure, or a prefix of it.
      threshold: the bytes that one group of leaves may add to any one device before the next group begins; a larger
        leaf forms a group alone. Default: a third of the free memory; 256 MiB if the free memory is unknown, or with
        several processes (which must all pass the same number).
      donate: delete each source once it is moved, so that the tree is never in memory twice. This applies to JAX's
        arrays; NumPy arrays stay as they are.

    Returns:
      A tree like `spmd_arrays` with an `MpmdArray` for each leaf.

    Raises:
      TypeError: if a leaf is not an array, or has no `MpmdSharding`.
      ValueError: if the trees don't fit, a sharding is over another mesh, or its spec does not fit the leaf.
      RuntimeError: if a leaf has been deleted.

    Example:
      >>> import jax, numpy as np
      >>> from jax.sharding import Mesh, PartitionSpec as P
      >>> mesh = MpmdMesh(Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("stage", "data")), "stage")
      >>> tree = {"a": np.zeros((4, 3), np.float32), "b": np.ones(2, np.float32)}
      >>> shardings = {"a": MpmdSharding(mesh, {0}, P("data")), "b": MpmdSharding(mesh, {0, 1}, P())}
      >>> spmd_to_mpmd_reshard(mesh, tree, shardings)["b"]
      MpmdArray(shape=(2,), dtype=float32, mpmd_idxs=(0, 1), sharding=...)

    The name is that of NVIDIA's JaxPP, whose function always deletes its arguments.
    """
    paths, leaves, targets, treedef = _flatten("spmd_to_mpmd_reshard", spmd_arrays, mpmd_shardings)
    for path, target in zip(paths, targets, strict=True):
        if not isinstance(target, MpmdSharding):
            raise TypeError(
                f"spmd_to_mpmd_reshard: the sharding of leaf {path} is a {type(target).__name__}; "
                "pass an `MpmdSharding(mpmd_mesh, {rank}, spec)`."
            )
        if target.mpmd_mesh != mpmd_mesh:
            raise ValueError(
                f"spmd_to_mpmd_reshard: the sharding of leaf {path} is over {target.mpmd_mesh!r}, not over the given "
                f"{mpmd_mesh!r}. Build it with the mesh that you pass."
            )
    collective = mpmd_mesh.jax_mesh.is_multi_process
    if collective:
        _refuse_collectives("spmd_to_mpmd_reshard", paths, leaves)
    ranks = range(mpmd_mesh.mpmd_dim)
    costs = [
        _cost(path, leaf, {r: target.local_sharding(r) for r in (ranks if collective else target.ranks)})
        for path, leaf, target in zip(paths, leaves, targets, strict=True)
    ]
    place = partial(_place_by_collective, mpmd_mesh) if collective else _place
    return treedef.unflatten(_run(place, leaves, targets, costs, _budget(mpmd_mesh, threshold), donate=donate))


def mpmd_to_spmd_reshard(
    mpmd_mesh: MpmdMesh, mpmd_arrays: Any, spmd_shardings: Any, threshold: int | None = None, *, donate: bool = True
) -> Any:
    """Move a tree of `MpmdArray`s to ordinary `jax.Array`s with the given shardings.

    Args:
      mpmd_mesh: the mesh of all ranks.
      mpmd_arrays: a pytree of `MpmdArray`s.
      spmd_shardings: a pytree of shardings: of the same structure, or a prefix of it. With several processes they
        are over the devices of `mpmd_mesh`.
      threshold: as in `spmd_to_mpmd_reshard`.
      donate: delete each source once it is moved.

    Returns:
      A tree like `mpmd_arrays` with a `jax.Array` for each leaf.

    Raises:
      TypeError: if a leaf is not an `MpmdArray`, or has no sharding.
      ValueError: if the trees don't fit, or a sharding does not fit its leaf.
      RuntimeError: if a leaf has been deleted.

    Example:
      >>> import jax, numpy as np
      >>> from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
      >>> mesh = MpmdMesh(Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("stage", "data")), "stage")
      >>> [x] = spmd_to_mpmd_reshard(mesh, [np.arange(8.0)], [MpmdSharding(mesh, {1}, P("data"))])
      >>> [y] = mpmd_to_spmd_reshard(mesh, [x], NamedSharding(mesh.jax_mesh, P(("stage", "data"))))
      >>> y.sharding.spec, float(y.sum()), x.is_deleted()
      (P(('stage', 'data'),), 28.0, True)
    """
    paths, leaves, targets, treedef = _flatten("mpmd_to_spmd_reshard", mpmd_arrays, spmd_shardings)
    for path, leaf, target in zip(paths, leaves, targets, strict=True):
        if not isinstance(leaf, MpmdArray):
            raise TypeError(f"mpmd_to_spmd_reshard: leaf {path} is a {type(leaf).__name__}, not an MpmdArray.")
        if not isinstance(target, Sharding):
            raise TypeError(
                f"mpmd_to_spmd_reshard: the sharding of leaf {path} is a {type(target).__name__}; "
                "pass a `jax.sharding.NamedSharding`."
            )
    collective = mpmd_mesh.jax_mesh.is_multi_process
    if collective:
        _refuse_collectives("mpmd_to_spmd_reshard", paths, leaves)
    costs: list[Mapping[Hashable, int]] = []
    for path, leaf, target in zip(paths, leaves, targets, strict=True):
        cost = _cost(path, leaf, {None: target})
        if collective:
            # Each rank holds a replica, its own or zeros, beside the result.
            ranks = {r: leaf.sharding.local_sharding(r) for r in range(mpmd_mesh.mpmd_dim)}
            for device, size in _cost(path, leaf, ranks).items():
                cost[device] = cost.get(device, 0) + size
        costs.append(cost)
    place = partial(_gather_by_collective, mpmd_mesh) if collective else _gather
    return treedef.unflatten(_run(place, leaves, targets, costs, _budget(mpmd_mesh, threshold), donate=donate))


def _flatten(function: str, tree: Any, shardings: Any) -> tuple[list[str], list[Any], list[Any], Any]:
    """Return names, leaves, their shardings, and the tree's structure; deleted leaves are refused."""
    with_paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    try:
        targets = jax.tree.leaves(jax.tree.broadcast(shardings, tree))
    except ValueError as error:
        raise ValueError(
            f"{function}: the tree of shardings does not fit the tree of arrays: {jax.tree.structure(shardings)} is "
            f"no prefix of {treedef}. Pass one sharding for each leaf, or for each subtree."
        ) from error
    paths = [jax.tree_util.keystr(path) or "(the whole tree)" for path, _ in with_paths]
    leaves = [leaf for _, leaf in with_paths]
    for path, leaf in zip(paths, leaves, strict=True):
        if not isinstance(leaf, (jax.Array, MpmdArray, np.ndarray, np.generic, bool, int, float, complex)):
            raise TypeError(f"{function}: leaf {path} is a {type(leaf).__name__}, not an array.")
        if isinstance(leaf, (jax.Array, MpmdArray)) and leaf.is_deleted():
            raise RuntimeError(
                f"{function}: leaf {path}, {leaf.dtype}{list(leaf.shape)}, has been donated or deleted. Use what the "
                "call that consumed it returned, or pass `donate=False` there to keep it."
            )
    return paths, leaves, targets, treedef


def _refuse_collectives(function: str, paths: list[str], leaves: list[Any]) -> None:
    """Refuse leaves that cannot move between processes."""
    for path, leaf in zip(paths, leaves, strict=True):
        if jnp.issubdtype(getattr(leaf, "dtype", np.dtype(object)), jax.dtypes.prng_key):
            raise TypeError(
                f"{function}: leaf {path} holds PRNG keys, which cannot move between processes. Pass "
                "`jax.random.key_data(keys)` and wrap the result with `jax.random.wrap_key_data`."
            )


def _cost(path: str, leaf: Any, shardings: Mapping[Any, Sharding]) -> dict[Hashable, int]:
    """Return the bytes that the leaf adds to each device."""
    shape = np.shape(leaf)
    dtype = leaf.dtype if hasattr(leaf, "dtype") else np.result_type(leaf)
    cost: dict[Hashable, int] = {}
    for sharding in shardings.values():
        try:
            shard_shape = sharding.shard_shape(shape)
        except ValueError as error:
            raise ValueError(f"reshard: leaf {path} of shape {shape} does not fit its sharding. {error}") from error
        size = int(np.prod(shard_shape, dtype=np.int64)) * dtype.itemsize
        for device in sharding.device_set:
            cost[device] = cost.get(device, 0) + size
    return cost


def _budget(mpmd_mesh: MpmdMesh, threshold: int | None) -> int:
    """Return the given threshold or a default, in bytes for one device."""
    if threshold is not None:
        if threshold <= 0:
            raise ValueError(f"reshard: threshold={threshold} bytes leave no room; pass a positive number, or None.")
        return threshold
    if mpmd_mesh.jax_mesh.is_multi_process:
        return _DEFAULT_THRESHOLD
    free: list[int] = []
    for device in set(mpmd_mesh.jax_mesh.devices.flat):
        statistics = device.memory_stats() or {}
        if "bytes_limit" in statistics:
            free.append(statistics["bytes_limit"] - statistics.get("bytes_in_use", 0))
    return max(min(free) // 3, 1) if free else _DEFAULT_THRESHOLD


def _groups(costs: Sequence[Mapping[Hashable, int]], budget: int) -> Iterable[list[int]]:
    """Cut indices, in order, into groups that add at most `budget` bytes to any device; a larger leaf stays alone."""
    group: list[int] = []
    total: dict[Hashable, int] = {}
    for index, cost in enumerate(costs):
        if group and any(total.get(device, 0) + size > budget for device, size in cost.items()):
            yield group
            group, total = [], {}
        group.append(index)
        for device, size in cost.items():
            total[device] = total.get(device, 0) + size
    if group:
        yield group


def _run(
    place: Callable[[list[Any], list[Any]], list[Any]],
    leaves: list[Any],
    targets: list[Any],
    costs: Sequence[Mapping[Hashable, int]],
    budget: int,
    *,
    donate: bool,
) -> list[Any]:
    """Move group by group; with `donate`, a source is deleted after its last use as a leaf."""
    results: list[Any] = []
    last_use = {id(leaf): index for index, leaf in enumerate(leaves)}
    for group in _groups(costs, budget):
        results += place([leaves[i] for i in group], [targets[i] for i in group])
        # Wait for this group: until then, its sources' memory is not free for the results of the next group.
        jax.block_until_ready(results[-len(group) :])
        for index in group:
            leaf = leaves[index]
            if donate and last_use[id(leaf)] == index and isinstance(leaf, (jax.Array, MpmdArray)):
                leaf.delete()
    return results


def _place(leaves: list[Any], targets: list[MpmdSharding]) -> list[Any]:
    """Copy each leaf to each of its ranks, within one process."""
    sources = [_source(leaf) for leaf in leaves]
    pairs = [(i, rank) for i, target in enumerate(targets) for rank in target.ranks]
    copies = copy_arrays([sources[i] for i, _ in pairs], [targets[i].local_sharding(rank) for i, rank in pairs])
    parts: list[dict[int, jax.Array]] = [{} for _ in leaves]
    for (i, rank), array in zip(pairs, copies, strict=True):
        parts[i][rank] = array
    return [MpmdArray(part, target) for part, target in zip(parts, targets, strict=True)]


def _source(leaf: Any) -> Any:
    if isinstance(leaf, MpmdArray):
        return jnp.asarray(leaf)  # any replica will do: all are equal
    # On CPU, JAX may take the memory of a NumPy array as its own, and the user may write to it.
    return np.array(leaf) if isinstance(leaf, np.ndarray) else leaf


def _gather(leaves: list[MpmdArray], targets: list[Sharding]) -> list[Any]:
    """Copy each leaf's first replica, within one process."""
    return copy_arrays([_source(leaf) for leaf in leaves], targets)


# With several processes, the programs run on meshes of Auto axes, so that XLA chooses the shardings inside. Shards go
# between such a mesh and the user's mesh without a copy.


def _auto(mesh: Any) -> Mesh:
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def _auto_sharding(sharding: Sharding) -> Sharding:
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(_auto(sharding.mesh), sharding.spec, memory_kind=sharding.memory_kind)


def _relabel(array: jax.Array, sharding: Sharding) -> jax.Array:
    """Return the same shards under another sharding that puts them on the same devices."""
    shards = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, shards, dtype=array.dtype)


def _copy(arrays: list[Any]) -> list[Any]:
    # Without a copy, a result would share memory with its source, which is deleted.
    return [jnp.copy(array) for array in arrays]


@context_mesh(None)  # JAX would compare its devices with those of a mesh around the call
def _place_by_collective(mpmd_mesh: MpmdMesh, leaves: list[Any], targets: list[MpmdSharding]) -> list[Any]:
    """Replicate over the ranks in one program; each process keeps the shards of its ranks among the targets."""
    whole = [NamedSharding(_auto(mpmd_mesh.jax_mesh), t.spec, memory_kind=t.memory_kind) for t in targets]
    sources = [
        _relabel(leaf, _auto_sharding(leaf.sharding))
        if isinstance(leaf, jax.Array)
        else _stacked_first(mpmd_mesh, leaf)
        if isinstance(leaf, MpmdArray)
        else _from_host(leaf, sharding)
        for leaf, sharding in zip(leaves, whole, strict=True)
    ]
    replicated = jax.jit(_copy, out_shardings=whole)(sources)
    results: list[Any] = []
    for array, target in zip(replicated, targets, strict=True):
        shards = {shard.device: shard.data for shard in array.addressable_shards}
        parts: dict[int, jax.Array] = {}
        kept: set[Any] = set()
        for rank in target.ranks:
            if mpmd_mesh.is_local(rank):
                local = [device for device in mpmd_mesh.rank_devices(rank) if device in shards]
                kept.update(local)
                parts[rank] = jax.make_array_from_single_device_arrays(
                    array.shape, target.local_sharding(rank), [shards[device] for device in local], dtype=array.dtype
                )
        for device, shard in shards.items():
            if device not in kept:
                shard.delete()
        results.append(MpmdArray(parts, target, shape=array.shape, dtype=array.dtype))
    return results


def _from_host(value: Any, sharding: Sharding) -> jax.Array:
    host = np.asarray(value, jax.dtypes.canonicalize_dtype(np.result_type(value)))
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def _bits(dtype: Any) -> Any:
    """Return the unsigned integer of a float's size: XLA may select a row by a sum with zeros, which loses -0.0."""
    return jnp.dtype(f"uint{jnp.finfo(dtype).bits}") if jnp.issubdtype(dtype, jnp.floating) else dtype


def _stack(mpmd_mesh: MpmdMesh, leaf: MpmdArray) -> jax.Array:
    """Make an array of shape (ranks, *leaf.shape); row r lies on rank r: the leaf on its first rank, else zeros.

    The array holds the leaf's bits; see `_bits` for its dtype.
    """
    dtype = _bits(leaf.dtype)
    axis = mpmd_mesh.mpmd_axis_name
    sharding = NamedSharding(_auto(mpmd_mesh.jax_mesh), PartitionSpec(axis, *leaf.spec))
    rows: list[jax.Array] = []
    process = jax.process_index()
    for rank in mpmd_mesh.local_ranks:
        part = leaf._partially_addressable_arrays.get(rank) if rank == leaf.mpmd_idxs[0] else None
        if part is not None:
            own = [_in_own_memory(shard.data) for shard in part.addressable_shards]
            rows += [jax.lax.bitcast_convert_type(data[None], dtype) for data in own]
        else:
            shape = (1, *leaf.sharding.local_sharding(rank).shard_shape(leaf.shape))
            devices = [device for device in mpmd_mesh.rank_devices(rank) if device.process_index == process]
            rows += [jnp.zeros(shape, dtype, device=device) for device in devices]
    shape = (mpmd_mesh.mpmd_dim, *leaf.shape)
    return jax.make_array_from_single_device_arrays(shape, sharding, rows, dtype=dtype)


def _in_own_memory(data: jax.Array) -> jax.Array:
    """Return a shard in its device's own memory: collectives compute there."""
    (device,) = data.devices()
    return data if named_memory(data.sharding) is None else jax.device_put(data, SingleDeviceSharding(device))


def _rows(arrays: list[jax.Array], ranks: tuple[int, ...], dtypes: tuple[Any, ...]) -> list[jax.Array]:
    return [jax.lax.bitcast_convert_type(a[rank], dtype) for a, rank, dtype in zip(arrays, ranks, dtypes, strict=True)]


def _stacked_first(mpmd_mesh: MpmdMesh, leaf: MpmdArray) -> jax.Array:
    """Replicate the leaf over all ranks."""
    sharding = NamedSharding(_auto(mpmd_mesh.jax_mesh), leaf.spec)
    return _gather_by_collective(mpmd_mesh, [leaf], [sharding])[0]


@context_mesh(None)  # JAX would compare its devices with those of a mesh around the call
def _gather_by_collective(mpmd_mesh: MpmdMesh, leaves: list[MpmdArray], targets: list[Sharding]) -> list[Any]:
    """Stack the leaves over the ranks and take each one's row, in one program."""
    stacked = [_stack(mpmd_mesh, leaf) for leaf in leaves]
    ranks = tuple(leaf.mpmd_idxs[0] for leaf in leaves)
    dtypes = tuple(leaf.dtype for leaf in leaves)
    whole = [_auto_sharding(target) for target in targets]
    rows = jax.jit(_rows, static_argnums=(1, 2), out_shardings=whole)(stacked, ranks, dtypes)
    for array in stacked:
        array.delete()
    return [_relabel(row, target) for row, target in zip(rows, targets, strict=True)]
