"""Types of programs written for Shardy:MPMD."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from jax.sharding import Mesh

__all__ = [
    "FunctionIOMeshAssignment",
    "FunctionNamedShardings",
    "NameToMeshAssignment",
    "Topology",
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
