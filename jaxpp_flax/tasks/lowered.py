"""An mpmd function on its ranks, and the compiled function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.engine.compiled import Compiled, array_result
from jaxpp_flax.engine.placed import Placed

__all__ = ["CompiledMpmdFun", "LoweredMpmdFun"]


class CompiledMpmdFun(Compiled):
    """A compiled mpmd function, for arguments of the structure and types for which it was lowered."""

    def __init__(self, lowered: LoweredMpmdFun) -> None:
        self._lowered, executables = lowered, lowered.executables
        types = [atom.aval for atom in lowered.outputs]
        results = list(map(array_result, executables.program.results, lowered.result_shardings, types))
        super().__init__(executables, lowered.signature, lowered.constants, results)

    @property
    def tasks(self) -> Mapping[str, Any]:
        """The executable of each task of this process's ranks (`jax.stages.Compiled`), by `"name on rank 0"`."""
        return {
            f"{task.name} on rank {task.rank}": executable
            for task, executable in zip(self.program.tasks, self.executables.tasks, strict=True)
            if executable is not None
        }

    def as_text(self, rank: int | None = None) -> str:
        """See `LoweredMpmdFun.as_text`."""
        return self._lowered.as_text(rank)


@dataclass(frozen=True, eq=False, kw_only=True)
class LoweredMpmdFun(Placed[CompiledMpmdFun]):
    """An mpmd function as one program for each rank; `compile()` makes it run. A call compiles it first.

    `in_shardings` and `out_shardings` are trees like the arguments and like the results; `out_shape` holds the types of
    the results, with their shardings.
    """

    argument_shardings: Sequence[NamedSharding]
    result_shardings: Sequence[NamedSharding | None]

    @property
    def mpmd_mesh(self) -> MpmdMesh:
        """The ranks."""
        return self.compiler.mesh

    @property
    def in_shardings(self) -> Any:
        """The sharding of each argument, as a tuple of trees."""
        args, _ = jax.tree_util.tree_unflatten(self.signature.tree, self.argument_shardings)
        return args

    @property
    def out_shardings(self) -> Any:
        """The sharding of each result; None for a constant."""
        return jax.tree_util.tree_unflatten(self.signature.out_tree, self.result_shardings)

    @property
    def out_shape(self) -> Any:
        """The type of each result, as `jax.ShapeDtypeStruct`s with shardings."""
        structs = [
            jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype, sharding=sharding)
            for atom, sharding in zip(self.outputs, self.result_shardings, strict=True)
        ]
        return jax.tree_util.tree_unflatten(self.signature.out_tree, structs)

    @property
    def used_inputs(self) -> Any:
        """For each argument, whether a rank of this process reads it: a tree like `in_shardings`."""
        args, _ = jax.tree_util.tree_unflatten(self.signature.tree, self.read_here)
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
        return self.compiled

    def _compile(self) -> CompiledMpmdFun:
        return CompiledMpmdFun(self)

    def __call__(self, *args: Any) -> Any:
        """Compile the function at the first call, and run it."""
        return self.compiled(*args)
