"""Trace the body of a task on the submesh of its rank, and give its results the shardings that the user asks for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.core
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from jaxpp_flax.engine.arrays.mesh import axes_in, canonical, named_memory
from jaxpp_flax.engine.arrays.rank_shardings import broadcast_prefix
from jaxpp_flax.engine.tracing.ir import Graph, from_jaxpr, memory_kind_of
from jaxpp_flax.tasks.ranks import placed, rank_of
from jaxpp_flax.tasks.recording import Recording, not_recording

__all__ = ["TaskTrace", "trace_task"]

Move = Callable[[Recording, Any, int], Any]


@dataclass(frozen=True, eq=False)
class TaskTrace:
    """A traced task. `operands` are the arrays that the function closes over, then the leaves of the arguments."""

    rank: int
    graph: Graph
    operands: tuple[Any, ...]
    num_arguments: int
    out_shardings: tuple[NamedSharding, ...]
    out_tree: Any


def trace_task(
    record: Recording,
    fun: Callable[..., Any],
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    in_shardings: Any,
    out_shardings: Any,
    mesh: Mesh | None,
    move: Move,
) -> TaskTrace:
    """Choose the rank of a task, bring its arguments there by `move`, and trace its function.

    Raises: see `task`.
    """
    leaves, tree = jax.tree_util.tree_flatten((tuple(args), dict(kwargs)))
    _check_arrays(record, name, leaves)
    asked = _nodes_for_arguments(name, in_shardings, args, kwargs)
    rank = _rank_of(record, name, leaves, mesh, asked, out_shardings)
    leaves = [move(record, leaf, rank) for leaf in leaves]
    _check_as_wanted(record, name, rank, leaves, asked)
    cached = _key(fun, tree, leaves, rank, out_shardings)
    if cached is not None and cached in record.traced:
        _, graph, (shardings, out_tree) = record.traced[cached]
        return TaskTrace(rank, graph, tuple(leaves), len(leaves), shardings, out_tree)
    graph, captured, shardings, out_tree = _traced(record, fun, name, tree, leaves, rank, out_shardings)
    if cached is not None and not captured:
        record.traced[cached] = fun, graph, (shardings, out_tree)
    captured = [move(record, value, rank) for value in captured]
    return TaskTrace(rank, graph, (*captured, *leaves), len(leaves), shardings, out_tree)


def _check_arrays(record: Recording, name: str, leaves: Sequence[Any]) -> None:
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, jax.core.Tracer) and record.is_of_other_trace(leaf):
            raise NotImplementedError(
                f"task {name!r} got, as argument leaf {position}, a value inside of `jax.grad`, `jax.vmap` or another "
                "transformation: a task cannot be transformed from outside. Call the transformation in the task."
            )
        try:
            jax.typeof(leaf)
        except TypeError as error:
            raise TypeError(
                f"argument leaf {position} of task {name!r} is a {type(leaf).__name__}, which is no array. Close over "
                "it in the task's function, or pass an array."
            ) from error


def _nodes_for_arguments(name: str, in_shardings: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    if in_shardings is None:
        return [None] * len(jax.tree.leaves((args, kwargs)))
    if isinstance(in_shardings, (PartitionSpec, Sharding)):
        prefix: Any = in_shardings
    elif len(in_shardings) == len(args):
        prefix = tuple(in_shardings)
    else:
        raise ValueError(
            f"task {name!r} has {len(in_shardings)} in_shardings for {len(args)} positional arguments. Give one tree "
            "for each argument."
        )
    nodes = [node for _, node in broadcast_prefix(prefix, tuple(args), f"in_shardings of task {name!r}")]
    return nodes + [None] * len(jax.tree.leaves(kwargs))


def _rank_of(
    record: Recording, name: str, leaves: Sequence[Any], mesh: Mesh | None, asked: Sequence[Any], out_shardings: Any
) -> int:
    """Return the rank that the shardings of a task name; else the rank of its arguments."""
    ranks: dict[int, str] = {}
    if mesh is not None:
        ranks[rank_of(record.mesh, mesh, f"`mesh` of task {name!r}")] = "mesh"
    nodes = jax.tree.leaves(out_shardings, is_leaf=lambda x: isinstance(x, (PartitionSpec, Sharding)))
    for what, shardings in (("in_shardings", asked), ("out_shardings", nodes)):
        for sharding in shardings:
            if isinstance(sharding, NamedSharding):
                rank = rank_of(record.mesh, sharding.mesh, f"a sharding in {what} of task {name!r}")
                ranks.setdefault(rank, what)
    if len(ranks) > 1:
        listed = ", ".join(f"rank {rank} ({what})" for rank, what in sorted(ranks.items()))
        raise ValueError(
            f"task {name!r} is on several meshes: {listed}. A task runs on one rank: give all its shardings over one "
            "submesh, and `transfer` its results."
        )
    if not ranks:
        ranks = {home.rank: "arguments" for leaf in leaves if (home := record.of(leaf)) is not None}
    if len(ranks) == 1:
        return next(iter(ranks))
    lie = f"its arguments are on the ranks {sorted(ranks)}" if ranks else "no argument has a rank"
    raise ValueError(
        f"task {name!r} names no mesh, and {lie}. Tell the rank: `mesh=mpmd_mesh.unstack[rank]`, or a `NamedSharding` "
        "in out_shardings."
    )


def _check_as_wanted(record: Recording, name: str, rank: int, leaves: Sequence[Any], asked: Sequence[Any]) -> None:
    for position, (leaf, node) in enumerate(zip(leaves, asked, strict=True)):
        home = record.of(leaf)
        if node is None or home is None:
            continue
        spec = canonical(node if isinstance(node, PartitionSpec) else node.spec)
        wanted = placed(record.mesh, rank, spec, node, f"in_shardings of task {name!r}")
        if wanted == home.sharding or wanted.is_equivalent_to(home.sharding, leaf.ndim):
            continue
        raise ValueError(
            f"argument leaf {position} of task {name!r}, {jax.typeof(leaf).str_short()}, has the "
            f"partition {home.sharding.spec}, but in_shardings say {spec}. Leave in_shardings out and call "
            "`jax.reshard` (or `jax.lax.with_sharding_constraint`) in the task."
        )


def _key(fun: Any, tree: Any, leaves: Sequence[Any], rank: int, out_shardings: Any) -> Hashable:
    """Return a key for the trace of a function for arguments of these types; None if a part has no hash."""
    nodes, out_tree = jax.tree.flatten(out_shardings, is_leaf=lambda x: isinstance(x, (PartitionSpec, Sharding)))
    types = tuple(jax.typeof(leaf) for leaf in leaves)
    key = (_identity(fun), types, tree, rank, tuple(nodes), out_tree)
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _identity(fun: Any) -> Hashable:
    """Return a value that is equal for equal functions: two partials of one function with the same arguments are equal.

    The arguments count by identity, because 2 and 2.0 are equal; the cache keeps them alive.
    """
    if isinstance(fun, functools.partial):
        named = tuple((name, id(value)) for name, value in sorted(fun.keywords.items()))
        return _identity(fun.func), tuple(map(id, fun.args)), named
    return fun


def _traced(
    record: Recording,
    fun: Callable[..., Any],
    name: str,
    tree: Any,
    leaves: Sequence[Any],
    rank: int,
    out_shardings: Any,
) -> tuple[Graph, list[Any], tuple[NamedSharding, ...], Any]:
    mesh = record.mesh.unstack[rank]
    shardings: list[NamedSharding] = []
    trees: list[Any] = []

    def flat(*operands: Any) -> list[Any]:
        args, kwargs = jax.tree_util.tree_unflatten(tree, operands)
        results = fun(*args, **kwargs)
        nodes = broadcast_prefix(out_shardings, results, f"out_shardings of task {name!r}")
        values, out_tree = jax.tree_util.tree_flatten(results)
        trees.append(out_tree)
        shardings[:] = [
            _asked(record, rank, value, where, node) for value, (where, node) in zip(values, nodes, strict=True)
        ]
        return [_as_asked(value, sharding) for value, sharding in zip(values, shardings, strict=True)]

    # `context_mesh` cannot be used here, inside the trace of the mpmd function; outside of it there is no mesh.
    with not_recording(), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        jaxpr = jax.make_jaxpr(flat)(*leaves)
    graph, captured = from_jaxpr(jaxpr)
    return graph, captured, tuple(shardings), trees[0]


def _asked(record: Recording, rank: int, result: Any, where: str, node: Any) -> NamedSharding:
    """Return the sharding of a result on its rank."""
    mesh = record.mesh.unstack[rank]
    if node is None:
        if AxisType.Explicit not in mesh.axis_types:
            raise ValueError(
                f"{where} is None, but on a mesh with Auto axes the type of {jax.typeof(result).str_short()} tells no "
                "partition. Give a PartitionSpec or a NamedSharding; P() keeps the result whole."
            )
        node = jax.typeof(result).sharding
        return placed(record.mesh, rank, node.spec, _memory_of(result, mesh), where)
    spec = node if isinstance(node, PartitionSpec) else node.spec
    for axis in (*axes_in(spec), *spec.unreduced, *spec.reduced):
        if axis not in mesh.axis_names:
            raise ValueError(
                f"{where} is {spec}, but rank {rank} has only the axes {dict(mesh.shape)}. Use one of these."
            )
    # A spec alone says nothing of memory: the result stays where the task has put it.
    memory = node if getattr(node, "memory_kind", None) is not None else _memory_of(result, mesh)
    return placed(record.mesh, rank, spec, memory, where)


def _memory_of(result: Any, mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(), memory_kind=memory_kind_of(jax.typeof(result)))


def _as_asked(value: Any, sharding: NamedSharding) -> Any:
    """Move a result, inside of its task, to the memory and to the typed partition that are asked for."""
    kind = named_memory(sharding)
    if kind != memory_kind_of(jax.typeof(value)):
        value = jax.device_put(value, jax.memory.Space.Device if kind is None else jax.memory.Space.Host)
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return value
    typed = jax.typeof(value).sharding
    if not typed.mesh.empty and canonical(typed.spec) == sharding.spec:
        return value
    return jax.sharding.reshard(value, NamedSharding(sharding.mesh.abstract_mesh, sharding.spec))
