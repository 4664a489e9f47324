"""Shardings and meshes of arguments and results: what is asked of each leaf, and what does not fit."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxpp_flax.engine.arrays.memory_kinds import memory_wanted
from jaxpp_flax.engine.arrays.mesh import axes_in
from jaxpp_flax.engine.arrays.rank_shardings import broadcast_prefix
from jaxpp_flax.mpmd.config import MpmdConfig, Topology, mesh_and_memory

__all__ = [
    "Asked",
    "asked_of",
    "check_home",
    "check_meshes",
    "check_within",
    "spec_of",
]


class Asked(NamedTuple):
    """What is asked of an argument or a result: a mesh, a partition and a kind of memory; None leaves it open."""

    rank: int | None
    spec: PartitionSpec | None
    memory: str | None


def asked_of(tree: Any, shardings: Any, assignment: Any, config: MpmdConfig, direction: str) -> list[Asked]:
    """Return what is asked of each leaf, by prefix trees of shardings and of mesh names.

    Args:
      direction: "in" or "out": of arguments or results.

    Raises:
      ValueError: if one of them is not a prefix, they name two kinds of memory (`"m0#pinned_host"` names one), or no
        mesh of the topology has the shape of a sharding's mesh.
      TypeError: if a leaf of `shardings` is not a sharding.
    """
    asked: list[Asked] = []
    nodes = broadcast_prefix(shardings, tree, f"{direction}_shardings")
    names = broadcast_prefix(assignment or None, tree, f"{direction}put_mesh_assignment")
    meshes = list(config.meshes.unstack)
    for (where, node), (place, name) in zip(nodes, names, strict=True):
        own, (mesh, named) = memory_wanted(node, where), mesh_and_memory(name or "")
        if named and own and named != own:
            raise ValueError(
                f"{place} assigns {name!r}, but the sharding names the memory {own!r}. Name one kind of memory."
            )
        rank = config.meshes.rank(mesh) if mesh else None
        if config.read_input_output_mesh_from_shardings and (of_node := getattr(node, "mesh", None)) in meshes:
            rank = meshes.index(of_node)
        asked.append(Asked(rank, None if node is None else _spec(node, config, where), named or own))
    return asked


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


def check_within(spec: PartitionSpec | None, meshes: Topology, rank: int, where: str) -> None:
    """Refuse a spec with an axis that the mesh lacks."""
    mesh = meshes.unstack[rank]
    for axis in axes_in(spec or ()):
        if axis not in mesh.axis_names:
            raise ValueError(
                f"{where} is to be partitioned by {spec}, but it lives on mesh {meshes.names[rank]!r}, whose axes are "
                f"{dict(mesh.shape)}. Use its axes, or assign it to another mesh (`input_mesh_assignment`, "
                "`output_mesh_assignment`)."
            )


def spec_of(leaf: Any) -> PartitionSpec:
    """Return an argument's own spec."""
    sharding = getattr(leaf, "sharding", None)
    return sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()


def check_home(leaf: Any, path: str, function: str, topology: Topology, ranks: Collection[int]) -> None:
    """Refuse an array that is committed to other devices than those of the meshes on which a program reads it.

    Raises:
      ValueError: naming the argument, its mesh and the mesh where the array is.
    """
    # An argument that the program does not keep may be anywhere.
    if not ranks or not isinstance(leaf, jax.Array) or not leaf.committed:
        return
    devices = leaf.sharding.device_set
    if any(devices == topology.device_sets[rank] for rank in ranks):
        return
    present = [rank for rank, on_ranks in enumerate(topology.device_sets) if devices == on_ranks]
    lies, home = (" and ".join(repr(topology.names[rank]) for rank in on_ranks) for on_ranks in (present, ranks))
    where = f"mesh {lies}" if present else f"devices {sorted(device.id for device in devices)}"
    raise ValueError(
        f"argument{path} of {function} is on {where}, but the program reads it on mesh {home}. Place the "
        "arguments first: `args = jax.device_put(args, lowered.function_named_shardings.input_specs)`. Arrays that "
        "were placed nowhere yet (host arrays, results of `jnp.ones`) are copied by the call."
    )
