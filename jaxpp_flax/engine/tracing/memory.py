"""The memory of a traced type."""

from __future__ import annotations

from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

__all__ = ["in_memory"]


def in_memory(sharding: NamedSharding | None, kind: str | None) -> NamedSharding | None:
    """Return a sharding that gives a traced type its memory too; device memory needs none."""
    if kind in (None, "device"):
        return sharding
    if sharding is None:
        return NamedSharding(AbstractMesh((), ()), PartitionSpec(), memory_kind=kind)
    return NamedSharding(sharding.mesh, sharding.spec, memory_kind=kind)
