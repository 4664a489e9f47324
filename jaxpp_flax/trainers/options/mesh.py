"""The options of the mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from jax.sharding import Mesh

from jaxpp_flax.counts import check_count
from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.schedules.gathers import Fsdp, check_fsdp
from jaxpp_flax.trainers.model.sharding import AxisRulesLike, MeshAxes, as_pairs
from jaxpp_flax.trainers.options.base import misfit

__all__ = ["MeshOptions"]


@dataclass(frozen=True, kw_only=True)
class MeshOptions:
    """The options of devices and of shardings inside a stage: `mesh=`.

    A mesh alone, `mesh=mesh`, means `MeshOptions(mesh=mesh)`; a mapping alone, `mesh={"data": 2}`, means
    `MeshOptions(axes={"data": 2})`.

    Args:
      mesh: a `jax.sharding.Mesh` with an axis "stage", or an `MpmdMesh`. None: a mesh over `jax.devices()`.
      axes: the mesh axes besides "stage", over `jax.devices()`: `{"data": 2}` takes two devices for each rank, `{}`
        one; the size -1 takes the remaining devices. Each microbatch is divided along "data" and "fsdp". None:
        `{"data": -1}`.
      num_ranks: the number of ranks (groups of devices), for schedules with several stages on each rank. Default: the
        number of stages.
      sharding_rules: pairs (name, mesh axis or None) for the axis names in the annotations of the model's parameters.
        They have priority over Flax's `logical_axis_rules` that are active when the trainer is made.
      fsdp: how often a train step gathers parameters that are sharded over "data" or "fsdp": in each task
        ("microbatch"), or once ("step"). See `mpmd_jit_with_loop`.

    Raises:
      ValueError: if both a mesh and axes are given, `num_ranks` is below 1, or `fsdp` is unknown.
      TypeError: if the rules are not pairs.

    Example:
      >>> MeshOptions(axes={"data": 2}, num_ranks=2).axes
      {'data': 2}
    """

    mesh: Mesh | MpmdMesh | None = None
    axes: Mapping[str, int] | None = None
    num_ranks: int | None = None
    sharding_rules: AxisRulesLike | None = None
    fsdp: Fsdp = "microbatch"

    def __post_init__(self) -> None:
        check_fsdp(self.fsdp)
        if self.num_ranks is not None:
            object.__setattr__(self, "num_ranks", check_count("num_ranks", self.num_ranks))
        if self.mesh is not None and self.axes is not None:
            raise ValueError("both mesh= and axes= are given, but a mesh already has its axes. Leave out one of them.")
        _ = self.rules

    @cached_property
    def rules(self) -> tuple[tuple[str, MeshAxes], ...]:
        """`sharding_rules` as pairs."""
        return as_pairs(self.sharding_rules)

    @classmethod
    def of(cls, value: MeshOptions | Mesh | MpmdMesh | Mapping[str, int] | None) -> MeshOptions:
        """Convert the trainer's `mesh=`."""
        if isinstance(value, cls):
            return value
        if isinstance(value, Mapping):
            return cls(axes=value)
        if value is None or isinstance(value, (Mesh, MpmdMesh)):
            return cls(mesh=value)
        raise misfit("mesh", value, "a jax.sharding.Mesh, an MpmdMesh, a mapping of axes, or MeshOptions(...)")
