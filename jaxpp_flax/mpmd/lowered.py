"""A program that is partitioned, and one that is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import keystr

from jaxpp_flax.engine.arrays.ambient_mesh import context_mesh
from jaxpp_flax.engine.runtime.debug_switches import kinds_looked_for, looking_away
from jaxpp_flax.engine.runtime.executables import Executables, TaskCompiler, compile_program
from jaxpp_flax.engine.runtime.instruction_loop import Runtime
from jaxpp_flax.engine.tracing.ir import Constant, memory_kind_of
from jaxpp_flax.mpmd.partitioning.build import Built
from jaxpp_flax.mpmd.shardings import within
from jaxpp_flax.mpmd.text import as_text
from jaxpp_flax.mpmd.topology import Topology

__all__ = ["FunctionMeshAssignment", "FunctionNamedShardings", "MpmdCompiled", "MpmdLowered", "Signature"]


@dataclass(frozen=True)
class Signature:
    """What a program takes and returns: the trees, and the types and specs of the leaves."""

    name: str
    in_tree: Any
    out_tree: Any
    types: tuple[tuple[tuple[int, ...], Any], ...]
    paths: tuple[str, ...]
    in_specs: tuple[PartitionSpec, ...]
    out_specs: tuple[PartitionSpec | None, ...]
    donated: tuple[bool, ...]


class FunctionNamedShardings:
    """`input_specs` and `output_specs`: a tree of `NamedSharding`s, each over the mesh where the leaf lives.

    Where XLA chooses how results are partitioned, reading `output_specs` compiles the program.
    """

    def __init__(self, lowered: MpmdLowered) -> None:
        self._lowered = lowered

    @property
    def input_specs(self) -> Any:
        """Of the arguments, as a tuple."""
        return self._lowered.input_shardings

    @property
    def output_specs(self) -> Any:
        """Of the results."""
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
        constants: tuple[Any, ...],
        compiler: TaskCompiler[Topology],
    ) -> None:
        self.built, self.topology, self._compiler = built, topology, compiler
        self.signature, self._constants = signature, constants
        count = len(constants)
        self._homes = [topology.unstack[ranks[0]] for ranks in built.placement.arguments[count:]]
        names = [topology.names[ranks[0]] for ranks in built.placement.arguments[count:]]
        self._in_specs = [
            within(spec, mesh, f"argument{path}", name)
            for spec, mesh, path, name in zip(signature.in_specs, self._homes, signature.paths, names, strict=True)
        ]
        for position, (spec, rank) in enumerate(zip(signature.out_specs, built.placement.results, strict=True)):
            within(spec, topology.unstack[rank], f"result {position}", topology.names[rank])

    @property
    def name(self) -> str:
        """The function's name."""
        return self.signature.name

    @property
    def function_named_shardings(self) -> FunctionNamedShardings:
        """The shardings of arguments and results, on the meshes where they live: what `jax.device_put` takes."""
        return FunctionNamedShardings(self)

    @property
    def function_mesh_assignment(self) -> FunctionMeshAssignment:
        """The names of the meshes where arguments and results live."""
        names, placement = self.topology.names, self.built.placement
        inputs = [names[ranks[0]] for ranks in placement.arguments[len(self._constants) :]]
        return FunctionMeshAssignment(
            jax.tree_util.tree_unflatten(self.signature.in_tree, inputs),
            jax.tree_util.tree_unflatten(self.signature.out_tree, [names[rank] for rank in placement.results]),
        )

    @property
    def input_shardings(self) -> Any:
        """See `function_named_shardings`."""
        values = self.built.step.inputs[len(self._constants) :]
        leaves = [
            NamedSharding(mesh, spec, memory_kind=memory_kind_of(value.aval))
            for mesh, spec, value in zip(self._homes, self._in_specs, values, strict=True)
        ]
        return jax.tree_util.tree_unflatten(self.signature.in_tree, leaves)

    @property
    def output_shardings(self) -> Any:
        """See `function_named_shardings`."""
        found = self._executables.out_specs
        leaves = [
            NamedSharding(self.topology.unstack[rank], spec or PartitionSpec(), memory_kind=memory_kind_of(atom.aval))
            for rank, spec, atom in zip(self.built.placement.results, found, self.built.step.outputs, strict=True)
        ]
        return jax.tree_util.tree_unflatten(self.signature.out_tree, leaves)

    @property
    def transferred_bytes(self) -> int:
        """Bytes that one call sends between meshes."""
        return self.built.placement.transferred

    def compile(self) -> MpmdCompiled:
        """Compile each distinct fragment once for each mesh that runs it."""
        return MpmdCompiled(self, self._executables, self._constants)

    @cached_property
    def _executables(self) -> Executables:
        inputs = self.built.step.inputs
        with context_mesh(None):  # as in `MpmdWrapped.lower`
            return compile_program(
                self.built.program,
                self._compiler,
                [*(PartitionSpec() for _ in self._constants), *self._in_specs],
                self.signature.out_specs,
                [value.aval for value in inputs],
                self.topology.local_ranks,
            )

    def as_text(self, dialect: str = "mpmd") -> str:
        """The program as text: `"mpmd"` (fragments, transfers, each fragment's equations) or `"program"` (slots).

        Raises:
          ValueError: for another dialect.
        """
        if dialect == "mpmd":
            specs = [*(PartitionSpec() for _ in self._constants), *self._in_specs]
            return as_text(self.built, self.topology.names, self.signature.name, specs)
        if dialect == "program":
            return self._executables.program.as_text()
        raise ValueError(f"as_text knows no dialect {dialect!r}; use 'mpmd' or 'program'.")


class MpmdCompiled:
    """A compiled program; call it with arguments of the structure and types it was lowered for."""

    def __init__(self, lowered: MpmdLowered, executables: Executables, constants: Sequence[Any]) -> None:
        self._lowered, self._signature = lowered, lowered.signature
        program = self._program = executables.program
        meshes = lowered.topology.unstack
        self._runtime = Runtime(program, executables, lowered.topology)
        self._constants = [
            (slot, jax.device_put(value, NamedSharding(meshes[rank], PartitionSpec(), memory_kind=_memory(value))))
            for value, ranks in zip(constants, program.arguments, strict=False)
            for rank, slot in ranks.items()
        ]
        shardings = jax.tree.leaves(lowered.input_shardings)
        self._targets = [
            (next(iter(ranks.values())), sharding)
            for ranks, sharding in zip(program.arguments[len(constants) :], shardings, strict=True)
        ]

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
        """Run the program. Arguments that are not where it wants them are copied there first.

        Raises:
          TypeError: if the arguments differ from those it was lowered for.
          RuntimeError: if an argument was donated to an earlier call.
        """
        leaves, tree = jax.tree_util.tree_flatten(args)
        self._check(leaves, tree, args)
        environment: list[Any] = [None] * self._program.num_slots
        for slot, constant in self._constants:
            environment[slot] = constant
        keep = bool(kinds_looked_for())  # then `jax.jit` donates nothing
        with looking_away():
            for leaf, (slot, sharding), donated in zip(leaves, self._targets, self._signature.donated, strict=True):
                environment[slot] = _placed(leaf, sharding, donated and not keep)
        self._runtime.run(environment)
        results = [
            environment[next(iter(result.values()))] if isinstance(result, dict) else self._constant(position, result)
            for position, result in enumerate(self._program.results)
        ]
        return jax.tree_util.tree_unflatten(self._signature.out_tree, results)

    def _constant(self, position: int, constant: Constant) -> jax.Array:
        rank = self._lowered.built.placement.results[position]
        value = jax.numpy.asarray(constant.value, constant.aval.dtype)
        spec = self._signature.out_specs[position] or PartitionSpec()
        return jax.device_put(value, NamedSharding(self._lowered.topology.unstack[rank], spec))

    def _check(self, leaves: Sequence[Any], tree: Any, args: Any) -> None:
        signature = self._signature
        if tree != signature.in_tree:
            got = {keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(args)}
            wanted = set(signature.paths)
            parts = [f"missing argument{p}" for p in sorted(wanted - got)[:5]]
            parts += [f"unexpected argument{p}" for p in sorted(got - wanted)[:5]]
            raise TypeError(
                f"{signature.name} was called with arguments of another structure than it was lowered for: "
                f"{', '.join(parts) or 'the containers differ'}. Lower it again for these."
            )
        wrong: list[str] = []
        for leaf, (shape, dtype), path in zip(leaves, signature.types, signature.paths, strict=True):
            aval = jax.typeof(leaf)
            if (aval.shape, aval.dtype) != (shape, dtype):
                wrong.append(f"argument{path}: got {aval.dtype}{list(aval.shape)}, lowered for {dtype}{list(shape)}")
            elif isinstance(leaf, jax.Array) and leaf.is_deleted():
                raise RuntimeError(
                    f"argument{path} of {signature.name} has been deleted: it was donated to an earlier call. Pass "
                    "what that call returned in its place."
                )
        if wrong:
            more = f"; and {len(wrong) - 10} more" if len(wrong) > 10 else ""
            raise TypeError(
                f"{signature.name} was called with arguments of other types than it was lowered for: "
                f"{'; '.join(wrong[:10])}{more}. Lower it again for these."
            )


def _memory(value: Any) -> str | None:
    return memory_kind_of(jax.typeof(value))


def _placed(leaf: Any, sharding: NamedSharding, donated: bool) -> Any:
    if isinstance(leaf, jax.Array) and leaf.sharding == sharding:
        return leaf
    placed = jax.device_put(leaf, sharding)
    # As under jax.jit, a donated argument is gone after the call. A copy on its own devices may share its memory.
    if donated and isinstance(leaf, jax.Array) and leaf.devices().isdisjoint(sharding.device_set):
        leaf.delete()
    return placed
