"""A partitioned program, and a compiled program."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxpp_flax.engine.arrays.ambient_mesh import context_mesh
from jaxpp_flax.engine.arrays.placing import place
from jaxpp_flax.engine.binding import Binding, wanted_inputs
from jaxpp_flax.engine.runtime.executables import Executables, TaskCompiler, compile_program
from jaxpp_flax.engine.runtime.fetching import Wanted
from jaxpp_flax.engine.runtime.instruction_loop import Runtime
from jaxpp_flax.engine.runtime.startup import SharedSpecs, compare_programs, compare_values, start
from jaxpp_flax.engine.runtime.transport.connection import DistributedProgram
from jaxpp_flax.engine.signature import Signature
from jaxpp_flax.engine.tracing.ir import Constant, memory_kind_of
from jaxpp_flax.mpmd.config import Topology
from jaxpp_flax.mpmd.partitioning.build import Built
from jaxpp_flax.mpmd.shardings import check_within
from jaxpp_flax.mpmd.text import as_text

__all__ = ["FunctionMeshAssignment", "FunctionNamedShardings", "MpmdCompiled", "MpmdLowered"]


class FunctionNamedShardings:
    """`input_specs` and `output_specs`: trees of `NamedSharding`s, each over the mesh of its leaf.

    If XLA chooses the partition of results, reading `output_specs` compiles the program.
    """

    def __init__(self, lowered: MpmdLowered) -> None:
        self._lowered = lowered

    @property
    def input_specs(self) -> Any:
        """The shardings of the arguments, as a tuple."""
        return self._lowered.input_shardings

    @property
    def output_specs(self) -> Any:
        """The shardings of the results."""
        return self._lowered.output_shardings


@dataclass(frozen=True)
class FunctionMeshAssignment:
    """Names of meshes: a tree for the arguments, and one for the results."""

    input_meshes: Any
    output_meshes: Any


class MpmdLowered:
    """A function partitioned into programs for the meshes of a topology; `compile()` makes it run."""

    def __init__(
        self,
        built: Built,
        signature: Signature,
        topology: Topology,
        out_specs: Sequence[PartitionSpec | None],
        constants: tuple[Any, ...],
        compiler: TaskCompiler[Topology],
    ) -> None:
        self.built, self.topology, self._compiler = built, topology, compiler
        self.signature, self._out_specs, self._constants = signature, out_specs, constants
        placement, names = built.placement, topology.names
        self._homes = [ranks[0] for ranks in placement.arguments[len(constants) :]]
        for leaf, home in zip(signature.leaves, self._homes, strict=True):
            check_within(leaf.spec, topology.unstack[home], f"argument{leaf.path}", names[home])
        for position, (spec, rank) in enumerate(zip(out_specs, placement.results, strict=True)):
            check_within(spec, topology.unstack[rank], f"result {position}", names[rank])
        self._specs = signature.specs(len(constants))

    @property
    def name(self) -> str:
        """The function's name."""
        return self.signature.function

    @property
    def function_named_shardings(self) -> FunctionNamedShardings:
        """The shardings of arguments and results on their meshes, for `jax.device_put`."""
        return FunctionNamedShardings(self)

    @property
    def function_mesh_assignment(self) -> FunctionMeshAssignment:
        """The names of the meshes of arguments and results."""
        names = self.topology.names
        results = [names[rank] for rank in self.built.placement.results]
        return FunctionMeshAssignment(
            self._like_arguments([names[home] for home in self._homes]),
            jax.tree_util.tree_unflatten(self.signature.out_tree, results),
        )

    def _like_arguments(self, leaves: Sequence[Any]) -> Any:
        args, _ = jax.tree_util.tree_unflatten(self.signature.tree, leaves)
        return args

    @property
    def input_shardings(self) -> Any:
        """See `function_named_shardings`."""
        places = zip(self._wanted[len(self._constants) :], self._homes, strict=True)
        return self._like_arguments([wanted.on(home) for wanted, home in places])

    @cached_property
    def _wanted(self) -> list[Wanted]:
        """The ranks and the shardings with which the program reads its constants and arguments."""
        avals = [value.aval for value in self.built.step.inputs]
        return wanted_inputs(self.topology, self.built.placement.arguments, self._specs, self.signature, avals)

    @property
    def output_shardings(self) -> Any:
        """See `function_named_shardings`."""
        return jax.tree_util.tree_unflatten(self.signature.out_tree, self._result_shardings)

    @property
    def _result_shardings(self) -> list[NamedSharding]:
        placed = zip(self.built.placement.results, self._executables.out_specs, self.built.step.outputs, strict=True)
        return [
            NamedSharding(self.topology.unstack[rank], spec or PartitionSpec(), memory_kind=memory_kind_of(atom.aval))
            for rank, spec, atom in placed
        ]

    @property
    def transferred_bytes(self) -> int:
        """The bytes that one call sends between meshes."""
        return self.built.placement.transferred

    def compile(self) -> MpmdCompiled:
        """Compile each distinct fragment once for each mesh that runs it; a second call returns the same program.

        With several processes, each compiles the fragments of its own meshes, and all of them call this.

        Raises:
          ValueError: with several processes, if no mesh has a device of this one.
          ProgramMismatchError: with several processes, if their programs, meshes or settings differ.
          ValuesMismatchError: with several processes, if the arrays that the function closes over differ.
        """
        return self._compiled

    @cached_property
    def _compiled(self) -> MpmdCompiled:
        distributed = self.distributed
        runtime = Runtime(self._executables.program, self._executables, self.topology, distributed)
        compiled = MpmdCompiled(self, runtime, self._bind())
        if distributed is not None:
            constants = {f"constant {i}, {jax.typeof(c)}": c for i, c in enumerate(self._constants)}
            start(distributed, runtime.parcels, constants)
        return compiled

    def _bind(self) -> Binding:
        program, distributed = self._executables.program, self.distributed
        avals = [atom.aval for atom in self.built.step.outputs]
        results = [_result(*found) for found in zip(program.results, self._result_shardings, avals, strict=True)]
        return Binding(program, self.signature, self._constants, self._wanted, results, distributed)

    @property
    def distributed(self) -> DistributedProgram | None:
        """The program's names and connection among several processes; None if all meshes are of this process."""
        return self._connected[0]

    @cached_property
    def _connected(self) -> tuple[DistributedProgram, SharedSpecs] | tuple[None, None]:
        return compare_programs(self.topology, self.built.program, self._specs, self._out_specs)

    @cached_property
    def _executables(self) -> Executables:
        inputs, shared = self.built.step.inputs, self._connected[1]
        with context_mesh(None):  # as in `MpmdWrapped.lower`
            return compile_program(
                self.built.program,
                self._compiler,
                self._specs,
                self._out_specs,
                [value.aval for value in inputs],
                self.topology.local_ranks,
                shared=shared,
            )

    def as_text(self, dialect: str = "mpmd") -> str:
        """Return the program as text: `"mpmd"` (fragments and their equations, transfers) or `"program"` (slots).

        Raises:
          ValueError: for any other dialect.
        """
        if dialect == "mpmd":
            return as_text(self.built, self.topology.names, self.signature.function, self._specs)
        if dialect == "program":
            return self._executables.program.as_text()
        raise ValueError(f"as_text knows no dialect {dialect!r}; use 'mpmd' or 'program'.")


class MpmdCompiled:
    """A compiled program; it takes arguments of the structure and types for which it was lowered."""

    def __init__(self, lowered: MpmdLowered, runtime: Runtime, binding: Binding) -> None:
        self._lowered, self._runtime, self._binding = lowered, runtime, binding

    @property
    def input_shardings(self) -> Any:
        """The shardings of the arguments, as a tuple."""
        return self._lowered.input_shardings

    @property
    def output_shardings(self) -> Any:
        """The shardings of the results."""
        return self._lowered.output_shardings

    def as_text(self, dialect: str = "mpmd") -> str:
        """See `MpmdLowered.as_text`."""
        return self._lowered.as_text(dialect)

    def __call__(self, *args: Any) -> Any:
        """Run the program; arguments on other devices are copied first.

        Raises:
          TypeError: if an argument differs in structure or type from the lowered program.
          RuntimeError: if an argument was donated to an earlier call.
        """
        return self.run(self._lowered.signature.leaves_of(args, {}))

    def run(self, leaves: Sequence[Any]) -> Any:
        """Run on flat arguments whose types fit the program; the types are not checked."""
        distributed, binding = self._lowered.distributed, self._binding
        if distributed is not None and not binding.calls:
            compare_values(distributed, "the arguments", binding.in_several_processes(leaves))
        environment = binding.environment(leaves)
        self._runtime.run(environment)
        return binding.collect(environment)


def _result(
    result: Mapping[int, int] | Constant, sharding: NamedSharding, aval: Any
) -> Callable[[list[Any]], jax.Array]:
    """Return a function that makes a result from the slots after a run.

    On a mesh of other processes the result has no shards here. A returned constant has no sharding of its own: it gets
    `sharding`, the requested one.
    """
    if all(device.process_index != jax.process_index() for device in sharding.device_set):
        shape, dtype = tuple(aval.shape), aval.dtype
        return lambda _: jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=dtype)
    if isinstance(result, Constant):
        return lambda _: place(jax.numpy.asarray(result.value, result.aval.dtype), sharding)
    return operator.itemgetter(next(iter(result.values())))
