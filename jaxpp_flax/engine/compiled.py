"""A compiled step: checks its arguments, places them, runs the program and wraps the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, ClassVar

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray, MpmdSharding
from jaxpp_flax.engine.arrays.placing import place
from jaxpp_flax.engine.bound_program import BoundProgram
from jaxpp_flax.engine.plan import Plan
from jaxpp_flax.engine.runtime.executables import Executables, compile_program
from jaxpp_flax.engine.runtime.profile import TaskTiming
from jaxpp_flax.engine.runtime.task_compiler import TaskCompiler
from jaxpp_flax.engine.summary import MemoryAnalysis, StageSummary, analyse_memory, summarise_stages
from jaxpp_flax.engine.tracing.ir import memory_kind_of

__all__ = ["Compiled"]


class Compiled:
    """A step compiled for one signature: it takes only arguments of this structure, these shapes and dtypes.

    `compiler` counts the programs that it has compiled for the step's function.
    """

    _array_type: ClassVar[type[MpmdArray]] = MpmdArray  # of the results

    def __init__(self, plan: Plan, compiler: TaskCompiler[MpmdMesh]) -> None:
        built, signature, consts = plan.built, plan.signature, plan.consts
        self._plan, self.compiler = plan, compiler
        self._built, self._signature = built, signature
        self._shardings: dict[Any, MpmdSharding] = {}  # of results; those that lie alike share one
        self.mpmd_mesh = compiler.mesh
        self._executables = compile_program(built.program, compiler, plan.in_specs, plan.result_specs, plan.avals)
        program = self.program = self._executables.program
        results = [self._result(i) for i in range(len(program.results))]
        self._bound = BoundProgram(self._executables, signature, consts, results)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step.

        Raises:
          TypeError: if an argument differs from the signature in structure, shape or dtype.
          RuntimeError: if the mesh's devices are only described.
        """
        return self.run(self._signature.leaves_of(args, kwargs))

    def run(self, leaves: Sequence[Any]) -> Any:
        """Run on flat arguments whose types fit the signature; the types are not checked."""
        return self._bound.run(leaves)

    def profile(self, *args: Any, **kwargs: Any) -> tuple[Any, list[TaskTiming]]:
        """Run one real step and measure it: return the results, and the times of each task of the loop on its rank.

        The step waits for each task and each transfer, so it is slower than others. The start times are then computed
        from the measured durations: a task starts when its rank is free and its inputs have arrived.

        With several processes, each one measures its own ranks, and all return the times of all ranks.

        Raises:
          FloatingPointError: if `jax.debug_nans` or `jax.debug_infs` is set, and a result has such a value.
        """
        return self._bound.profile(self._signature.leaves_of(args, kwargs))

    def _result_sharding(self, position: int) -> MpmdSharding:
        result, atom = self.program.results[position], self._built.placed.outputs[position]
        if isinstance(result, dict):
            ranks = set(result)
        else:  # a constant costs no transfer, so every process gets it
            everywhere = range(self.mpmd_mesh.mpmd_dim)
            ranks = self._built.settings.idle_ranks if self._executables.distributed is None else everywhere
        spec = self._executables.out_specs[position] or PartitionSpec()
        memory = memory_kind_of(atom.aval)
        key = frozenset(ranks), spec, memory
        if key not in self._shardings:
            self._shardings[key] = MpmdSharding(self.mpmd_mesh, ranks, spec, memory)
        return self._shardings[key]

    def _result(self, position: int) -> Callable[[list[Any]], MpmdArray]:
        """Return a function that makes a result from the environment after a run."""
        result, aval = self.program.results[position], self._built.placed.outputs[position].aval
        sharding = self._result_sharding(position)
        local = [rank for rank in sharding.ranks if self.mpmd_mesh.is_local(rank)]

        make = self._array_type._from_parts  # pyright: ignore[reportPrivateUsage]
        if isinstance(result, dict):
            value_of = {rank: result[rank] for rank in local}
            if len(value_of) == 1:  # nearly every result; a comprehension takes longer
                ((only, value),) = value_of.items()
                return lambda environment: make(sharding, {only: environment[value]}, aval)
            return lambda environment: make(sharding, {r: environment[v] for r, v in value_of.items()}, aval)

        def parts() -> dict[int, jax.Array]:
            value = np.asarray(result.value, aval.dtype)
            if aval.weak_type and value.ndim == 0:
                value = value.item()
            return {rank: place(value, sharding.local_sharding(rank)) for rank in local}

        return lambda _: make(sharding, parts(), aval)

    @property
    def in_shardings(self) -> Any:
        """The `MpmdSharding` of each argument: a tree like `(args, kwargs)`; without ranks if nothing reads it."""
        return self._plan.in_shardings

    @property
    def read_here(self) -> Any:
        """For each argument, whether a rank of this process reads it: a tree like `in_shardings`.

        If it is False, a `jax.ShapeDtypeStruct` may replace the argument's value.
        """
        local = set(self.mpmd_mesh.local_ranks)
        read = [not local.isdisjoint(ranks) for ranks in self.program.arguments[len(self._plan.consts) :]]
        return jax.tree_util.tree_unflatten(self._signature.tree, read)

    @property
    def out_shardings(self) -> Any:
        """The `MpmdSharding` of each result, as a tree like the results."""
        shardings = map(self._result_sharding, range(len(self.program.results)))
        return jax.tree_util.tree_unflatten(self._signature.out_tree, shardings)

    def as_text(self) -> str:
        """Return the program as it runs: a line for each task, transfer and deletion."""
        return self.program.as_text()

    @cached_property
    def stages(self) -> tuple[StageSummary, ...]:
        """A summary of each stage of the first loop."""
        return summarise_stages(self._built, self.mpmd_mesh)

    @property
    def executables(self) -> Executables:
        """The executable of each task, and the partition of each value."""
        return self._executables

    @cached_property
    def argument_paths(self) -> tuple[str, ...]:
        """The path of each argument of the program: of captured constants, then of a call's leaves."""
        return ("",) * len(self._plan.consts) + tuple(leaf.path for leaf in self._signature.leaves)

    @cached_property
    def result_paths(self) -> tuple[str, ...]:
        """The path of each result."""
        results = jax.tree_util.tree_unflatten(self._signature.out_tree, range(len(self.program.results)))
        return tuple(jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(results))

    def memory_analysis(self) -> tuple[MemoryAnalysis, ...]:
        """Return the bytes that each rank holds: its arguments, and the peak above them in one step.

        With several processes and the transport "transfer", a loop of forwards also holds the values of up to 4
        transfers to the next process: the sender runs that far ahead.
        """
        return analyse_memory(self._executables)
