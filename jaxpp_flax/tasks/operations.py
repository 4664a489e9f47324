"""`task` and `transfer`: what a function under `mpmd` consists of; each binds one equation of the traced function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, overload

import jax
from jax.extend import core as jex_core
from jax.sharding import AxisType, Mesh, NamedSharding

from jaxpp_flax.engine.arrays.mesh import named_memory
from jaxpp_flax.engine.arrays.rank_shardings import broadcast_prefix
from jaxpp_flax.engine.program.program import ProgramTask
from jaxpp_flax.tasks.ranks import on_rank
from jaxpp_flax.tasks.recording import Recording, recording_of
from jaxpp_flax.tasks.task_trace import TaskTrace, trace_task

__all__ = ["brought", "TransferFuture", "task", "task_p", "transfer", "transfer_p"]

T = TypeVar("T")
P = ParamSpec("P")


def _outside(name: str) -> Callable[..., Any]:
    return lambda *_, **__: recording_of(f"`{name}`")


task_p = jex_core.Primitive("mpmd_task")
task_p.multiple_results = True
task_p.def_impl(_outside("task"))
task_p.def_abstract_eval(lambda *_, task: [atom.aval for atom in task.graph.outputs])

transfer_p = jex_core.Primitive("mpmd_transfer")
transfer_p.multiple_results = True
transfer_p.def_impl(_outside("transfer"))


def _arriving(*avals: Any, mesh: Any, **_: Any) -> list[Any]:
    """Return the types of values on another mesh: on an Explicit one, a type holds the mesh."""
    typed = [AxisType.Explicit in aval.sharding.mesh.axis_types for aval in avals]
    return [
        aval.update(sharding=NamedSharding(mesh, aval.sharding.spec)) if explicit else aval
        for aval, explicit in zip(avals, typed, strict=True)
    ]


transfer_p.def_abstract_eval(_arriving)


@overload
def task(
    fun: Callable[P, T],
    /,
    *,
    out_shardings: Any,
    name: str | None = None,
    in_shardings: Any = None,
    mesh: Mesh | None = None,
    donate_argnums: int | Sequence[int] | None = None,
) -> Callable[P, T]: ...


@overload
def task(
    fun: None = None,
    /,
    *,
    out_shardings: Any,
    name: str | None = None,
    in_shardings: Any = None,
    mesh: Mesh | None = None,
    donate_argnums: int | Sequence[int] | None = None,
) -> Callable[[Callable[P, T]], Callable[P, T]]: ...


def task(
    fun: Any = None,
    /,
    *,
    out_shardings: Any,
    name: str | None = None,
    in_shardings: Any = None,
    mesh: Mesh | None = None,
    donate_argnums: int | Sequence[int] | None = None,
) -> Any:
    """Make a function a task: one SPMD program that one rank runs, at this point of its order.

    The task runs on the rank whose submesh `mesh`, `in_shardings` or `out_shardings` name; if they name none, on the
    rank of its arguments. An argument on another rank is transferred first, and keeps its partition. As under
    `jax.jit`, a function is traced once for arguments of equal types.

    Args:
      fun: any function of arrays. Without it, `task(out_shardings=...)` is a decorator.
      out_shardings: a prefix tree of `NamedSharding`s over a rank's submesh, or of `PartitionSpec`s, for the results.
        Results get their kinds of memory (`pinned_host`), and their `unreduced` and `reduced` axes on Explicit meshes.
        On an Explicit mesh, None keeps the partition in a result's type.
      name: the task's name in text, profiles and messages; by default the function's name.
      in_shardings: the shardings that the arguments must have; by default any.
      mesh: the submesh of the rank.
      donate_argnums: positional arguments whose memory the task may reuse.

    Raises (when the mpmd function is lowered):
      RuntimeError: outside of an mpmd function, or inside another task.
      ValueError: if shardings name several ranks, or a mesh that is no rank's; if neither shardings nor arguments tell
        the rank; if an argument's partition differs from `in_shardings`; if a donated value is read later or has been
        sent.
      TypeError: if an argument is no array.

    Example:
      >>> import jax, numpy as np
      >>> from jax.sharding import Mesh, NamedSharding, PartitionSpec
      >>> from jaxpp_flax.tasks import MpmdMesh, mpmd
      >>> mesh = MpmdMesh(Mesh(np.array(jax.devices()[:2]), ("stage",)), "stage")
      >>> on_1 = NamedSharding(mesh.unstack[1], PartitionSpec())
      >>> f = mpmd(mesh, in_shardings=on_1)(lambda x: task(lambda x: x + 1, out_shardings=on_1, name="add")(x))
      >>> f(np.float32(1)).item()
      2.0
    """
    options = {"out_shardings": out_shardings, "name": name, "in_shardings": in_shardings, "mesh": mesh}
    if fun is None:
        return functools.partial(task, donate_argnums=donate_argnums, **options)
    numbers = (donate_argnums,) if isinstance(donate_argnums, int) else tuple(donate_argnums or ())

    @functools.wraps(fun)
    def called(*args: Any, **kwargs: Any) -> Any:
        label = name or getattr(fun, "__name__", type(fun).__name__)
        record = recording_of(f"task {label!r}")
        trace = trace_task(record, fun, label, args, kwargs, in_shardings, out_shardings, mesh, brought)
        return _bind(record, label, trace, _donated(label, args, numbers, len(trace.operands)))

    return called


def _donated(name: str, args: Sequence[Any], numbers: Sequence[int], operands: int) -> frozenset[int]:
    """Return the positions of donated operands: those of the last arguments, behind captured arrays."""
    for number in numbers:
        if not -len(args) <= number < len(args):
            raise ValueError(f"task {name!r} has donate_argnums={number}, but is called with {len(args)} arguments.")
    counts = [len(jax.tree.leaves(arg)) for arg in args]
    chosen = {number % len(args) for number in numbers}
    flags = [i in chosen for i, count in enumerate(counts) for _ in range(count)]
    return frozenset(i for i, flag in enumerate(flags) if flag)


def _bind(record: Recording, name: str, trace: TaskTrace, donated: frozenset[int]) -> Any:
    captured = len(trace.operands) - trace.num_arguments
    specs = tuple(sharding.spec for sharding in trace.out_shardings)
    donate = frozenset(i + captured for i in donated)
    called = ProgramTask(name, trace.rank, trace.graph, donate=donate, out_specs=specs)
    results = task_p.bind(*trace.operands, task=called)
    for result, sharding in zip(results, trace.out_shardings, strict=True):
        record.know(result, trace.rank, sharding)
    return jax.tree_util.tree_unflatten(trace.out_tree, results)


def brought(record: Recording, value: Any, target: int) -> Any:
    """Return a value of another rank on rank `target`, by a transfer that the user has not written; once for each."""
    home, key = record.of(value), (id(value), target)
    if home is None or home.rank == target:
        return value
    if key not in record.copies:
        sharding = NamedSharding(record.mesh.unstack[target], home.sharding.spec, memory_kind=home.sharding.memory_kind)
        mesh = sharding.mesh.abstract_mesh
        (copy,) = transfer_p.bind(value, source=home.rank, target=target, number=None, mesh=mesh)
        record.copies[key] = record.know(copy, target, sharding)
    return record.copies[key]


class TransferFuture(Generic[T]):
    """A transfer that has started, while a function is traced; `done()` gives the values on the receiving rank."""

    def __init__(self, record: Recording, number: int, values: T) -> None:
        self._record, self._number, self._values = record, number, values

    def done(self) -> T:
        """Return the values on the receiving rank; a task that reads them waits for their arrival.

        Raises:
          RuntimeError: if it is called a second time.
        """
        if self._number not in self._record.waiting:
            raise RuntimeError(
                f"`.done()` of transfer {self._number} was called twice. The first call returned its values: keep them."
            )
        self._record.waiting.discard(self._number)
        return self._values


def transfer(arrays: T, *, out_shardings: Any) -> TransferFuture[T]:
    """Start to send values to another rank; the ranks do other work until a task reads the values that arrive.

    Args:
      arrays: a pytree of values of one rank or of several.
      out_shardings: a prefix tree of `NamedSharding`s over submeshes of other ranks. Each must have the same partition
        and kind of memory as its value; to change them, use a task before or after the transfer.

    Returns:
      A future. Its `done()`, which may be called once, gives the values.

    Raises (when the mpmd function is lowered):
      RuntimeError: outside of an mpmd function.
      TypeError: if a leaf is no value of the mpmd function.
      ValueError: if there is no leaf; if a value would stay on its rank; if a sharding changes the partition or memory.

    Example:
      >>> import jax, numpy as np
      >>> from jax.sharding import Mesh, NamedSharding, PartitionSpec
      >>> from jaxpp_flax.tasks import MpmdMesh, mpmd
      >>> mesh = MpmdMesh(Mesh(np.array(jax.devices()[:2]), ("stage",)), "stage")
      >>> on = [NamedSharding(submesh, PartitionSpec()) for submesh in mesh.unstack]
      >>> send = mpmd(mesh, in_shardings=on[0])(lambda x: transfer(x, out_shardings=on[1]).done())
      >>> send(np.ones(2)).devices() == {jax.devices()[1]}
      True
    """
    record = recording_of("`transfer`")
    leaves, tree = jax.tree_util.tree_flatten(arrays)
    if not leaves:
        raise ValueError("`transfer` got no array: there is nothing to send. Leave the call out.")
    nodes = broadcast_prefix(out_shardings, arrays, "transfer out_shardings")
    number = record.transfers
    record.transfers += 1
    routes: dict[tuple[int, int], list[int]] = {}
    targets: list[NamedSharding] = []
    for position, (leaf, (where, node)) in enumerate(zip(leaves, nodes, strict=True)):
        source, target, sharding = _route(record, leaf, node, where)
        targets.append(sharding)
        routes.setdefault((source, target), []).append(position)
    moved: list[Any] = [None] * len(leaves)
    for (source, target), positions in routes.items():
        mesh = record.mesh.unstack[target].abstract_mesh
        sent = [leaves[i] for i in positions]
        copies = transfer_p.bind(*sent, source=source, target=target, number=number, mesh=mesh)
        for position, copy in zip(positions, copies, strict=True):
            moved[position] = record.know(copy, target, targets[position])
    record.waiting.add(number)
    return TransferFuture(record, number, jax.tree_util.tree_unflatten(tree, moved))


def _route(record: Recording, leaf: Any, node: Any, where: str) -> tuple[int, int, NamedSharding]:
    home = record.of(leaf)
    if home is None:
        raise TypeError(
            f"`transfer` got {leaf!r} for {where}, which is neither an argument nor the result of a task: "
            "it has no rank. Make the value in a task."
        )
    target, sharding = on_rank(record.mesh, node, where)
    what = f"{jax.typeof(leaf).str_short()} on rank {home.rank}"
    if target == home.rank:
        raise ValueError(
            f"`transfer` of {what}: {where} is on rank {target} too. A transfer goes to another rank; "
            "for another partition or memory on the same rank, use `jax.reshard` or `jax.device_put` in a task."
        )
    unchanged = NamedSharding(sharding.mesh, home.sharding.spec, memory_kind=home.sharding.memory_kind)
    if unchanged != sharding and not _equivalent(unchanged, sharding, leaf.ndim):
        raise ValueError(
            f"`transfer` of {what}: {where} is {_says(sharding)}, but the value has {_says(unchanged)}. A transfer "
            "does not repartition: do it in a task on the sending or on the receiving rank, and give the transfer "
            "the same spec and memory kind as the value has."
        )
    return home.rank, target, sharding


def _equivalent(one: NamedSharding, other: NamedSharding, ndim: int) -> bool:
    typed = [(s.spec.unreduced, s.spec.reduced, named_memory(s)) for s in (one, other)]
    return typed[0] == typed[1] and one.is_equivalent_to(other, ndim)


def _says(sharding: NamedSharding) -> str:
    return f"{sharding.spec}" + (f" in {kind!r}" if (kind := named_memory(sharding)) else "")
