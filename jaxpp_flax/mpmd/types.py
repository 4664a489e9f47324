"""Types of programs written for Shardy:MPMD, and the meshes of a tree by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

__all__ = [
    "FunctionIOMeshAssignment",
    "FunctionNamedShardings",
    "MpmdJitShardingInfo",
    "NameToMeshAssignment",
    "Topology",
    "mesh_names",
]

Topology: TypeAlias = dict[str, Mesh]
NameToMeshAssignment: TypeAlias = Mapping[str, str]


@dataclass(frozen=True)
class FunctionIOMeshAssignment:
    """Names of meshes: a tree for the arguments, and one for the results.

    Example:
      >>> FunctionIOMeshAssignment(("m0", "m1"), "m1").output_meshes
      'm1'
    """

    input_meshes: Any
    output_meshes: Any


class FunctionNamedShardings:
    """`input_specs` and `output_specs`: trees of `NamedSharding`s, each over the mesh of its leaf.

    If XLA chooses the partition of results, reading `output_specs` compiles the program.
    """

    def __init__(self, lowered: Any) -> None:
        self._lowered = lowered

    @property
    def input_specs(self) -> Any:
        """The shardings of the arguments, as a tuple."""
        return self._lowered.input_shardings

    @property
    def output_specs(self) -> Any:
        """The shardings of the results."""
        return self._lowered.output_shardings


@dataclass(frozen=True)
class MpmdJitShardingInfo:
    """The meshes and shardings of a lowered function's arguments and results.

    Attributes:
      named_shardings: trees of `NamedSharding`s, `input_specs` and `output_specs`.
      io_mesh_assignment: the names of the meshes of arguments and results.
      topology: the named meshes.
      name_to_mesh_map: the mesh of each name, or a pair of its mesh and its stage.

    Example:
      >>> import jax, numpy as np, jax.numpy as jnp
      >>> from jaxpp_flax import mpmd
      >>> meshes = {"m0": jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))}
      >>> info = mpmd.jit(lambda x: x + 1, mpmd.make_config(meshes, {})).lower(jnp.ones(2)).sharding_info
      >>> info.io_mesh_assignment.input_meshes, info.topology == meshes
      (('m0',), True)
    """

    named_shardings: FunctionNamedShardings
    io_mesh_assignment: FunctionIOMeshAssignment
    topology: Topology
    name_to_mesh_map: Mapping[str, str | tuple[str, int]]


def mesh_names(pytree: Any, topology: Mapping[str, Mesh]) -> Any:
    """Return the tree with the name of each leaf's mesh; None for a leaf without a mesh of devices.

    Args:
      pytree: a tree of arrays, `jax.ShapeDtypeStruct`s, `NamedSharding`s, meshes or None.
      topology: named meshes.

    Raises:
      ValueError: if a leaf is of another type, or its mesh is not in the topology.

    Example:
      >>> import jax, numpy as np
      >>> meshes = {f"m{i}": jax.sharding.Mesh(np.array([jax.devices()[i]]), ("data",)) for i in range(2)}
      >>> where = jax.sharding.NamedSharding(meshes["m1"], jax.sharding.PartitionSpec())
      >>> mesh_names((where, meshes["m0"], jax.ShapeDtypeStruct((2,), "int8")), meshes)
      ('m1', 'm0', None)
    """
    names = {mesh: name for name, mesh in topology.items()}

    def name_of(leaf: Any) -> str | None:
        found = leaf
        if isinstance(found, (jax.Array, jax.ShapeDtypeStruct)):
            found = found.sharding
        if isinstance(found, NamedSharding):
            found = found.mesh
        if found is None or isinstance(found, (AbstractMesh, jax.sharding.Sharding)):
            return None
        if not isinstance(found, Mesh):
            raise ValueError(
                f"Unexpected type: {type(leaf).__name__}. The leaves must be arrays, ShapeDtypeStructs, NamedShardings "
                "or meshes."
            )
        if found not in names:
            raise ValueError(
                f"Mesh {dict(found.shape)} with devices {found.devices.tolist()} is not in the topology, whose meshes "
                f"are { ({name: mesh.devices.tolist() for name, mesh in topology.items()}) }."
            )
        return names[found]

    return jax.tree.map(name_of, pytree)
