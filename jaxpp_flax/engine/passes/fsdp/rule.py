"""The setting `fsdp=`: how often a stage gathers the parameters that are sharded over the axes of the batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jax.sharding import AbstractMesh, PartitionSpec

from jaxpp_flax.engine.tracing.ir import Atom, Equation, Value
from jaxpp_flax.error_codes import documented

__all__ = ["FsdpRule", "FsdpWarning", "Gather", "check_fsdp"]


@documented("JPF902")
class FsdpWarning(UserWarning):
    """A parameter is gathered, or its gradient is reduced, in every microbatch, although `fsdp=` asks for once."""


@dataclass(frozen=True, eq=False, kw_only=True)
class FsdpRule:
    """Gather parameters as tasks of their own, and reduce their gradients once, after the loop.

    Attributes:
      mesh: the submesh of a rank, without devices.
      limit: the most bytes of gathered parameters on a device at one time; None for no limit.
      names: the names of the step's inputs, for messages.
    """

    mesh: AbstractMesh
    limit: int | None
    names: Mapping[Value, str]

    def name_of(self, atom: Atom) -> str:
        """Return the name of an input of the step."""
        return self.names.get(atom, "a value made before the loop") if isinstance(atom, Value) else "a constant"

    @classmethod
    def of(cls, fsdp: str | int, mesh: AbstractMesh, names: Mapping[Value, str]) -> FsdpRule | None:
        """Make the rule of a checked setting; None for "microbatch"."""
        if fsdp == "microbatch":
            return None
        return cls(mesh=mesh, limit=None if isinstance(fsdp, str) else fsdp, names=names)


@dataclass(frozen=True, eq=False, kw_only=True)
class Gather:
    """A parameter of a loop that is gathered.

    Attributes:
      equation: makes the gathered parameter from its shards.
      spec: the partition of the gathered parameter.
      nbytes: the bytes of the gathered parameter on a device.
    """

    equation: Equation
    spec: PartitionSpec
    nbytes: int


def check_fsdp(fsdp: Any) -> str | int:
    """Return a setting `fsdp=` that is "step", "microbatch" or a number of bytes.

    Raises:
      ValueError: for another word, or for a number below 1.
      TypeError: for another type.

    Example:
      >>> check_fsdp("step"), check_fsdp(1 << 30)
      ('step', 1073741824)
    """
    known = (
        'Use "step" (gather once in a step), "microbatch" (in every task), or the bytes that may be gathered at once.'
    )
    if isinstance(fsdp, str):
        if fsdp not in ("step", "microbatch"):
            raise ValueError(f"fsdp={fsdp!r} is no known setting. {known}")
        return fsdp
    if isinstance(fsdp, bool) or not isinstance(fsdp, int):
        raise TypeError(f"fsdp must be a word or a whole number of bytes, got {type(fsdp).__name__}: {fsdp!r}. {known}")
    if fsdp < 1:
        raise ValueError(f"fsdp={fsdp}: a limit must be at least 1 byte. {known}")
    return fsdp
