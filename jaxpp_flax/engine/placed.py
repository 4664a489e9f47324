"""A function whose work is on ranks, before any of its tasks is compiled."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

from jax.sharding import PartitionSpec

from jaxpp_flax.engine.arrays.ambient_mesh import context_mesh
from jaxpp_flax.engine.compiled import Compiled
from jaxpp_flax.engine.program.program import Program
from jaxpp_flax.engine.runtime.executables import Executables, compile_program
from jaxpp_flax.engine.runtime.task_compiler import TaskCompiler
from jaxpp_flax.engine.signature import Signature
from jaxpp_flax.engine.tracing.ir import Atom, Value

__all__ = ["Placed"]

C = TypeVar("C", bound=Compiled)


@dataclass(frozen=True, eq=False, kw_only=True)
class Placed(ABC, Generic[C]):
    """The program of a function for one signature. Each front is a subclass; it says how results are wrapped.

    `constants` are the arrays that the function closes over, the program's first arguments. `inputs` and `outputs` have
    the types of all arguments and results. In `result_specs`, None leaves the partition of a result to XLA. `compiler`
    is shared by all programs of one function, so that equal tasks compile once.
    """

    program: Program
    signature: Signature
    constants: tuple[Any, ...]
    inputs: Sequence[Value]
    outputs: Sequence[Atom]
    result_specs: Sequence[PartitionSpec | None]
    compiler: TaskCompiler[Any]

    @cached_property
    def compiled(self) -> C:
        """The function compiled for this signature. With several processes, all of them read this at one point."""
        with context_mesh(None):  # no mesh around the call may change what is compiled
            return self._compile()

    @abstractmethod
    def _compile(self) -> C:
        """Compile the tasks, and say how the results are wrapped."""

    @cached_property
    def executables(self) -> Executables:
        """The compiled tasks, and the partition of each value."""
        return self.executables_by(self.compiler)

    def executables_by(self, compiler: TaskCompiler[Any], *, alone: bool = False) -> Executables:
        """Return the program as another compiler compiles it; see `compile_program`."""
        types = [value.aval for value in self.inputs]
        return compile_program(self.program, compiler, self.in_specs, self.result_specs, types, alone=alone)

    @cached_property
    def in_specs(self) -> list[PartitionSpec]:
        """The partition of each constant, then of each leaf of a call."""
        return self.signature.specs(len(self.constants))

    @property
    def read_here(self) -> list[bool]:
        """For each leaf of a call, whether a rank of this process reads it."""
        local = set(self.compiler.mesh.local_ranks)
        return [not local.isdisjoint(ranks) for ranks in self.program.arguments[len(self.constants) :]]
