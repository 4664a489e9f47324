"""A lowered mpmd function, its programs, and the compiled function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.engine.bound_program import BoundProgram, array_result
from jaxpp_flax.engine.program.program import Program
from jaxpp_flax.engine.runtime.executables import compile_program
from jaxpp_flax.engine.runtime.task_compiler import TaskCompiler
from jaxpp_flax.engine.signature import Signature
from jaxpp_flax.engine.tracing.ir import Graph

__all__ = ["CompiledMpmdFun", "LoweredMpmdFun"]


class LoweredMpmdFun:
    """An mpmd function as one program for each rank; `compile()` makes it run. A call compiles it first.

    `in_shardings` and `out_shardings` are trees like the arguments and like the results; `out_shape` holds the types of
    the results, with their shardings.
    """

    def __init__(
        self,
        program: Program,
        graph: Graph,
        signature: Signature,
        mpmd_mesh: MpmdMesh,
        constants: tuple[Any, ...],
        in_shardings: Sequence[NamedSharding],
        out_shardings: Sequence[NamedSharding | None],
    ) -> None:
        self.program, self.signature, self.mpmd_mesh = program, signature, mpmd_mesh
        self.constants, self._in, self._out = constants, tuple(in_shardings), tuple(out_shardings)
        self.graph = graph

    @property
    def in_shardings(self) -> Any:
        """The sharding of each argument, as a tuple of trees."""
        args, _ = jax.tree_util.tree_unflatten(self.signature.tree, self._in)
        return args

    @property
    def out_shardings(self) -> Any:
        """The sharding of each result; None for a constant."""
        return jax.tree_util.tree_unflatten(self.signature.out_tree, self._out)

    @property
    def out_shape(self) -> Any:
        """The type of each result, as `jax.ShapeDtypeStruct`s with shardings."""
        structs = [
            jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype, sharding=sharding)
            for atom, sharding in zip(self.graph.outputs, self._out, strict=True)
        ]
        return jax.tree_util.tree_unflatten(self.signature.out_tree, structs)

    @property
    def used_inputs(self) -> Any:
        """For each argument, whether a rank of this process reads it: a tree like `in_shardings`."""
        local = set(self.mpmd_mesh.local_ranks)
        flags = [not local.isdisjoint(ranks) for ranks in self.program.arguments[len(self.constants) :]]
        args, _ = jax.tree_util.tree_unflatten(self.signature.tree, flags)
        return args

    def as_text(self, rank: int | None = None) -> str:
        """Return the program as text, one line for each task, transfer and deletion: of one rank, or of all.

        Raises:
          ValueError: if there is no such rank.
        """
        text = self.program.as_text()
        if rank is None:
            return text
        wanted = f"rank {self.mpmd_mesh.check_rank(rank)}"
        return "\n".join(line for line in text.splitlines() if wanted in line.partition(":")[0].split(" -> "))

    def compile(self) -> CompiledMpmdFun:
        """Compile each distinct task of this process's ranks once; with several processes, all must call this."""
        return CompiledMpmdFun(self)

    @cached_property
    def _compiled(self) -> CompiledMpmdFun:
        return self.compile()

    def __call__(self, *args: Any) -> Any:
        """Compile the function at the first call, and run it."""
        return self._compiled(*args)


class CompiledMpmdFun:
    """A compiled mpmd function, for arguments of the structure and types for which it was lowered."""

    def __init__(self, lowered: LoweredMpmdFun) -> None:
        self._lowered = lowered
        program, signature, mesh = lowered.program, lowered.signature, lowered.mpmd_mesh
        constants = lowered.constants
        specs = signature.specs(len(constants))
        avals = [value.aval for value in lowered.graph.inputs]
        chosen: list[PartitionSpec | None] = [None] * len(program.results)
        self._executables = compile_program(program, TaskCompiler(mesh), specs, chosen, avals)
        out_avals = [atom.aval for atom in lowered.graph.outputs]
        results = list(map(array_result, program.results, lowered._out, out_avals))  # pyright: ignore[reportPrivateUsage]
        self._bound = BoundProgram(self._executables, signature, constants, results)

    def __call__(self, *args: Any) -> Any:
        """Run the function.

        Raises:
          TypeError: if an argument differs in structure or type from the lowered function's.
          RuntimeError: if an argument was donated to an earlier call.
        """
        return self.run(self._lowered.signature.leaves_of(args, {}))

    def run(self, leaves: Sequence[Any]) -> Any:
        """Run on flat arguments whose types fit; the types are not checked."""
        return self._bound.run(leaves)

    @property
    def tasks(self) -> Mapping[str, Any]:
        """The executable of each task of this process's ranks (`jax.stages.Compiled`), by `"name on rank 0"`."""
        program, found = self._executables.program, self._executables.tasks
        return {
            f"{task.name} on rank {task.rank}": executable
            for task, executable in zip(program.tasks, found, strict=True)
            if executable is not None
        }

    def as_text(self, rank: int | None = None) -> str:
        """See `LoweredMpmdFun.as_text`."""
        return self._lowered.as_text(rank)
