"""A step that is traced and placed on ranks, before any of its tasks is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxpp_flax.engine.arrays.mesh import MpmdMesh, MpmdSharding
from jaxpp_flax.engine.pipeline import Built
from jaxpp_flax.engine.signature import Signature
from jaxpp_flax.engine.tracing.ir import memory_kind_of

__all__ = ["Plan"]


@dataclass(frozen=True, eq=False)
class Plan:
    """The program of a step for one signature, with the requested partitions of its arguments and results.

    `consts` are the arrays that the function closes over: the program's first arguments. In `out_specs`, None leaves
    the partition of a result to XLA.
    """

    mesh: MpmdMesh
    built: Built
    signature: Signature
    consts: tuple[Any, ...]
    out_specs: Sequence[PartitionSpec | None]

    @cached_property
    def in_specs(self) -> list[PartitionSpec]:
        """The partition of each constant, then of each leaf of a call."""
        return self.signature.specs(len(self.consts))

    @cached_property
    def result_specs(self) -> list[PartitionSpec | None]:
        """The requested partition of each result; one for all processes is whole on each device, as each reads it."""
        return [
            spec if spec is not None or not for_all else PartitionSpec()
            for spec, for_all in zip(self.out_specs, self.built.placed.for_all, strict=True)
        ]

    @cached_property
    def avals(self) -> list[Any]:
        """The type of each constant, then of each leaf of a call."""
        return [value.aval for value in self.built.placed.inputs]

    @property
    def in_shardings(self) -> Any:
        """The `MpmdSharding` of each argument: a tree like `(args, kwargs)`; it has no ranks if nothing reads it."""
        found = [
            MpmdSharding(self.mesh, ranks, spec, memory_kind_of(aval))
            for ranks, spec, aval in zip(self.built.program.arguments, self.in_specs, self.avals, strict=True)
        ]
        return jax.tree_util.tree_unflatten(self.signature.tree, found[len(self.consts) :])
