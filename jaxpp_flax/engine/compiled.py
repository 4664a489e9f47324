"""A compiled program with its arguments and results: what every front calls.

Each argument goes to the ranks that read it, with the sharding of their compiled tasks; most arguments have it already.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxpp_flax.engine.arrays.mesh import lies_alike
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.engine.arrays.placing import place
from jaxpp_flax.engine.runtime.debug_switches import kinds_looked_for, looking_away
from jaxpp_flax.engine.runtime.executables import Executables
from jaxpp_flax.engine.runtime.instruction_loop import Runtime
from jaxpp_flax.engine.runtime.profile import TaskTiming
from jaxpp_flax.engine.runtime.reshard import WantedArgument, bring, check_parts
from jaxpp_flax.engine.runtime.startup import compare_values, start
from jaxpp_flax.engine.signature import Signature
from jaxpp_flax.engine.tracing.ir import Constant, memory_kind_of

__all__ = ["Compiled", "array_result"]


@dataclass(frozen=True)
class _Target:
    """One of this process's ranks that reads an argument.

    `own_memory`: an earlier target shares a device with this one; this step or a later one may give one away.
    """

    value: int
    rank: int
    sharding: NamedSharding
    own_memory: bool


@dataclass(frozen=True)
class _Argument:
    """The places of an argument: its targets in this process, and all its ranks."""

    position: int
    targets: tuple[_Target, ...]
    wanted: WantedArgument
    donated: bool

    @cached_property
    def has_own_memory(self) -> bool:
        """True if a target needs memory that no other target shares."""
        return any(target.own_memory for target in self.targets)


class Compiled:
    """A program compiled for one signature: it takes only arguments of this structure, these shapes and dtypes.

    The program's first arguments are `constants`, the arrays that the function closes over. `results` holds functions
    that make the results from the environment after a run: each front wraps them in its own way.

    With several processes, all of them make this object at the same point: they connect, wait until each of them has
    compiled its tasks, and compare the constants. A program for devices that are only described refuses to run.
    """

    def __init__(
        self,
        executables: Executables,
        signature: Signature,
        constants: Sequence[Any],
        results: Sequence[Callable[[list[Any]], Any]],
    ) -> None:
        program, distributed = executables.program, executables.distributed
        self.program, self.executables = program, executables
        self._mesh, self._signature = executables.mesh, signature
        if self._mesh.is_described:  # nothing can be put there
            return
        self.runtime = Runtime(executables)
        self._num_values, self._distributed = program.num_values, distributed
        self._results = tuple(results)
        self._calls = 0
        self._are_apart = False  # the arguments: looked at in the first call
        count = len(constants)
        donated = (False,) * count + signature.donated
        names = [""] * count + [leaf.path for leaf in signature.leaves]
        types = zip(program.arguments, executables.in_specs, executables.in_avals, names, donated, strict=True)
        arguments: list[_Argument] = []
        for position, (ranks, spec, aval, name, given_away) in enumerate(types, -count):
            wanted = WantedArgument(executables.mesh, tuple(ranks), spec, name, memory_kind_of(aval))
            arguments.append(_Argument(position, _targets(wanted, ranks), wanted, given_away))
        self._arguments = tuple(arguments[count:])
        self._constants = [
            (target.value, place(value, target.sharding, may_alias=False if target.own_memory else None))
            for value, argument in zip(constants, arguments[:count], strict=True)
            for target in argument.targets
        ]

        if distributed is not None:
            named = {f"constant {i}, {jax.typeof(c)}": c for i, c in enumerate(constants)}
            start(distributed, self.runtime.parcels, named)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program.

        Raises:
          TypeError: if an argument differs from the signature in structure, shape or dtype.
          RuntimeError: if an argument has been deleted, or the mesh's devices are only described.
        """
        return self.run(self._signature.leaves_of(args, kwargs))

    def run(self, leaves: Sequence[Any]) -> Any:
        """Run on flat arguments whose types fit the signature; the types are not checked.

        Several processes compare the arguments of the first call.

        Raises:
          RuntimeError: if an argument has been deleted, or the devices are only described.
          TypeError: if a shape without a value is passed for an argument that this process reads.
        """
        environment = self._environment(leaves)
        self.runtime.run(environment)
        return self._collect(environment)

    def _measure(self, leaves: Sequence[Any]) -> tuple[Any, list[TaskTiming]]:
        """Run the program and measure it: return the results, and the times of the loop's tasks on all ranks."""
        environment = self._environment(leaves)
        timings = self.runtime.profile(environment)
        return self._collect(environment), timings

    def _environment(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the environment before a run, with constants and arguments in place; give donated arguments away."""
        self._mesh.check_attached(f"a call of {self._signature.function or 'the step'}")
        if self._distributed is not None and not self._calls:
            compare_values(self._distributed, "the arguments", self._in_several_processes(leaves))
        environment: list[Any] = [None] * self._num_values
        for value, constant in self._constants:
            environment[value] = constant
        self._calls += 1
        given_away: list[jax.Array] = []
        try:
            with looking_away():
                for leaf, argument in zip(leaves, self._arguments, strict=True):
                    if isinstance(leaf, MpmdArray):
                        self._place_parts(leaf, argument, environment)
                    else:
                        self._place_value(leaf, argument, environment, given_away)
        except RuntimeError as error:
            if (deleted := self._signature.deleted_error(leaves)) is None:
                raise
            raise deleted from error
        if not self._are_apart:
            self._refuse_arrays_given_twice(leaves)
            self._are_apart = True
        if given_away and not kinds_looked_for():  # else `jax.jit` donates nothing
            for leaf in given_away:  # only now: if another argument is refused, the donated ones stay alive
                leaf.delete()
        return environment

    def _refuse_arrays_given_twice(self, leaves: Sequence[Any]) -> None:
        """Refuse an array that two arguments share if one is donated: the first task that takes it deletes both."""
        owners: dict[tuple[int, int], _Argument] = {}
        for leaf, argument in zip(leaves, self._arguments, strict=True):
            for target in argument.targets:
                part = leaf
                if isinstance(leaf, MpmdArray):
                    part = leaf._parts.get(target.rank)  # pyright: ignore[reportPrivateUsage]
                if target.own_memory or not isinstance(part, jax.Array):
                    continue
                if part.devices().isdisjoint(target.sharding.device_set):  # the rank gets a copy
                    continue
                other = owners.setdefault((id(part), target.rank), argument)
                if other is not argument and (other.donated or argument.donated):
                    raise ValueError(
                        f"argument{other.wanted.name} and argument{argument.wanted.name} are one array, and it is "
                        "donated: its memory can be given away once. Pass a copy as one of them: `jnp.copy(array)`."
                    )

    def _collect(self, environment: list[Any]) -> Any:
        return jax.tree_util.tree_unflatten(self._signature.out_tree, [make(environment) for make in self._results])

    def _place_value(self, leaf: Any, argument: _Argument, environment: list[Any], given_away: list[jax.Array]) -> None:
        if self._distributed is not None and isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            check_parts(leaf, argument.wanted)
        if argument.targets and isinstance(leaf, jax.ShapeDtypeStruct):
            raise _no_value(leaf, argument)
        in_place = False
        for target in argument.targets:
            part = place(leaf, target.sharding, may_alias=False if target.own_memory else None)
            environment[target.value] = part
            in_place = in_place or part is leaf
        if in_place or not argument.donated or not isinstance(leaf, jax.Array):
            return
        # As under jax.jit, a donated argument is deleted after the call. A copy on one of its devices may share its
        # memory; then the task that takes the copy as a donation deletes both.
        if all(leaf.devices().isdisjoint(target.sharding.device_set) for target in argument.targets):
            given_away.append(leaf)

    def _place_parts(self, leaf: MpmdArray, argument: _Argument, environment: list[Any]) -> None:
        parts = leaf._parts  # pyright: ignore[reportPrivateUsage]
        if self._distributed is not None and not argument.wanted.is_met_by(leaf):
            parts = bring(leaf, argument.wanted, self._distributed, self._calls, argument.position)
        for target in argument.targets:
            part = parts.get(target.rank)
            if part is None or not lies_alike(part.sharding, target.sharding):
                part = leaf._value if part is None else part  # pyright: ignore[reportPrivateUsage]
                part = place(part, target.sharding, may_alias=False if argument.has_own_memory else None)
            elif part.is_deleted():
                raise RuntimeError(leaf._deleted_message(target.rank))  # pyright: ignore[reportPrivateUsage]
            environment[target.value] = part

    def _in_several_processes(self, leaves: Iterable[Any]) -> dict[str, Any]:
        """Return, by name, the arguments that every process passes itself and that several processes read."""
        shared: dict[str, Any] = {}
        for leaf, argument in zip(leaves, self._arguments, strict=True):
            if type(leaf) is not MpmdArray and len(argument.wanted.processes) > 1:
                shared[f"argument{argument.wanted.name}"] = leaf
        return shared


def _no_value(leaf: jax.ShapeDtypeStruct, argument: _Argument) -> TypeError:
    ranks = [target.rank for target in argument.targets]
    return TypeError(
        f"argument{argument.wanted.name} is a shape without a value ({leaf}), but the ranks {ranks} of this "
        "process read it. Pass its value: only an argument that no rank of this process reads may be left out."
    )


def _targets(wanted: WantedArgument, on_ranks: Mapping[int, int]) -> tuple[_Target, ...]:
    """Return this process's ranks that read an argument; no two of them share memory."""
    targets: list[_Target] = []
    taken: set[Any] = set()
    for rank, value in on_ranks.items():
        if rank in wanted.mesh.local_ranks:
            devices = wanted.mesh.rank_devices(rank)
            shared = not taken.isdisjoint(devices)
            targets.append(_Target(value, rank, wanted.on(rank), own_memory=shared))
            taken.update(devices)
    return tuple(targets)


def array_result(
    result: Mapping[int, int] | Constant, sharding: NamedSharding | None, aval: Any
) -> Callable[[list[Any]], jax.Array]:
    """Return a function that makes a `jax.Array` from the environment after a run, for a result on one rank.

    As in JAX, an array of other processes has no part here. A constant gets the requested sharding, if there is one.
    """
    if sharding is not None and all(d.process_index != jax.process_index() for d in sharding.device_set):
        shape, dtype = tuple(aval.shape), aval.dtype
        return lambda _: jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=dtype)
    if not isinstance(result, Constant):
        return operator.itemgetter(next(iter(result.values())))
    if sharding is None:
        return lambda _: jnp.asarray(result.value, aval.dtype)
    return lambda _: place(jnp.asarray(result.value, aval.dtype), sharding)
