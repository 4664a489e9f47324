"""A step with loops over microbatches, on its ranks and compiled: its results are `MpmdArray`s."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, ClassVar

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray, MpmdSharding
from jaxpp_flax.engine.arrays.placing import place
from jaxpp_flax.engine.compiled import Compiled
from jaxpp_flax.engine.passes.loop.loop import LoweredLoop
from jaxpp_flax.engine.placed import Placed
from jaxpp_flax.engine.runtime.profile import TaskTiming
from jaxpp_flax.engine.runtime.task_compiler import TaskCompiler
from jaxpp_flax.engine.summary import MemoryAnalysis, StageSummary, analyse_memory, summarise_stages
from jaxpp_flax.engine.tracing.ir import memory_kind_of

__all__ = ["CompiledPipeline", "PlacedPipeline"]


class CompiledPipeline(Compiled):
    """A step compiled for one signature: it takes only arguments of this structure, these shapes and dtypes."""

    def __init__(self, placed: PlacedPipeline) -> None:
        self.placed, self.mpmd_mesh = placed, placed.mpmd_mesh
        self._shardings: dict[Any, MpmdSharding] = {}  # of results; those that lie alike share one
        executables, signature = placed.executables, placed.signature
        self.program, self.executables = executables.program, executables
        results = [self._result(position) for position in range(len(self.program.results))]
        super().__init__(executables, signature, placed.constants, results)

    @property
    def compiler(self) -> TaskCompiler[MpmdMesh]:
        """The compiler of all programs of the step's function; it counts them."""
        return self.placed.compiler

    def profile(self, *args: Any, **kwargs: Any) -> tuple[Any, list[TaskTiming]]:
        """Run one real step and measure it: return the results, and the times of each task of the loop on its rank.

        The step waits for each task and each transfer, so it is slower than others. The start times are then computed
        from the measured durations: a task starts when its rank is free and its inputs have arrived.

        With several processes, each one measures its own ranks, and all return the times of all ranks.

        Raises:
          FloatingPointError: if `jax.debug_nans` or `jax.debug_infs` is set, and a result has such a value.
        """
        return self._measure(self._signature.leaves_of(args, kwargs))

    def _result_sharding(self, position: int) -> MpmdSharding:
        result, atom = self.program.results[position], self.placed.outputs[position]
        if isinstance(result, dict):
            ranks = set(result)
        else:  # a constant costs no transfer, so every process gets it
            everywhere = range(self.mpmd_mesh.mpmd_dim)
            ranks = self.placed.idle_ranks if self.executables.distributed is None else everywhere
        spec = self.executables.out_specs[position] or PartitionSpec()
        memory = memory_kind_of(atom.aval)
        key = frozenset(ranks), spec, memory
        if key not in self._shardings:
            self._shardings[key] = MpmdSharding(self.mpmd_mesh, ranks, spec, memory)
        return self._shardings[key]

    def _result(self, position: int) -> Callable[[list[Any]], MpmdArray]:
        """Return a function that makes a result from the environment after a run."""
        result, aval = self.program.results[position], self.placed.outputs[position].aval
        sharding = self._result_sharding(position)
        local = [rank for rank in sharding.ranks if self.mpmd_mesh.is_local(rank)]

        make = MpmdArray._from_parts  # pyright: ignore[reportPrivateUsage]
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
        return self.placed.in_shardings

    @property
    def read_here(self) -> Any:
        """For each argument, whether a rank of this process reads it: a tree like `in_shardings`.

        If it is False, a `jax.ShapeDtypeStruct` may replace the argument's value.
        """
        return jax.tree_util.tree_unflatten(self._signature.tree, self.placed.read_here)

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
        """A summary of each stage of the last loop: an earlier one computes what the last one trains on."""
        return summarise_stages(self.placed.loops[-1], self.mpmd_mesh)

    @cached_property
    def argument_paths(self) -> tuple[str, ...]:
        """The path of each argument of the program: of captured constants, then of a call's leaves."""
        return ("",) * len(self.placed.constants) + tuple(leaf.path for leaf in self._signature.leaves)

    @cached_property
    def result_paths(self) -> tuple[str, ...]:
        """The path of each result."""
        results = jax.tree_util.tree_unflatten(self._signature.out_tree, range(len(self.program.results)))
        return tuple(jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(results))

    def memory_analysis(self) -> tuple[MemoryAnalysis, ...]:
        """Return the bytes that each rank holds: its arguments, and the peak above them in one step."""
        return analyse_memory(self.executables)


@dataclass(frozen=True, eq=False, kw_only=True)
class PlacedPipeline(Placed[CompiledPipeline]):
    """A step on its ranks. `idle_ranks` have the results that every rank can compute by itself."""

    _compiled_type: ClassVar[type[CompiledPipeline]] = CompiledPipeline

    loops: tuple[LoweredLoop, ...]
    idle_ranks: frozenset[int]

    @property
    def mpmd_mesh(self) -> MpmdMesh:
        """The ranks."""
        return self.compiler.mesh

    @property
    def in_shardings(self) -> Any:
        """The `MpmdSharding` of each argument: a tree like `(args, kwargs)`; it has no ranks if nothing reads it."""
        sharding = cache(partial(MpmdSharding, self.mpmd_mesh))  # arguments that lie alike share one
        shardings = [
            sharding(frozenset(ranks), spec, memory_kind_of(value.aval))
            for ranks, spec, value in zip(self.program.arguments, self.in_specs, self.inputs, strict=True)
        ]
        return jax.tree_util.tree_unflatten(self.signature.tree, shardings[len(self.constants) :])

    def _compile(self) -> CompiledPipeline:
        return self._compiled_type(self)
