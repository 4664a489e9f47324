"""A function on ranks before any task is compiled, and a function that keeps one of these for each kind of call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, update_wrapper
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar, cast

import jax
from jax.sharding import PartitionSpec

from jaxpp_flax.engine.arrays.ambient_mesh import context_mesh, trace_settings
from jaxpp_flax.engine.compiled import Compiled
from jaxpp_flax.engine.program.program import Program
from jaxpp_flax.engine.runtime.debug_switches import looking_away
from jaxpp_flax.engine.runtime.executables import Executables, compile_program
from jaxpp_flax.engine.runtime.task_compiler import TaskCompiler
from jaxpp_flax.engine.signature import Signature, not_an_array, type_of, without_statics
from jaxpp_flax.engine.tracing.ir import Atom, Value

__all__ = ["FunctionOnRanks", "Placed", "Types", "structs_of", "trace"]

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


P = TypeVar("P", bound=Placed[Any])
Types: TypeAlias = tuple[tuple[tuple[int, ...], Any, bool], ...]  # of each leaf: its shape, dtype, and weak type


class FunctionOnRanks(ABC, Generic[P]):
    """Keeps what is placed and compiled: by the tree of a call, the types and shardings of its leaves, and settings.

    A front says how arguments get their ranks (`_argument_places`), and makes the program for them (`_place`).
    """

    _instead_of_arrays: ClassVar[str] = "close over it"  # what a caller does with an argument that is no array

    def __init__(self, fun: Callable[..., Any]) -> None:
        update_wrapper(cast(Any, self), fun)
        self._placed: dict[Hashable, P] = {}

    @abstractmethod
    def _argument_places(self, tree: Any, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Return where the leaves of a call shall lie: hashable, and one for each leaf."""

    @abstractmethod
    def _place(self, tree: Any, types: Types, places: tuple[Any, ...]) -> P:
        """Trace the function for arguments of these types and places, and place its work on ranks."""

    def _find(self, leaves: Sequence[Any], tree: Any) -> P:
        """Return the program for such arguments. Calls whose arguments end up in the same places share one."""
        types, settings = self._types(leaves, tree), trace_settings()
        key = tree, types, tuple([getattr(leaf, "sharding", None) for leaf in leaves]), settings
        placed = self._placed.get(key)
        if placed is None:
            places = self._argument_places(tree, leaves)
            asked = tree, types, places, settings
            if asked not in self._placed:
                with context_mesh(None):  # no mesh around the call may change what is compiled
                    self._placed[asked] = self._place(tree, types, places)
            placed = self._placed[key] = self._placed[asked]
        return placed

    def _types(self, leaves: Sequence[Any], tree: Any) -> Types:
        try:
            return tuple(map(type_of, leaves))
        except TypeError as error:
            raise not_an_array(without_statics(tree), leaves, self._instead_of_arrays) from error


def trace(jitted: Any, args: Iterable[Any], kwargs: Mapping[str, Any] | None = None) -> tuple[Any, tuple[bool, ...]]:
    """Trace a function under `jax.jit`; return the trace, and for each leaf of the arguments whether it is donated."""
    # With `jax.debug_nans`, `jax.jit` forgets what is donated; here the switch may change between two calls.
    with looking_away():
        traced = jitted.trace(*args, **(kwargs or {}))
    return traced, tuple(argument.donated for argument in jax.tree.leaves(traced.args_info))


def structs_of(types: Types) -> list[jax.ShapeDtypeStruct]:
    """Return the types of arguments as JAX has them."""
    return [jax.ShapeDtypeStruct(shape, dtype, weak_type=weak_type) for shape, dtype, weak_type in types]
