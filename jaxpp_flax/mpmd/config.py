"""`make_config`: named meshes, the mesh and the stage of each name, and options under Shardy's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxpp_flax.engine.arrays.mesh import Device, RankMeshes
from jaxpp_flax.messages import known_names
from jaxpp_flax.mpmd.options import PartitioningOptions, schedule_name
from jaxpp_flax.schedules.schedule import Schedule

__all__ = ["MpmdConfig", "Topology", "make_config", "mesh_and_memory", "topology_of"]


# In programs written for Shardy, these suffixes of mesh names give a kind of memory.
_MEMORY_KINDS = ("#pinned_host", "#device")


def mesh_and_memory(name: str) -> tuple[str, str | None]:
    """Split the name of a mesh as an assignment gives it: `"m0#pinned_host"` is mesh `"m0"` and its host memory.

    Example:
      >>> mesh_and_memory("m0#pinned_host"), mesh_and_memory("m0")
      (('m0', 'pinned_host'), ('m0', None))
    """
    mesh, _, kind = name.partition("#")
    return mesh, kind or None


@dataclass(frozen=True, repr=False)
class Topology(RankMeshes):
    """Meshes in order; their positions are the engine's ranks. A device may belong to several meshes."""

    names: tuple[str, ...]
    meshes: tuple[Mesh, ...]

    def __repr__(self) -> str:
        return f"the topology { {n: dict(mesh.shape) for n, mesh in zip(self.names, self.meshes, strict=True)} }"

    @cached_property
    def unstack(self) -> Sequence[Mesh]:
        """The meshes, under the name that the engine uses."""
        return self.meshes

    @cached_property
    def device_sets(self) -> Sequence[set[Device]]:
        """The devices of each mesh."""
        return [set(mesh.devices.flat) for mesh in self.meshes]

    def rank(self, name: str) -> int:
        """Return the position of a mesh."""
        return self.names.index(name)


def topology_of(meshes: Mapping[str, Mesh] | None) -> Topology:
    """Check a topology from the user.

    Raises:
      TypeError: if it is not a mapping from names to `jax.sharding.Mesh`.
      ValueError: if it is empty, a name is reserved, or an axis is not of type Auto.
    """
    if not meshes:
        raise ValueError(
            f"topology must name at least one mesh, got {meshes!r}. "
            'Pass e.g. `{"m0": Mesh(devices[:2], ("data",)), "m1": Mesh(devices[2:], ("data",))}`.'
        )
    if not isinstance(meshes, Mapping):
        raise TypeError(
            f"topology must be a mapping from names to meshes, got {type(meshes).__name__}. "
            'Pass e.g. `{"m0": mesh_0, "m1": mesh_1}`.'
        )
    for name, mesh in meshes.items():
        if not isinstance(mesh, Mesh):
            raise TypeError(
                f"topology[{name!r}] must be a jax.sharding.Mesh, got {type(mesh).__name__}. "
                'Build one: `Mesh(np.array(devices), ("data",))`.'
            )
        if "@" in name or name.endswith(_MEMORY_KINDS):
            raise ValueError(
                f"a mesh cannot be named {name!r}: '@' and the endings {', '.join(_MEMORY_KINDS)} are reserved. "
                "Rename it."
            )
        other = [
            f"{axis}: {kind.name}"
            for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
            if kind is not AxisType.Auto
        ]
        if other:
            raise ValueError(
                f"topology[{name!r}] has axes that are not Auto ({', '.join(other)}): shardings over such axes are "
                "part of an array's type, so the array could not move to another mesh. Build the mesh with Auto axes."
            )
    return Topology(tuple(meshes), tuple(meshes.values()))


@dataclass(frozen=True)
class MpmdConfig:
    """The result of `make_config`; see its arguments."""

    topology: dict[str, Mesh]
    name_to_mesh_assignment: dict[str, str]
    name_to_stage_assignment: dict[str, int] = field(default_factory=dict)
    input_mesh_assignment: Any = ()
    output_mesh_assignment: Any = ()
    partitioning_options: PartitioningOptions = field(default_factory=PartitioningOptions)
    read_input_output_mesh_from_shardings: bool = False
    pipeline_schedule: str | Schedule | None = None

    @property
    def sharding_mesh(self) -> AbstractMesh:
        """The first mesh without its devices; in a sharding, it stands for the mesh that an array is assigned to."""
        return next(iter(self.topology.values())).abstract_mesh

    @cached_property
    def meshes(self) -> Topology:
        """The topology as the engine's ranks."""
        return topology_of(self.topology)

    @property
    def schedule(self) -> str | Schedule | None:
        """The schedule: `pipeline_schedule`, or, if this is None, the schedule that the options name."""
        return self.partitioning_options.schedule if self.pipeline_schedule is None else self.pipeline_schedule

    def rank_of(self, name: str) -> int:
        """Return the rank of the mesh of a name."""
        return self.meshes.rank(mesh_and_memory(self.name_to_mesh_assignment[name])[0])


def make_config(
    topology: Mapping[str, Mesh],
    name_to_mesh_assignment: Mapping[str, str],
    *,
    name_to_stage_assignment: Mapping[str, int] | None = None,
    input_mesh_assignment: Any = (),
    output_mesh_assignment: Any = (),
    partitioning_options: Mapping[str, Any] | None = None,
    read_input_output_mesh_from_shardings: bool = False,
    pipeline_schedule: str | Schedule | None = None,
) -> MpmdConfig:
    """Assign each named computation or array to a mesh.

    Args:
      topology: named meshes, of equal or different shapes, with Auto axes; a device may belong to several.
      name_to_mesh_assignment: for each name in the program (`named_computation`, `named_tensor`), the name of a mesh.
        Work without a name is placed where few bytes are transferred.
      name_to_stage_assignment: the stage of each computation, a number from 0. Computations with the same mesh and the
        same number form a stage. Without numbers, neighbouring computations on one mesh form a stage.
      input_mesh_assignment, output_mesh_assignment: prefix trees of the arguments and of the results, with the name of
        a mesh for each; for None, the mesh is inferred. `"m0#pinned_host"` is the host memory of mesh `"m0"`,
        `"m0#device"` its device memory.
      partitioning_options: see `PartitioningOptions`; they can name the schedule.
      read_input_output_mesh_from_shardings: True takes the meshes of arguments and results from the `in_shardings` and
        `out_shardings` of `mpmd.jit`.
      pipeline_schedule: a schedule's name, or a schedule of `jaxpp_flax.schedules`; it replaces the options' schedule.

    Raises:
      TypeError: if a mapping, a mesh, the name of a mesh, or the schedule has a wrong type.
      ValueError: if the topology is empty or a mesh has axes that are not Auto; if a name is assigned to an unknown
        mesh, to several meshes, or to a stage but no mesh; if a stage is no number from 0; if an option or a schedule
        is unknown; if the meshes of arguments or results are given in both ways.
      NotImplementedError: if a name is assigned to a mesh's host memory.

    Example:
      >>> import jax, numpy as np
      >>> meshes = {f"m{i}": jax.sharding.Mesh(np.array([jax.devices()[i]]), ("data",)) for i in range(2)}
      >>> config = make_config(meshes, {"encoder": "m0", "decoder": "m1"})
      >>> make_config(meshes, {"encoder": "m2"})
      Traceback (most recent call last):
      ValueError: 'encoder' is assigned to the mesh 'm2', which the topology lacks. Did you mean 'm1' or 'm0'? ...

    After Shardy:MPMD's function of the same name (openxla/shardy, "MPMD RFC", 2025).
    """
    topology_of(topology)
    if not isinstance(name_to_mesh_assignment, Mapping):
        raise TypeError(
            "name_to_mesh_assignment must be a mapping, so that each name has one mesh, got "
            f'{type(name_to_mesh_assignment).__name__}. Pass e.g. `{{"block_0": "m0"}}`.'
        )
    for name, mesh in name_to_mesh_assignment.items():
        _check_mesh(mesh, topology, f"{name!r}")
        plain, kind = mesh_and_memory(mesh)
        if kind not in (None, "device"):
            raise NotImplementedError(
                f"{name!r} is assigned to {mesh!r}. A name says on which mesh work runs, and it runs on arrays in "
                f"device memory. Assign it to {plain!r}, and keep an array on the host by "
                "`jax.device_put(x, jax.memory.Space.Host)`, `in_shardings`, or the assignment of inputs and outputs."
            )
    stages = dict(name_to_stage_assignment or {})
    for name, stage in stages.items():
        if isinstance(stage, bool) or not isinstance(stage, int) or stage < 0:
            raise ValueError(f"the stage of {name!r} must be a number from 0, got {stage!r}.")
        if name not in name_to_mesh_assignment:
            raise ValueError(
                f"{name!r} is assigned to stage {stage}, but to no mesh.{known_names(name, name_to_mesh_assignment)} "
                "Add it to name_to_mesh_assignment."
            )
    for what, tree in (("input", input_mesh_assignment), ("output", output_mesh_assignment)):
        leaves = jax.tree.leaves(tree)
        for mesh in leaves:
            _check_mesh(mesh, topology, f"an {what} ({what}_mesh_assignment)")
        if leaves and read_input_output_mesh_from_shardings:
            raise ValueError(
                f"both {what}_mesh_assignment and read_input_output_mesh_from_shardings are given; pass one of them."
            )
    if isinstance(pipeline_schedule, str):
        pipeline_schedule = schedule_name(pipeline_schedule)
    elif pipeline_schedule is not None and not isinstance(pipeline_schedule, Schedule):
        raise TypeError(
            f"pipeline_schedule must be a name or a Schedule, got {type(pipeline_schedule).__name__}. "
            'Pass e.g. "ONE_FWD_ONE_BWD" or `jaxpp_flax.schedules.Std1F1B(4)`.'
        )
    return MpmdConfig(
        topology=dict(topology),
        name_to_mesh_assignment=dict(name_to_mesh_assignment),
        name_to_stage_assignment=stages,
        input_mesh_assignment=input_mesh_assignment,
        output_mesh_assignment=output_mesh_assignment,
        partitioning_options=PartitioningOptions(partitioning_options),
        read_input_output_mesh_from_shardings=read_input_output_mesh_from_shardings,
        pipeline_schedule=pipeline_schedule,
    )


def _check_mesh(mesh: Any, topology: Mapping[str, Mesh], what: str) -> None:
    if isinstance(mesh, (tuple, list, set, frozenset)):
        raise ValueError(
            f"{what} is assigned to {len(mesh)} meshes ({', '.join(map(str, mesh))}): a name lives on one. Give the "
            "computations of each mesh a name of their own."
        )
    if not isinstance(mesh, str):
        raise TypeError(f"{what} must be assigned to the name of a mesh, got {mesh!r} ({type(mesh).__name__}).")
    if mesh in topology:
        return
    plain, kind = mesh_and_memory(mesh)
    if plain in topology:
        if f"#{kind}" not in _MEMORY_KINDS:
            raise ValueError(
                f"{what} is assigned to {mesh!r}, but {kind!r} is no kind of memory that arrays can be assigned to. "
                f"Use {' or '.join(repr(plain + ending) for ending in _MEMORY_KINDS)}."
            )
        return
    raise ValueError(f"{what} is assigned to the mesh {mesh!r}, which the topology lacks.{known_names(mesh, topology)}")
