"""The places of a state's leaves: before a step is compiled, on their ranks, and copied to one device."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec, SingleDeviceSharding

from jaxpp_flax.checkpoint.format.paths import flatten
from jaxpp_flax.engine.arrays.device_memory import shortage
from jaxpp_flax.engine.arrays.mesh import MpmdMesh, MpmdSharding, named_memory
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.engine.arrays.placing import place_on_ranks
from jaxpp_flax.engine.runtime.reshard import on_every_process, spmd_to_mpmd_reshard
from jaxpp_flax.messages import amount
from jaxpp_flax.trainers.errors import ModelError
from jaxpp_flax.trainers.state.optimizer_memory import ON_DEVICES, OptimizerMemory
from jaxpp_flax.trainers.state.train_state import TrainState, parameter_of

__all__ = ["Ranks", "check_fits", "on_shards", "put_on_ranks", "to_ordinary"]


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The ranks of a trainer, the specs of the annotated leaves (see `state_specs`), and the optimizer's memory.

    Example:
      >>> import numpy as np
      >>> from jax.sharding import Mesh
      >>> mesh = MpmdMesh(Mesh(np.array(jax.devices()[:2]), ("stage",)), "stage")
      >>> import jax.numpy as jnp
      >>> params = {name: jnp.ones(4) for name in "abcd"}
      >>> state = TrainState(step=jnp.int32(0), params=params, opt_state={"mu": params}, model_state={})
      >>> found = Ranks(mesh=mesh).preliminary(state)
      >>> [found[f"params/{name}"].ranks for name in "abcd"], found["opt_state/mu/d"].ranks, found["step"].ranks
      ([(0,), (0,), (1,), (1,)], (1,), (0, 1))
    """

    mesh: MpmdMesh
    specs: TrainState | None = None
    kept: OptimizerMemory = ON_DEVICES

    def preliminary(self, state: TrainState) -> dict[str, MpmdSharding]:
        """Return the place of each leaf of a state, by path, for which no step is compiled.

        Neighbouring leaves share a rank, and each rank gets about the same number of bytes: at most its share plus one
        leaf. A leaf of the optimizer or the average lies beside its parameter. Single values are on all ranks. A leaf
        that lies on ranks already stays there.
        """
        count, (leaves, structure) = self.mesh.mpmd_dim, flatten(state)
        specs = [None] * len(leaves) if self.specs is None else structure.flatten_up_to(self.specs)
        totals, before = Counter[str](), Counter[str]()  # bytes of each part of the state
        for path, leaf in leaves.items():
            totals[path.partition("/")[0]] += _nbytes(leaf)
        known, found = dict[tuple[str, ...], tuple[int, ...]](), dict[str, MpmdSharding]()
        for (path, leaf), spec in zip(leaves.items(), specs, strict=True):
            part, *own = path.split("/")
            owner = parameter_of(tuple(own), known) if part in ("opt_state", "ema") else None
            kind = self.kept.kind_of(leaf) if part == "opt_state" else None
            if isinstance(leaf, MpmdArray):
                ranks, spec = leaf.sharding.ranks, leaf.spec
            elif math.prod(leaf.shape) == 1:
                ranks = tuple(range(count))
            elif owner is not None:
                ranks = known[owner]
            else:
                ranks = (min(before[part] * count // max(1, totals[part]), count - 1),)
            before[part] += _nbytes(leaf)
            if part == "params":
                known[tuple(own)] = ranks
            found[path] = MpmdSharding(self.mesh, ranks, PartitionSpec() if spec is None else spec, kind)
        return found


def check_fits(state: Any, shardings: Any) -> None:
    """Refuse a state that does not fit on the devices of its ranks, before anything is placed.

    Leaves that lie on their ranks already count as free. Leaves in host memory count only where the devices are CPUs,
    whose memory is the host's.

    Raises:
      ModelError: the message names a device, its share, and the largest leaf.
    """
    needed: dict[Any, int] = {}
    largest: dict[Any, tuple[int, str]] = {}
    parts: dict[Any, dict[str, int]] = {}
    leaves = jax.tree_util.tree_leaves_with_path(state)
    for (path, leaf), sharding in zip(leaves, jax.tree.leaves(shardings), strict=True):
        if isinstance(leaf, MpmdArray):
            continue
        for rank in sharding.ranks:
            local = sharding.local_sharding(rank)
            size = math.prod(local.shard_shape(leaf.shape)) * _itemsize(leaf)
            for device in local.device_set:
                if named_memory(sharding) is not None and device.platform != "cpu":
                    continue
                needed[device] = needed.get(device, 0) + size
                name = jax.tree_util.keystr(path, simple=True, separator="/")
                largest[device] = max(largest.get(device, (0, "")), (size, name))
                kinds = parts.setdefault(device, {})
                kinds[name.partition("/")[0]] = kinds.get(name.partition("/")[0], 0) + size
    short = shortage(needed)
    if short is None:
        return
    device = short.device
    listing = ", ".join(f"{name} {amount(size, 'B')}" for name, size in parts[device].items() if size)
    memory = "the memory of the host, which all devices of this process share," if device.platform == "cpu" else "it"
    raise ModelError(
        f"the model does not fit, even in parts: the share of {device} in the state is {amount(needed[device], 'B')} "
        f"({listing}; the largest leaf is {largest[device][1]} with {amount(largest[device][0], 'B')}), and {memory} "
        f"has {amount(short.free, 'B')} free, but {amount(short.needed, 'B')} are needed. Nothing was placed. Use more "
        "stages or devices, shard the parameters (mesh={'fsdp': 2} and annotations), or use a narrower dtype of the "
        "parameters or an optimizer with a smaller state."
    )


def put_on_ranks(mesh: MpmdMesh, tree: Any, shardings: Any, *, donate: bool = True) -> Any:
    """Put a tree on its ranks; every process must call this.

    Arrays of the user are copied and stay valid: a step may donate the copies. An `MpmdArray` that lies elsewhere is
    moved, and its old arrays are deleted; without `donate` it is copied too.
    """
    leaves, structure = jax.tree.flatten(tree)
    targets: list[MpmdSharding] = jax.tree.leaves(shardings)
    found: dict[int, Any] = {}
    several = mesh.is_multi_process
    for i, (leaf, target) in enumerate(zip(leaves, targets, strict=True)):
        if isinstance(leaf, MpmdArray):
            found[i] = _narrowed(leaf, target)
        elif several:
            found[i] = place_on_ranks(leaf, target)  # every process has the value: nothing is sent
    for is_own in (True, False):
        left = [i for i, leaf in enumerate(leaves) if found.get(i) is None and isinstance(leaf, MpmdArray) == is_own]
        here, there = [leaves[i] for i in left], [targets[i] for i in left]
        moved = spmd_to_mpmd_reshard(mesh, here, there, donate=is_own and donate)
        found |= dict(zip(left, moved, strict=True))
    return jax.tree.unflatten(structure, [found[i] for i in range(len(leaves))])


def on_shards(
    leaf: Any,
    function: Callable[[jax.Array, tuple[slice, ...]], jax.Array],
    shape: tuple[int, ...],
    dtype: Any,
    spec: PartitionSpec | None = None,
) -> Any:
    """Apply a function to the part of a leaf on each device of this process; no device communicates.

    Args:
      leaf: an array on ranks, or on one device.
      function: makes a part of the result, of a part of the leaf and its index.
      shape, dtype: of the whole result.
      spec: the partition of the result on a rank; None: that of the leaf.

    Example:
      >>> on_shards(jnp.arange(3), lambda part, index: part + index[0].start, (3,), jnp.int32).tolist()
      [0, 1, 2]
    """
    if not isinstance(leaf, MpmdArray):
        return function(leaf, tuple(slice(0, size) for size in leaf.shape))
    old = leaf.sharding
    sharding = old if spec is None else MpmdSharding(old.mpmd_mesh, old.ranks, spec, old.memory_kind)
    parts: dict[int, jax.Array] = {}
    for rank, part in leaf._partially_addressable_arrays.items():  # pyright: ignore[reportPrivateUsage]
        shards = [function(shard.data, shard.index) for shard in part.addressable_shards]
        local = sharding.local_sharding(rank)
        parts[rank] = jax.make_array_from_single_device_arrays(shape, local, shards, dtype=dtype)
    return MpmdArray(parts, sharding, shape=shape, dtype=dtype)


def to_ordinary(tree: Any) -> Any:
    """Copy every leaf to a new `jax.Array` on the default device.

    If the ranks belong to several processes, all of them must call this function.
    """
    # Without the name, an array of an Explicit mesh would keep the mesh in its type.
    there = SingleDeviceSharding(jax.local_devices()[0])

    def one(leaf: Any) -> Any:
        if isinstance(leaf, MpmdArray):
            several = leaf.sharding.mpmd_mesh.is_multi_process
            leaf = jax.device_put(on_every_process(leaf) if several else leaf.as_jax_array(), there)
        return jnp.array(leaf, copy=True)

    return jax.tree.map(one, tree)


def _narrowed(leaf: MpmdArray, target: MpmdSharding) -> MpmdArray | None:
    """Return the leaf on the target's ranks, if it lies there already; else None."""
    if not set(target.ranks) <= set(leaf.sharding.ranks):
        return None
    if any(
        not leaf.sharding.local_sharding(rank).is_equivalent_to(target.local_sharding(rank), leaf.ndim)
        for rank in target.ranks
    ):
        return None
    held = leaf._partially_addressable_arrays  # pyright: ignore[reportPrivateUsage]
    parts = {rank: held[rank] for rank in target.ranks if rank in held}
    return MpmdArray(parts, target, shape=leaf.shape, dtype=leaf.dtype)


def _itemsize(leaf: Any) -> int:
    return int(getattr(leaf.dtype, "itemsize", 0))


def _nbytes(leaf: Any) -> int:
    return math.prod(leaf.shape) * _itemsize(leaf)
