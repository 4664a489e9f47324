"""A partitioned program, and a compiled program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpp_flax.engine.compiled import Compiled, array_result
from jaxpp_flax.engine.placed import Placed
from jaxpp_flax.engine.runtime.task_compiler import TaskCompiler
from jaxpp_flax.engine.summary import MemoryAnalysis, analyse_memory, sum_costs
from jaxpp_flax.engine.tracing.ir import memory_kind_of
from jaxpp_flax.mpmd.config import MpmdConfig
from jaxpp_flax.mpmd.options import options_of_ranks
from jaxpp_flax.mpmd.partitioning.build import Built
from jaxpp_flax.mpmd.shardings import check_home, check_within
from jaxpp_flax.mpmd.types import FunctionIOMeshAssignment, FunctionNamedShardings

__all__ = ["MpmdCompiled", "MpmdLowered"]


@dataclass(frozen=True, eq=False, kw_only=True)
class MpmdLowered(Placed["MpmdCompiled"]):
    """A function partitioned into programs for the meshes of a topology; `compile()` makes it run."""

    built: Built
    config: MpmdConfig
    out_info: Any

    def __post_init__(self) -> None:
        meshes = self.config.meshes
        for leaf, home in zip(self.signature.leaves, self._homes, strict=True):
            check_within(leaf.spec, meshes, home, f"argument{leaf.path}")
        for position, (spec, rank) in enumerate(zip(self.result_specs, self.built.placed.results, strict=True)):
            check_within(spec, meshes, rank, f"result {position}")

    @property
    def name(self) -> str:
        """The function's name."""
        return self.signature.function

    @property
    def topology(self) -> dict[str, Mesh]:
        """The named meshes."""
        return dict(self.config.topology)

    @property
    def args_info(self) -> Any:
        """A `jax.ShapeDtypeStruct` for each argument, with its sharding, as a tuple."""
        leaves = [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=leaf.weak_type)
            for leaf, sharding in zip(self.signature.leaves, jax.tree.leaves(self.input_shardings), strict=True)
        ]
        return self._like_arguments(leaves)

    @property
    def function_named_shardings(self) -> FunctionNamedShardings:
        """The shardings of arguments and results on their meshes, for `jax.device_put`."""
        return FunctionNamedShardings(self)

    @property
    def function_mesh_assignment(self) -> FunctionIOMeshAssignment:
        """The names of the meshes of arguments and results."""
        names = self.config.meshes.names
        results = [names[rank] for rank in self.built.placed.results]
        return FunctionIOMeshAssignment(
            self._like_arguments([names[home] for home in self._homes]),
            jax.tree_util.tree_unflatten(self.signature.out_tree, results),
        )

    @property
    def input_shardings(self) -> Any:
        """See `function_named_shardings`."""
        meshes, values = self.config.meshes.unstack, self.inputs[len(self.constants) :]
        places = zip(self._homes, self.signature.leaves, values, strict=True)
        return self._like_arguments(
            [NamedSharding(meshes[home], leaf.spec, memory_kind=memory_kind_of(v.aval)) for home, leaf, v in places]
        )

    @property
    def output_shardings(self) -> Any:
        """See `function_named_shardings`."""
        return jax.tree_util.tree_unflatten(self.signature.out_tree, self._result_shardings)

    @property
    def transferred_bytes(self) -> int:
        """The bytes that one call sends between meshes."""
        return self.built.placed.transferred

    def _like_arguments(self, leaves: Sequence[Any]) -> Any:
        args, _ = jax.tree_util.tree_unflatten(self.signature.tree, leaves)
        return args

    @cached_property
    def _homes(self) -> list[int]:
        """The rank of each argument."""
        return [ranks[0] for ranks in self.built.placed.arguments[len(self.constants) :]]

    @property
    def _result_shardings(self) -> list[NamedSharding]:
        ranks, meshes = self.built.placed.results, self.config.meshes.unstack
        return [
            NamedSharding(meshes[rank], spec or PartitionSpec(), memory_kind=memory_kind_of(atom.aval))
            for rank, spec, atom in zip(ranks, self.executables.out_specs, self.outputs, strict=True)
        ]

    def compile(self, compiler_options: Mapping[str, Any] | None = None) -> MpmdCompiled:
        """Compile each distinct fragment once for each mesh that runs it; a second call returns the same program.

        With several processes, each compiles the fragments of its own meshes, and all of them call this.

        Args:
          compiler_options: XLA's options, as in `jax.jit`: one mapping for all meshes, or a mapping from names of
            meshes to options. Meshes that are not named get the default options.

        Raises:
          TypeError: if some values of `compiler_options` are mappings and others are not.
          ValueError: if `compiler_options` names a mesh that the topology lacks; with several processes, if no mesh has
            a device of this process.
          ProgramMismatchError: if the processes have different programs, meshes or settings.
          ValuesMismatchError: if the arrays that the function closes over differ between the processes.
        """
        if not compiler_options:
            return self.compiled
        options = options_of_ranks(compiler_options, self.config.meshes.names)
        return replace(self, compiler=TaskCompiler(self.config.meshes, rank_options=options)).compiled

    def _compile(self) -> MpmdCompiled:
        types = [atom.aval for atom in self.outputs]
        results = list(map(array_result, self.executables.program.results, self._result_shardings, types))
        return MpmdCompiled(self, results)

    def as_text(self, dialect: str | None = None) -> str:
        """Return the program as text: a line for each run of a fragment, transfer and deletion, and each fragment.

        Raises:
          ValueError: for a dialect other than "mpmd".
        """
        if dialect in (None, "mpmd"):
            return self.built.program.as_text()
        raise ValueError(
            f"as_text knows no dialect {dialect!r}; use 'mpmd'. The partitioner works on jaxprs and its "
            "fragments run as XLA programs of their own, so there is no MLIR module of the whole program."
        )


class MpmdCompiled(Compiled):
    """A compiled program; it takes arguments of the structure and types for which it was lowered.

    A call copies host arrays and uncommitted arrays to the mesh on which the program reads them. It raises a
    `ValueError` if an array was placed on another mesh than its own.
    """

    def __init__(self, lowered: MpmdLowered, results: Sequence[Callable[[list[Any]], Any]]) -> None:
        super().__init__(lowered.executables, lowered.signature, lowered.constants, results)
        self._lowered = lowered
        self._ranks = lowered.program.arguments[len(lowered.constants) :]  # the meshes that read each argument

    @property
    def input_shardings(self) -> Any:
        """The shardings of the arguments, as a tuple."""
        return self._lowered.input_shardings

    @property
    def output_shardings(self) -> Any:
        """The shardings of the results."""
        return self._lowered.output_shardings

    @property
    def peak_memory_bytes(self) -> int:
        """The most bytes that one device holds in a call: arguments, values and the largest workspace."""
        by_mesh = self.memory_analysis().values()
        return max(mesh.argument_bytes + mesh.peak_bytes + mesh.temp_bytes for mesh in by_mesh)

    def as_text(self, dialect: str | None = None) -> str:
        """See `MpmdLowered.as_text`."""
        return self._lowered.as_text(dialect)

    def cost_analysis(self) -> dict[str, dict[str, float]]:
        """Return, for each mesh, XLA's costs of one call, added up over the mesh's fragments: "flops" and others."""
        return dict(zip(self._lowered.topology, sum_costs(self._lowered.executables), strict=True))

    def memory_analysis(self) -> dict[str, MemoryAnalysis]:
        """Return, for each mesh, the bytes on each of its devices: arguments, and the peak above them in one call."""
        return dict(zip(self._lowered.topology, analyse_memory(self._lowered.executables), strict=True))

    def run(self, leaves: Sequence[Any]) -> Any:
        """Run on flat arguments whose types fit the program; the types are not checked.

        Raises:
          ValueError: if an array was placed on another mesh than its own.
        """
        lowered = self._lowered
        for leaf, argument, ranks in zip(leaves, lowered.signature.leaves, self._ranks, strict=True):
            check_home(leaf, argument.path, lowered.name, lowered.config.meshes, ranks)
        return super().run(leaves)
