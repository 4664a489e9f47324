"""The memory of a traced type, and its sharding."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

__all__ = ["in_memory", "memory_kind_of", "typed_sharding"]


def in_memory(sharding: NamedSharding | None, kind: str | None) -> NamedSharding | None:
    """Return a sharding that gives a traced type its memory too; device memory needs none."""
    if kind in (None, "device"):
        return sharding
    if sharding is None:
        return NamedSharding(AbstractMesh((), ()), PartitionSpec(), memory_kind=kind)
    return NamedSharding(sharding.mesh, sharding.spec, memory_kind=kind)


def memory_kind_of(aval: Any) -> str | None:
    """Return the memory in a type, under its name in shardings; None for device memory."""
    return "pinned_host" if getattr(aval, "memory_space", None) == jax.memory.Space.Host else None


def typed_sharding(aval: Any) -> NamedSharding | None:
    """Return the sharding in a type on an Explicit mesh; on an Auto mesh, types have none."""
    mesh = getattr(aval.sharding, "mesh", None)
    return aval.sharding if mesh is not None and not mesh.empty and AxisType.Explicit in mesh.axis_types else None
