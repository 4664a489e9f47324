"""The setting `fsdp=`: how often a stage gathers the parameters that are sharded over the axes of the batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jax.sharding import AbstractMesh, PartitionSpec

from jaxpp_flax.engine.tracing.ir import Atom, Equation, Value
from jaxpp_flax.error_codes import documented

__all__ = ["FsdpRule", "FsdpWarning", "Gather"]


@documented("JPF902")
class FsdpWarning(UserWarning):
    """A parameter is gathered, or its gradient reduced, more often, or at more cost, than the step asks for.

    It asks by `fsdp=`, or by a type of partial sums (`jax.P(unreduced=)`).
    """


@dataclass(frozen=True, eq=False, kw_only=True)
class FsdpRule:
    """Gather parameters before the loops, and reduce their gradients once, after them.

    Attributes:
      mesh: the submesh of a rank, without devices.
      names: the names of the step's inputs, for messages.
    """

    mesh: AbstractMesh
    names: Mapping[Value, str]

    def name_of(self, atom: Atom) -> str:
        """Return the name of an input of the step."""
        return self.names.get(atom, "a value made before the loop") if isinstance(atom, Value) else "a constant"


@dataclass(frozen=True, eq=False, kw_only=True)
class Gather:
    """A parameter that is gathered before the loops that read it.

    Attributes:
      parameter: its shards.
      equation: makes the gathered parameter.
      spec: the partition of the gathered parameter.
      nbytes: the bytes of the gathered parameter on a device.
    """

    parameter: Value
    equation: Equation
    spec: PartitionSpec
    nbytes: int

    @property
    def result(self) -> Value:
        """The gathered parameter."""
        return self.equation.outputs[0]
