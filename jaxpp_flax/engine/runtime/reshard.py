"""Move arrays between ranks and processes: trees onto a pipeline and back, and arguments to the ranks that read them.

A tree moves one leaf after the other, so at most one leaf is in memory twice. In one process a leaf is copied directly
to its devices. With several processes each shard is sent from a device that has it to the devices that need it, like
the values between tasks. An argument moves mostly after a new schedule.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jaxpp_flax.engine.arrays.mesh import MpmdMesh, MpmdSharding, RankMeshes, named_memory
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.engine.arrays.placing import place
from jaxpp_flax.engine.arrays.replicas import ranks_text
from jaxpp_flax.engine.runtime.relayout import relayout, relayout_across
from jaxpp_flax.engine.runtime.transport.base import Tag
from jaxpp_flax.engine.runtime.transport.connection import DistributedProgram, process_connection
from jaxpp_flax.processes import errors_naming_failed_process

__all__ = ["WantedArgument", "bring", "check_parts", "mpmd_to_spmd_reshard", "on_every_process", "spmd_to_mpmd_reshard"]

# The calls with several processes: all of them make the same ones, in one order.
_calls = itertools.count()


def spmd_to_mpmd_reshard(mpmd_mesh: MpmdMesh, spmd_arrays: Any, mpmd_shardings: Any, *, donate: bool = True) -> Any:
    """Move a tree of arrays onto the ranks that their shardings name.

    Args:
      mpmd_mesh: the mesh of all ranks.
      spmd_arrays: a pytree of `jax.Array`s on any devices, `MpmdArray`s, NumPy arrays or scalars. With several
        processes, each `jax.Array` must be on devices of `mpmd_mesh`, and each process passes the same host values.
      mpmd_shardings: a pytree of `MpmdSharding`s over `mpmd_mesh`, of the same structure or a prefix of it.
      donate: delete each source after it is moved, so that the tree is never in memory twice. NumPy arrays are not
        deleted.

    Returns:
      A tree like `spmd_arrays` with an `MpmdArray` for each leaf.

    Raises:
      TypeError: if a leaf is not an array, or has no `MpmdSharding`.
      ValueError: if the trees do not fit each other, a sharding is over another mesh, or its spec does not fit the
        leaf.
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
    places = [[target.local_sharding(rank) for rank in target.ranks] for target in targets]
    moved_leaves = _run("spmd_to_mpmd_reshard", mpmd_mesh, paths, leaves, places, donate=donate)
    arrays: list[MpmdArray] = []
    for leaf, target, moved in zip(leaves, targets, moved_leaves, strict=True):
        parts = {rank: part for rank, part in zip(target.ranks, moved, strict=True) if part is not None}
        arrays.append(MpmdArray(parts, target, shape=np.shape(leaf), dtype=_dtype(leaf)))
    return treedef.unflatten(arrays)


def mpmd_to_spmd_reshard(mpmd_mesh: MpmdMesh, mpmd_arrays: Any, spmd_shardings: Any, *, donate: bool = True) -> Any:
    """Move a tree of `MpmdArray`s to ordinary `jax.Array`s with the given shardings.

    Args:
      mpmd_mesh: the mesh of all ranks.
      mpmd_arrays: a pytree of `MpmdArray`s.
      spmd_shardings: a pytree of shardings, of the same structure or a prefix of it. With several processes they must
        be over the devices of `mpmd_mesh`.
      donate: delete each source after it is moved.

    Returns:
      A tree like `mpmd_arrays` with a `jax.Array` for each leaf.

    Raises:
      TypeError: if a leaf is not an `MpmdArray`, or has no sharding.
      ValueError: if the trees do not fit each other, or a sharding does not fit its leaf.
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
    places = [[target] for target in targets]
    moved_leaves = _run("mpmd_to_spmd_reshard", mpmd_mesh, paths, leaves, places, donate=donate)
    # As in JAX, an array of other processes has no part here.
    arrays = [
        jax.make_array_from_single_device_arrays(leaf.shape, target, [], dtype=leaf.dtype) if part is None else part
        for leaf, target, (part,) in zip(leaves, targets, moved_leaves, strict=True)
    ]
    return treedef.unflatten(arrays)


def on_every_process(array: MpmdArray) -> jax.Array:
    """Copy a whole array to a device of this process; all processes of its mesh must call this, in one order.

    Example:
      >>> from jax.sharding import Mesh, PartitionSpec as P
      >>> from jaxpp_flax.engine.arrays.placing import place_on_ranks
      >>> mesh = MpmdMesh(Mesh(np.array(jax.devices()[:2]), ("stage",)), "stage")
      >>> on_every_process(place_on_ranks(np.arange(3), MpmdSharding(mesh, {1}, P()))).tolist()
      [0, 1, 2]
    """
    mesh = array.sharding.mpmd_mesh
    first = {device.process_index: device for device in [*mesh.jax_mesh.devices.flat][::-1]}
    whole = NamedSharding(Mesh([*first.values()], ("process",)), PartitionSpec())
    return mpmd_to_spmd_reshard(mesh, array, whole, donate=False).addressable_shards[0].data


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


def _dtype(leaf: Any) -> Any:
    """Return the dtype that JAX gives to a leaf."""
    if isinstance(leaf, (jax.Array, MpmdArray)):
        return leaf.dtype
    return jax.dtypes.canonicalize_dtype(np.result_type(leaf))


def _run(
    function: str,
    mpmd_mesh: MpmdMesh,
    paths: list[str],
    leaves: list[Any],
    places: Sequence[Sequence[Sharding]],
    *,
    donate: bool,
) -> list[list[jax.Array | None]]:
    """Copy each leaf to its places; with `donate`, a source is deleted after its last use as a leaf.

    Returns:
      The copies of each leaf; None at a place without devices of this process.
    """
    for path, leaf, shardings in zip(paths, leaves, places, strict=True):
        _check_fits(path, np.shape(leaf), shardings)
    several = mpmd_mesh.is_multi_process
    call = f"{function}-{next(_calls)}" if several else ""
    results: list[list[jax.Array | None]] = []
    last_use = {id(leaf): index for index, leaf in enumerate(leaves)}
    for index, leaf in enumerate(leaves):
        with errors_naming_failed_process():
            if several and _is_shared(leaf):
                copies = _to_processes(call, index, paths[index], leaf, places[index])
            else:
                copies = [_placed(leaf, to) if to.addressable_devices else None for to in places[index]]
            # Until this leaf is moved, its source's memory is not free for the next one.
            jax.block_until_ready(copies)
        results.append(copies)
        if donate and last_use[id(leaf)] == index and isinstance(leaf, (jax.Array, MpmdArray)):
            leaf.delete()
    return results


def _placed(leaf: Any, target: Sharding) -> jax.Array:
    """Copy a leaf of this process to a place."""
    if not isinstance(leaf, MpmdArray):
        return place(leaf, target, may_alias=False)
    if target.is_fully_addressable:
        return relayout(leaf.as_jax_array(), target)
    return place(jnp.asarray(leaf), target, may_alias=False)  # any replica will do: all are equal


def _check_fits(path: str, shape: tuple[int, ...], shardings: Sequence[Sharding]) -> None:
    try:
        for sharding in shardings:
            sharding.shard_shape(shape)
    except (ValueError, IndexError) as error:  # the second for a spec with more entries than the leaf has axes
        raise ValueError(f"reshard: leaf {path} of shape {shape} does not fit its sharding. {error}") from error


def _is_shared(leaf: Any) -> bool:
    """Return whether a leaf is one array of all processes; each process passes any other value itself, the same one."""
    return isinstance(leaf, MpmdArray) or (isinstance(leaf, jax.Array) and not leaf.is_fully_addressable)


def _to_processes(call: str, number: int, path: str, leaf: Any, places: Sequence[Sharding]) -> list[jax.Array | None]:
    """Copy a leaf to its places, from the processes that have it."""
    array = leaf.as_jax_array() if isinstance(leaf, MpmdArray) else leaf
    owners = {device.process_index for device in array.sharding.device_set}
    if not isinstance(leaf, MpmdArray) and len(owners) == 1:
        raise ValueError(
            f"{call}: leaf {path} is only on devices of process {owners.pop()}, but an array that all processes pass "
            f"must be on devices of all (this is process {jax.process_index()}). Make it on the devices of the whole "
            "mesh, or pass a host value."
        )
    connection = process_connection()
    step = connection.group.step or 0
    return [
        relayout_across(array, to, connection, Tag(call, step, number, call=position, what=f"leaf {path} of {call}"))
        for position, to in enumerate(places)
    ]


@dataclass(frozen=True)
class WantedArgument:
    """The demand of a step for an argument: the ranks of its mesh that read it, the partition there, and the memory."""

    mesh: RankMeshes
    ranks: tuple[int, ...]
    spec: PartitionSpec
    name: str
    memory_kind: str | None = None

    def on(self, rank: int) -> NamedSharding:
        """Return its sharding on one rank."""
        return NamedSharding(self.mesh.unstack[rank], self.spec, memory_kind=self.memory_kind)

    @cached_property
    def processes(self) -> frozenset[int]:
        """The processes that read it."""
        return frozenset[int]().union(*(self.mesh.rank_processes[rank] for rank in self.ranks))

    def is_met_by(self, leaf: MpmdArray) -> bool:
        """Return whether every rank already has the leaf with this partition."""
        sharding = leaf.sharding
        if not sharding.mesh_ids.issuperset(self.ranks) or sharding.mpmd_mesh != self.mesh:
            return False
        return sharding.spec == self.spec and named_memory(sharding) == self.memory_kind


def bring(
    leaf: MpmdArray, wanted: WantedArgument, distributed: DistributedProgram, call: int, argument: int
) -> dict[int, jax.Array]:
    """Return replicas of `leaf` for this process's wanted ranks; a replica is moved if a rank lacks one.

    Every process calls this with the same array at the same point, because all of them know where the array lives. What
    the devices of a rank have already, they keep.

    No two calls of the step may have the same number `call`; `argument` is the position of the argument.
    """
    replicas: dict[int, jax.Array] = {}
    for rank in sorted(set(wanted.ranks)):
        target = wanted.on(rank)
        own = next((own for own in leaf.mpmd_idxs if _is_there(leaf, own, target)), None)
        if own is None:
            what = f"rank {rank}: argument{wanted.name} of the step, which rank {ranks_text(leaf.mpmd_idxs)} has"
            tag = distributed.tag(0, call, what, part=f"/argument-{argument}-to-{rank}")
            part = relayout_across(leaf.as_jax_array(), target, distributed.connection, tag, waits=False)
        else:
            part = leaf._partially_addressable_arrays.get(own)  # pyright: ignore[reportPrivateUsage]
        if part is not None and rank in wanted.mesh.local_ranks:
            replicas[rank] = part
    return replicas


def _in_own_memory(sharding: Sharding) -> Sharding:
    """Return the same sharding in device memory."""
    return sharding.with_memory_kind("device")


def _is_there(leaf: MpmdArray, rank: int, target: NamedSharding) -> bool:
    """Return whether the replica of `rank` lies on the devices of the target as the target wants it."""
    lies = _in_own_memory(leaf.sharding.local_sharding(rank))
    return lies.device_set == target.device_set and lies.is_equivalent_to(_in_own_memory(target), leaf.ndim)


def check_parts(value: jax.Array, wanted: WantedArgument) -> None:
    """Refuse an array over several processes if one process lacks parts that it needs; all processes refuse it."""
    has = {device.process_index for device in value.sharding.device_set}
    for rank in wanted.ranks:
        target = wanted.on(rank)
        whole = value.is_fully_replicated and wanted.mesh.rank_processes[rank] <= has
        if not whole and not _same_devices(value, target):
            raise ValueError(
                f"argument{wanted.name}, {value.dtype}{list(value.shape)}, is sharded over several processes as "
                f"{value.sharding}, but the step reads it on rank {rank} as {target}, and the processes of that rank "
                "do not have all of it. Pass it with the sharding that the step takes (`compiled.in_shardings`), or as "
                "a host array that every process has."
            )


def _same_devices(value: jax.Array, target: NamedSharding) -> bool:
    return value.sharding.device_set == target.device_set and value.sharding.is_equivalent_to(target, value.ndim)
