"""Expand prefix trees of shardings and mesh names to one spec or mesh for each leaf."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jaxpp_flax.engine.arrays.layouts import broadcast_prefix
from jaxpp_flax.engine.arrays.memory_kinds import memory_wanted
from jaxpp_flax.engine.arrays.mesh import axes_in
from jaxpp_flax.mpmd.config import MpmdConfig, Topology, mesh_and_memory

__all__ = [
    "ArgumentHome",
    "assigned_memories",
    "check_meshes",
    "check_within",
    "memories_of",
    "memory_shardings",
    "mesh_ranks",
    "ranks_of_shardings",
    "spec_of",
    "specs_of",
]


def specs_of(shardings: Any, tree: Any, config: MpmdConfig, what: str) -> list[PartitionSpec | None]:
    """Return the spec for each leaf; None for a leaf without a sharding.

    Raises:
      ValueError: if `shardings` is not a prefix, or no mesh of the topology has the shape of a sharding's mesh.
      TypeError: if a leaf is not a sharding.
    """
    nodes = broadcast_prefix(shardings, tree, what)
    return [None if node is None else _spec(node, config, where) for where, node in nodes]


def memories_of(shardings: Any, tree: Any, what: str) -> list[str | None]:
    """Return the kind of memory for each leaf; None for a leaf without one."""
    return [memory_wanted(node, where) for where, node in broadcast_prefix(shardings, tree, what)]


def memory_shardings(assignment: Any, config: MpmdConfig) -> Any:
    """Return an assignment's kinds of memory as shardings; None for a mesh name without one."""

    def sharding(name: str) -> NamedSharding | None:
        kind = mesh_and_memory(name)[1]
        return None if kind is None else NamedSharding(config.sharding_mesh, PartitionSpec(), memory_kind=kind)

    return jax.tree.map(sharding, assignment or None)


def check_meshes(arguments: Any, config: MpmdConfig) -> None:
    """Refuse an argument over a mesh with axes that no mesh of the topology has.

    Raises:
      ValueError: naming the argument and both meshes.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(arguments):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding):
            _check_axes(sharding, config, f"lowering_args{jax.tree_util.keystr(path)}")


def _spec(sharding: Any, config: MpmdConfig, where: str) -> PartitionSpec:
    if isinstance(sharding, PartitionSpec):
        return sharding
    if not isinstance(sharding, NamedSharding):
        raise TypeError(
            f"{where} must be a NamedSharding or a PartitionSpec, got {type(sharding).__name__}. "
            "Use `NamedSharding(config.sharding_mesh, spec)`."
        )
    _check_axes(sharding, config, where)
    return sharding.spec


def _check_axes(sharding: NamedSharding, config: MpmdConfig, where: str) -> None:
    shapes = [dict(mesh.shape) for mesh in config.topology.values()]
    if dict(sharding.mesh.shape) not in shapes:
        raise ValueError(
            f"{where} is over a mesh with axes {dict(sharding.mesh.shape)}, but no mesh of the topology has these: "
            f"{ {name: dict(mesh.shape) for name, mesh in config.topology.items()} }. Use a mesh of the topology, or "
            "`config.sharding_mesh`."
        )


def check_within(spec: PartitionSpec | None, mesh: Mesh, where: str, mesh_name: str) -> None:
    """Refuse a spec with an axis that the mesh lacks."""
    for axis in axes_in(spec or ()):
        if axis not in mesh.axis_names:
            raise ValueError(
                f"{where} is to be partitioned by {spec}, but it lives on mesh {mesh_name!r}, whose axes are "
                f"{dict(mesh.shape)}. Use its axes, or assign it to another mesh (`input_mesh_assignment`, "
                "`output_mesh_assignment`)."
            )


def spec_of(leaf: Any) -> PartitionSpec:
    """Return an argument's own spec."""
    sharding = getattr(leaf, "sharding", None)
    return sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()


def mesh_ranks(assignment: Any, tree: Any, topology: Topology, what: str) -> list[int | None]:
    """Return the rank for each leaf, from a prefix tree of mesh names; None for a leaf without a name."""
    names = [name for _, name in broadcast_prefix(assignment or None, tree, what)]
    return [None if name is None else topology.rank(mesh_and_memory(name)[0]) for name in names]


def assigned_memories(assignment: Any, kinds: Sequence[str | None], tree: Any, what: str) -> list[str | None]:
    """Return the kind of memory for each leaf: from its mesh name (`"m0#pinned_host"`), else from `kinds`.

    Raises:
      ValueError: if the two differ.
    """
    found: list[str | None] = []
    for (where, name), kind in zip(broadcast_prefix(assignment or None, tree, what), kinds, strict=True):
        named = None if name is None else mesh_and_memory(name)[1]
        if named and kind and named != kind:
            raise ValueError(
                f"{where} assigns {name!r}, but the sharding names the memory {kind!r}. Name one kind of memory."
            )
        found.append(named or kind)
    return found


def ranks_of_shardings(shardings: Any, tree: Any, config: MpmdConfig, what: str) -> list[int | None]:
    """Return the rank for each leaf, from a prefix tree of shardings; None if the topology lacks a sharding's mesh."""
    meshes = list(config.meshes.unstack)
    named = [getattr(node, "mesh", None) for _, node in broadcast_prefix(shardings, tree, what)]
    return [meshes.index(mesh) if mesh in meshes else None for mesh in named]


@dataclass(frozen=True)
class ArgumentHome:
    """The meshes on which a program reads an argument; `check` refuses an array that was placed elsewhere.

    `ranks` is empty for an argument that the program does not keep: that one may be anywhere.
    """

    path: str
    topology: Topology
    ranks: tuple[int, ...]
    _accepted: set[Sharding] = field(default_factory=set[Sharding], init=False, repr=False, compare=False)

    def check(self, leaf: Any, function: str) -> None:
        """Refuse an array that is committed to other devices than those of the argument's meshes.

        Raises:
          ValueError: naming the argument, its mesh and the mesh where the array is.
        """
        if not self.ranks or not isinstance(leaf, jax.Array) or leaf.sharding in self._accepted:
            return
        if not leaf.committed:
            return
        devices = leaf.sharding.device_set
        if any(devices == set(self.topology.rank_devices(rank)) for rank in self.ranks):
            self._accepted.add(leaf.sharding)
            return
        names = self.topology.names
        there = [repr(name) for rank, name in enumerate(names) if devices == set(self.topology.rank_devices(rank))]
        where = f"mesh {' and '.join(there)}" if there else f"devices {sorted(device.id for device in devices)}"
        home = " and ".join(repr(names[rank]) for rank in self.ranks)
        raise ValueError(
            f"argument{self.path} of {function} lies on {where}, but the program reads it on mesh {home}. Place the "
            "arguments first: `args = jax.device_put(args, lowered.function_named_shardings.input_specs)`. Arrays that "
            "were placed nowhere yet (host arrays, results of `jnp.ones`) are copied by the call."
        )
