"""A compiled step: checks its arguments, places them, runs the program and wraps the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxpp_flax.engine.arrays.mesh import MpmdMesh, lies_alike
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray, MpmdSharding
from jaxpp_flax.engine.arrays.placing import place
from jaxpp_flax.engine.pipeline import Built
from jaxpp_flax.engine.program.listing import ProgramListing
from jaxpp_flax.engine.runtime.debug_switches import kinds_looked_for, looking_away
from jaxpp_flax.engine.runtime.executables import TaskCompiler, compile_program
from jaxpp_flax.engine.runtime.fetching import Wanted, bring, check_parts
from jaxpp_flax.engine.runtime.instruction_loop import Runtime
from jaxpp_flax.engine.runtime.profile import TaskTiming
from jaxpp_flax.engine.runtime.startup import compare_values, meet, start
from jaxpp_flax.engine.signature import Signature
from jaxpp_flax.engine.summary import MemoryAnalysis, StageSummary, analyse_memory, summarise_stages
from jaxpp_flax.engine.tracing.ir import Constant, memory_kind_of

__all__ = ["Compiled"]


@dataclass(frozen=True)
class _Target:
    """One of this process's ranks that reads an argument.

    `own_memory`: an earlier target has a device of it, and one of the two may give its buffer away.
    """

    slot: int
    rank: int
    sharding: NamedSharding
    own_memory: bool


@dataclass(frozen=True)
class _Argument:
    """Where an argument goes: its targets in this process, and all its ranks."""

    position: int
    targets: tuple[_Target, ...]
    wanted: Wanted
    donated: bool

    @cached_property
    def has_own_memory(self) -> bool:
        """Whether a target needs memory that no other one shares."""
        return any(target.own_memory for target in self.targets)


class Compiled:
    """A step compiled for one signature; call it with arguments of exactly that structure and type."""

    def __init__(
        self,
        built: Built,
        signature: Signature,
        consts: tuple[Any, ...],
        out_specs: Sequence[PartitionSpec | None],
        compiler: TaskCompiler[MpmdMesh],
    ) -> None:
        self._built, self._signature, self._compiler = built, signature, compiler
        mesh = self.mpmd_mesh = compiler.mesh
        program = built.program
        specs = [PartitionSpec()] * len(consts) + [leaf.spec for leaf in signature.leaves]
        # Every process reads what all of them get: it is whole on each device.
        out_specs = [
            spec if spec is not None or not for_all else PartitionSpec()
            for spec, for_all in zip(out_specs, built.placed.for_all, strict=True)
        ]
        across, shared = meet(mesh, program, specs, out_specs)
        avals = [value.aval for value in built.placed.inputs]
        self._executables = compile_program(program, compiler, specs, out_specs, avals, mesh.local_ranks, shared=shared)
        program = self.program = self._executables.program
        self._runtime = Runtime(program, self._executables, mesh, across)
        self._across, self._calls = across, 0
        names = [""] * len(consts) + [leaf.path for leaf in signature.leaves]
        # A later step may be given what this one returns, and give it away.
        returned = {slot for result in program.results if isinstance(result, dict) for slot in result.values()}
        given_away = (False,) * len(consts) + signature.donated
        wanted = [
            Wanted(mesh, tuple(ranks), spec, name, memory_kind_of(aval))
            for ranks, spec, name, aval in zip(program.arguments, specs, names, avals, strict=True)
        ]
        self._arguments = tuple(
            _Argument(
                position - len(consts),
                _targets(where, ranks, separate=donated or not returned.isdisjoint(ranks.values())),
                where,
                donated,
            )
            for position, (ranks, where, donated) in enumerate(zip(program.arguments, wanted, given_away, strict=True))
        )
        self._constants = [
            (target.slot, place(value, target.sharding, may_alias=False if target.own_memory else None))
            for value, argument in zip(consts, self._arguments[: len(consts)], strict=True)
            for target in argument.targets
        ]
        self._arguments = self._arguments[len(consts) :]
        self._results = [self._bind_result(i) for i in range(len(program.results))]
        if across is not None:
            start(across, self._runtime.parcels, {f"constant {i}, {jax.typeof(c)}": c for i, c in enumerate(consts)})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step.

        Raises:
          TypeError: if the arguments differ from those compiled for, leaf by leaf.
        """
        leaves, tree = jax.tree_util.tree_flatten((args, kwargs))
        self._signature.check(leaves, tree, args, kwargs)
        return self.run(leaves)

    def run(self, leaves: Sequence[Any]) -> Any:
        """Run on flat arguments whose types are known to fit."""
        if self._across is not None and not self._calls:
            compare_values(self._across, "the arguments", self._read_in_several_processes(leaves))
        environment = self._environment(leaves)
        self._runtime.run(environment)
        return self._collect(environment)

    def _read_in_several_processes(self, leaves: Sequence[Any]) -> dict[str, Any]:
        """By name, the arguments that each process has by itself, and that ranks of several read."""
        found: dict[str, Any] = {}
        for leaf, argument in zip(leaves, self._arguments, strict=True):
            devices = [device for rank in argument.wanted.ranks for device in self.mpmd_mesh.unstack[rank].devices.flat]
            if type(leaf) is not MpmdArray and len({device.process_index for device in devices}) > 1:
                found[f"argument{argument.wanted.name}"] = leaf
        return found

    def profile(self, *args: Any, **kwargs: Any) -> tuple[Any, list[TaskTiming]]:
        """Run one real step and measure it: the results, and when each task of the loop ran on its rank.

        Ranks run in threads of their own and wait for each task, so this step is slower than others.

        Raises:
          ValueError: with several processes; nothing has been donated then.
          FloatingPointError: if a result holds what `jax.debug_nans` or `jax.debug_infs` look for; a call of the step
            also names the task.
        """
        if self._across is not None:
            raise ValueError(
                "a step is measured in one process that owns all ranks, but here each process owns some. Measure it "
                "there: on one host, or with virtual CPU devices."
            )
        leaves, tree = jax.tree_util.tree_flatten((args, kwargs))
        self._signature.check(leaves, tree, args, kwargs)
        environment = self._environment(leaves)
        timings = self._runtime.profile(environment)
        return self._collect(environment), timings

    def _environment(self, leaves: Sequence[Any]) -> list[Any]:
        environment: list[Any] = [None] * self.program.num_slots
        for slot, constant in self._constants:
            environment[slot] = constant
        self._calls += 1
        given_away: list[jax.Array] = []
        try:
            with looking_away():
                for leaf, argument in zip(leaves, self._arguments, strict=True):
                    self._place(leaf, argument, environment, given_away)
        except RuntimeError as error:
            raise self._name_deleted(leaves, error) from error
        if not kinds_looked_for():  # then `jax.jit` donates nothing
            for leaf in given_away:  # only now: where another argument is refused, the donated ones are as they were
                leaf.delete()
        return environment

    def _name_deleted(self, leaves: Sequence[Any], error: RuntimeError) -> RuntimeError:
        for leaf, expected in zip(leaves, self._signature.leaves, strict=True):
            if isinstance(leaf, (jax.Array, MpmdArray)) and leaf.is_deleted():
                return RuntimeError(
                    f"argument{expected.path} ({expected}) has been deleted: an earlier call to which it was donated "
                    "reuses its memory (`donate_argnums`, a train step's state), or `.delete()` was called. Pass what "
                    "that call returned in its place, or hand a copy to it: `jax.tree.map(jnp.copy, state)`."
                )
        return error

    def _collect(self, environment: list[Any]) -> Any:
        results = [bind(environment) for bind in self._results]
        return jax.tree_util.tree_unflatten(self._signature.out_tree, results)

    def _place(self, leaf: Any, argument: _Argument, environment: list[Any], given_away: list[jax.Array]) -> None:
        if type(leaf) is MpmdArray:
            parts = leaf._partially_addressable_arrays  # pyright: ignore[reportPrivateUsage]
            if self._across is not None and not argument.wanted.is_met_by(leaf):
                parts = bring(leaf, argument.wanted, self._across, self._calls, argument.position)
            may_alias = False if argument.has_own_memory else None
            for target in argument.targets:
                rank, sharding = target.rank, target.sharding
                part = parts.get(rank)
                if part is None or (part.sharding is not sharding and not lies_alike(part.sharding, sharding)):
                    part = leaf._value if part is None else part  # pyright: ignore[reportPrivateUsage]
                    part = place(part, sharding, may_alias=may_alias)
                elif part.is_deleted():
                    raise RuntimeError(leaf._deleted_message(rank))  # pyright: ignore[reportPrivateUsage]
                environment[target.slot] = part
            return
        if self._across is not None and isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            check_parts(leaf, argument.wanted)
        if argument.targets and isinstance(leaf, jax.ShapeDtypeStruct):
            ranks = [target.rank for target in argument.targets]
            raise TypeError(
                f"argument{argument.wanted.name} is a shape without a value ({leaf}), but the ranks {ranks} of this "
                "process read it. Pass its value; `compiled.read_here` tells which arguments a process may leave out."
            )
        for target in argument.targets:
            environment[target.slot] = place(leaf, target.sharding, may_alias=False if target.own_memory else None)
        if not argument.donated or not isinstance(leaf, jax.Array):
            return
        # As under jax.jit, a donated argument is gone after the call. Where a target shares its device, the copy may
        # share its memory too, and goes the way of every donated buffer.
        if all(leaf.devices().isdisjoint(target.sharding.device_set) for target in argument.targets):
            given_away.append(leaf)

    def _bind_result(self, position: int) -> Any:
        result = self.program.results[position]
        if not isinstance(result, dict):
            return lambda environment: self._constant_result(position, result)
        spec = self._executables.out_specs[position]
        aval = self._built.placed.outputs[position].aval
        sharding = MpmdSharding(self.mpmd_mesh, frozenset(result), spec or PartitionSpec(), memory_kind_of(aval))
        local = [(rank, slot) for rank, slot in result.items() if self.mpmd_mesh.is_local(rank)]

        def bind(environment: list[Any]) -> MpmdArray:
            parts = {rank: environment[slot] for rank, slot in local}
            return MpmdArray._from_parts(sharding, parts, aval)  # pyright: ignore[reportPrivateUsage]

        return bind

    def _constant_result(self, position: int, constant: Constant) -> MpmdArray:
        # It costs no transfer, so every process has it.
        ranks = {0} if self._across is None else set(range(self.mpmd_mesh.mpmd_dim))
        sharding = MpmdSharding(self.mpmd_mesh, ranks, self._executables.out_specs[position] or PartitionSpec())
        value = np.asarray(constant.value, constant.aval.dtype)
        local = [rank for rank in sharding.ranks if self.mpmd_mesh.is_local(rank)]
        parts = {rank: place(value, sharding.local_sharding(rank)) for rank in local}
        return MpmdArray._from_parts(sharding, parts, constant.aval)  # pyright: ignore[reportPrivateUsage]

    @property
    def in_shardings(self) -> Any:
        """The `MpmdSharding` of each argument: a tree like `(args, kwargs)`."""
        shardings = [
            MpmdSharding(self.mpmd_mesh, a.wanted.ranks or {0}, leaf.spec, a.wanted.memory_kind)
            for a, leaf in zip(self._arguments, self._signature.leaves, strict=True)
        ]
        return jax.tree_util.tree_unflatten(self._signature.tree, shardings)

    @property
    def read_here(self) -> Any:
        """For each argument, whether a rank of this process reads it: a tree like that of `in_shardings`.

        Where it is False, a `jax.ShapeDtypeStruct` may stand in for the argument's value.
        """
        return jax.tree_util.tree_unflatten(self._signature.tree, [bool(a.targets) for a in self._arguments])

    @property
    def out_shardings(self) -> Any:
        """The `MpmdSharding` of each result, as a tree like the results."""
        shardings = [
            MpmdSharding(
                self.mpmd_mesh, r if isinstance(r, dict) else {0}, spec or PartitionSpec(), memory_kind_of(atom.aval)
            )
            for r, spec, atom in zip(
                self.program.results, self._executables.out_specs, self._built.placed.outputs, strict=True
            )
        ]
        return jax.tree_util.tree_unflatten(self._signature.out_tree, shardings)

    def as_text(self, stage: str = "program") -> str:
        """The step as text: `"program"` as it runs, or the structure after the pass named (see `engine/passes`).

        `"tasks"` (each task's equations) and `"placed"` (the step on ranks) are short for `"partition"` and `"place"`.

        Raises:
          ValueError: for another name.
        """
        return self.program.as_text() if stage == "program" else self._built.as_text(stage)

    @property
    def closed_jaxpr(self) -> ProgramListing:
        """The program as JaxPP prints it: one equation for each task, transfer and deletion."""
        return ProgramListing(self.program, self._executables.transfer_specs, self.mpmd_mesh)

    @cached_property
    def stages(self) -> tuple[StageSummary, ...]:
        """What each stage of the first loop holds and does."""
        return summarise_stages(self._built, self.program, self._executables, self.mpmd_mesh)

    def memory_analysis(self) -> tuple[MemoryAnalysis, ...]:
        """Bytes that each rank holds: arguments, and the peak of what one step adds."""
        return analyse_memory(self._built, self.program, self._executables, self.mpmd_mesh)

    @property
    def num_lowerings(self) -> int:
        """Tasks lowered so far by the function this belongs to: one for each distinct task."""
        return self._compiler.lowerings

    @property
    def num_executables(self) -> int:
        """Executables compiled so far by the function this belongs to."""
        return self._compiler.compilations


def _targets(wanted: Wanted, slots: Mapping[int, int], *, separate: bool) -> tuple[_Target, ...]:
    """This process's ranks among those that read an argument; with `separate`, no two of them share memory."""
    found: list[_Target] = []
    taken: set[Any] = set()
    for rank, slot in slots.items():
        if wanted.mesh.is_local(rank):
            devices = wanted.mesh.rank_devices(rank)
            shared = not taken.isdisjoint(devices)
            found.append(_Target(slot, rank, wanted.on(rank), own_memory=separate and shared))
            taken.update(devices)
    return tuple(found)
