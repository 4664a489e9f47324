"""Expand prefix trees of shardings and mesh names to one spec or mesh for each leaf."""

from __future__ import annotations

from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpp_flax.engine.arrays.layouts import broadcast_prefix, memory_wanted
from jaxpp_flax.engine.arrays.mesh import axes_in
from jaxpp_flax.mpmd.config import MpmdConfig, Topology

__all__ = ["check_within", "memories_of", "mesh_ranks", "ranks_of_shardings", "spec_of", "specs_of"]


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


def _spec(sharding: Any, config: MpmdConfig, where: str) -> PartitionSpec:
    if isinstance(sharding, PartitionSpec):
        return sharding
    if not isinstance(sharding, NamedSharding):
        raise TypeError(
            f"{where} must be a NamedSharding or a PartitionSpec, got {type(sharding).__name__}. "
            "Use `NamedSharding(config.sharding_mesh, spec)`."
        )
    shapes = [dict(mesh.shape) for mesh in config.topology.values()]
    if dict(sharding.mesh.shape) not in shapes:
        raise ValueError(
            f"{where} is over a mesh with axes {dict(sharding.mesh.shape)}, but no mesh of the topology has these: "
            f"{ {name: dict(mesh.shape) for name, mesh in config.topology.items()} }. Use a mesh of the topology, or "
            "`config.sharding_mesh`."
        )
    return sharding.spec


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
    return [None if name is None else topology.rank(name) for name in names]


def ranks_of_shardings(shardings: Any, tree: Any, config: MpmdConfig, what: str) -> list[int | None]:
    """Return the rank for each leaf, from a prefix tree of shardings; None if the topology lacks a sharding's mesh."""
    meshes = list(config.meshes.unstack)
    named = [getattr(node, "mesh", None) for _, node in broadcast_prefix(shardings, tree, what)]
    return [meshes.index(mesh) if mesh in meshes else None for mesh in named]
