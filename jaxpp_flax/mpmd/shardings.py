"""Expand prefix trees of shardings and mesh names to one spec or mesh for each leaf."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding
from jax.tree_util import keystr

from jaxpp_flax.engine.arrays.layouts import memory_wanted
from jaxpp_flax.engine.arrays.mesh import axes_in
from jaxpp_flax.mpmd.config import MpmdConfig
from jaxpp_flax.mpmd.topology import Topology

__all__ = ["memories_of", "mesh_ranks", "ranks_of_shardings", "spec_of", "specs_of", "within"]


def _broadcast(prefix: Any, tree: Any, what: str) -> list[Any]:
    """Return the prefix's leaf for each leaf of `tree`; None is a leaf of the prefix."""
    is_leaf = lambda x: x is None or isinstance(x, (str, PartitionSpec, Sharding))  # noqa: E731
    leaves: list[Any] = []
    try:
        jax.tree.map(lambda leaf, sub: leaves.extend([leaf] * len(jax.tree.leaves(sub))), prefix, tree, is_leaf=is_leaf)
    except ValueError as error:
        raise ValueError(
            f"{what} is not a prefix of the tree it describes: {jax.tree.structure(prefix, is_leaf=is_leaf)} against "
            f"{jax.tree.structure(tree)}."
        ) from error
    return leaves


def specs_of(shardings: Any, tree: Any, config: MpmdConfig, what: str) -> list[PartitionSpec | None]:
    """Return the spec for each leaf; None for a leaf without a sharding.

    Raises:
      ValueError: if `shardings` is not a prefix, or no mesh of the topology has the shape of a sharding's mesh.
      TypeError: if a leaf is not a sharding.
    """
    paths = [keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    if shardings is None:
        return [None] * len(paths)
    return [
        None if leaf is None else _spec(leaf, config, f"{what}{path}")
        for leaf, path in zip(_broadcast(shardings, tree, what), paths, strict=True)
    ]


def memories_of(shardings: Any, tree: Any, what: str) -> list[str | None]:
    """Return the kind of memory for each leaf; None for a leaf without one.

    Raises:
      ValueError: if `shardings` is not a prefix, or JAX's types do not know a kind.
    """
    paths = [keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    if shardings is None:
        return [None] * len(paths)
    leaves = _broadcast(shardings, tree, what)
    return [memory_wanted(leaf, f"{what}{path}") for leaf, path in zip(leaves, paths, strict=True)]


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


def within(spec: PartitionSpec | None, mesh: Mesh, where: str, mesh_name: str) -> PartitionSpec:
    """Return the spec if the mesh has its axes.

    Raises:
      ValueError: if the mesh lacks an axis.
    """
    for axis in axes_in(spec or ()):
        if axis not in mesh.axis_names:
            raise ValueError(
                f"{where} is to be partitioned by {spec}, but it lives on mesh {mesh_name!r}, whose axes are "
                f"{dict(mesh.shape)}. Use its axes, or assign it to another mesh (`input_mesh_assignment`, "
                "`output_mesh_assignment`)."
            )
    return spec or PartitionSpec()


def spec_of(leaf: Any) -> PartitionSpec:
    """Return an argument's own spec."""
    sharding = getattr(leaf, "sharding", None)
    return sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()


def mesh_ranks(assignment: Any, tree: Any, topology: Topology, what: str) -> list[int | None]:
    """Return the rank for each leaf, from a prefix tree of mesh names; None for a leaf without a name."""
    count = len(jax.tree.leaves(tree))
    if isinstance(assignment, (tuple, list, dict)) and not assignment:
        return [None] * count
    return [None if name is None else topology.rank(name) for name in _broadcast(assignment, tree, what)]


def ranks_of_shardings(shardings: Any, tree: Any, config: MpmdConfig, what: str) -> list[int | None]:
    """Return the rank for each leaf, from a prefix tree of shardings; None if the topology lacks a sharding's mesh."""
    meshes: Sequence[Mesh] = config.meshes.unstack

    def rank(leaf: Any) -> int | None:
        mesh = getattr(leaf, "mesh", None)
        if mesh is None or isinstance(mesh, AbstractMesh):
            return None
        return meshes.index(mesh) if mesh in meshes else None

    if shardings is None:
        return [None] * len(jax.tree.leaves(tree))
    return [rank(leaf) for leaf in _broadcast(shardings, tree, what)]
