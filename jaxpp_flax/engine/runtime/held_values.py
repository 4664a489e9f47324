"""What is known of a program's values while it is compiled: their shardings, some of which XLA is still to choose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxpp_flax.engine.arrays.mesh import RankMeshes, canonical
from jaxpp_flax.engine.program.program import ProgramTask
from jaxpp_flax.engine.program.specs import shard_bytes
from jaxpp_flax.engine.tracing.ir import struct_of

__all__ = ["AllHeld", "Held", "explicit_spec", "held_after", "spec_in_type", "spec_of"]


@dataclass(frozen=True, eq=False)
class Held:
    """What is known of a value; one object stands for the values of all microbatches.

    `found` is the spec, or a function that returns it: another process may still compile the task that makes the value.
    `rank` is that task's rank, None for an argument of the step.
    """

    found: PartitionSpec | Callable[[], PartitionSpec]
    aval: Any = None
    rank: int | None = None

    @cached_property
    def spec(self) -> PartitionSpec:
        return self.found if isinstance(self.found, PartitionSpec) else self.found()

    @cached_property
    def partition(self) -> PartitionSpec:
        """The spec in one standard way, for comparing."""
        return canonical(self.spec)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.aval.shape)

    def local_bytes(self, mesh: RankMeshes) -> int:
        """Return the bytes of each device's part; 0 for an argument that is passed on."""
        if self.rank is None:
            return 0
        return shard_bytes(self.aval, NamedSharding(mesh.unstack[self.rank], self.spec))


AllHeld: TypeAlias = "tuple[Held, ...]"


def held_after(task: ProgramTask, found: Sequence[PartitionSpec | Callable[[], PartitionSpec]]) -> AllHeld:
    """Return what is known of a task's outputs."""
    return tuple(Held(spec, atom.aval, task.rank) for spec, atom in zip(found, task.graph.outputs, strict=True))


def spec_in_type(aval: Any) -> PartitionSpec:
    """Return the spec in a type on an Explicit mesh; on an Auto mesh, the spec of a whole array."""
    typed = struct_of(aval).sharding
    return PartitionSpec() if typed is None else canonical(typed.spec)


def explicit_spec(aval: Any, mesh: Mesh) -> PartitionSpec | None:
    """Return the spec in a type, on a mesh with Explicit axes only; None if XLA chooses.

    It must be asked for: without, XLA may choose another one for the results of a `shard_map`.
    """
    typed = struct_of(aval).sharding
    if typed is None or set(mesh.axis_types) != {AxisType.Explicit} or typed.spec.unreduced or typed.spec.reduced:
        return None
    return canonical(typed.spec)


def spec_of(sharding: Any) -> PartitionSpec | None:
    """Return the spec of a sharding that XLA chose; None if no spec can say it."""
    return canonical(sharding.spec) if isinstance(sharding, NamedSharding) else None
