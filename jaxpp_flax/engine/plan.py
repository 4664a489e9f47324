"""A step that is traced, and then placed on ranks, before any of its tasks is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxpp_flax.engine.arrays.ambient_mesh import context_mesh
from jaxpp_flax.engine.arrays.memory_kinds import check_devices
from jaxpp_flax.engine.arrays.mesh import MpmdMesh, MpmdSharding
from jaxpp_flax.engine.blocks import CutPolicy
from jaxpp_flax.engine.passes.runner import Residuals
from jaxpp_flax.engine.pipeline import Built, Prepared, ScheduleOf
from jaxpp_flax.engine.program.program import HOST_MEMORY
from jaxpp_flax.engine.signature import Signature
from jaxpp_flax.engine.tracing.ir import memory_kind_of

__all__ = ["Plan", "PreparedStep", "passes_context"]


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


@dataclass(frozen=True, eq=False)
class PreparedStep:
    """The step of a `Plan` before its cuts and residuals are chosen. One trace serves all choices of a planner."""

    mesh: MpmdMesh
    prepared: Prepared
    signature: Signature
    consts: tuple[Any, ...]
    out_specs: Sequence[PartitionSpec | None]

    def place(self, policy: CutPolicy, residuals: Residuals = None, schedule_of: ScheduleOf | None = None) -> Plan:
        """Place the step on ranks; see `Prepared.build`."""
        with passes_context(self.mesh):
            built = self.prepared.build(policy, residuals, schedule_of)
        chosen = built.settings.residual_plan
        if chosen is not None and any(stage.offload for stage in chosen.stages):
            check_devices(HOST_MEMORY, self.mesh.jax_mesh.devices.flat, "a ResidualPlan that offloads")
        return Plan(self.mesh, built, self.signature, self.consts, self.out_specs)


def passes_context(mesh: MpmdMesh) -> AbstractContextManager[Any]:
    """Return the context in which passes trace operations of their own: no mesh of the caller's may change them."""
    return context_mesh(mesh.abstract_submesh if mesh.is_explicit else None)
