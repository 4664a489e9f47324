"""Shardings inside a rank, those of passed arguments and those asked of arguments and results: a spec and a memory.

The memory of an array is part of its type, as in JAX: JAX carries it from an argument's type through the step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jax.tree_util import keystr

from jaxpp_flax.engine.arrays.memory_kinds import SPACES, memory_wanted
from jaxpp_flax.engine.arrays.mesh import MpmdMesh, axes_in, canonical, keep_axes
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.engine.tracing.ir import memory_kind_of

__all__ = [
    "RankSharding",
    "broadcast_shardings",
    "broadcast_prefix",
    "check_divides",
    "rank_sharding_of",
    "moved",
    "with_memories",
]


class RankSharding(NamedTuple):
    """A spec over the axes inside a rank, and a kind of memory; in a request, None leaves either one open.

    An argument's spec may have `reduced` axes, which the trace of the step reads; they place nothing.
    """

    spec: PartitionSpec | None
    memory_kind: str | None

    @property
    def placement(self) -> PartitionSpec | None:
        """The spec without `reduced` axes."""
        return None if self.spec is None else PartitionSpec(*self.spec.partitions)

    def over(self, own: RankSharding) -> RankSharding:
        """Return this request, with open parts taken from an argument's own sharding."""
        spec = own.spec if self.spec is None else self.spec
        return RankSharding(spec, own.memory_kind if self.memory_kind is None else self.memory_kind)


def rank_sharding_of(leaf: Any, mesh: MpmdMesh, where: str = "an argument") -> RankSharding:
    """Return an argument's own partition, without the stage axis, and its memory.

    Raises:
      ValueError: if no type of JAX can express its kind of memory, or it is partial sums over a mesh axis.
    """
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        return RankSharding(PartitionSpec(), "device")
    memory = memory_wanted(sharding, where) or "device"
    if isinstance(leaf, MpmdArray):
        return RankSharding(leaf.spec, memory)
    if not isinstance(sharding, NamedSharding):
        return RankSharding(PartitionSpec(), memory)
    return RankSharding(_within_submesh(sharding.spec, mesh, where), memory)


def _within_submesh(spec: PartitionSpec, mesh: MpmdMesh, where: str) -> PartitionSpec:
    if spec.unreduced:
        raise ValueError(
            f"{where} has the spec {spec}: each device would hold a part of a sum over {sorted(spec.unreduced)}. "
            "Partial sums (`unreduced=`) neither enter nor leave a pipelined step. Reduce the array in the program "
            "that makes it: `jax.sharding.reshard(x, jax.P())`."
        )
    if spec.reduced and not mesh.is_explicit:
        raise ValueError(
            f"{where} has the spec {spec}, but JAX has types of sums (`reduced=`) on Explicit axes alone. Leave it "
            "out: gradients of parameters that are replicated over a data axis are reduced once, after the loop, "
            "without being told. Or make the mesh with axis_types=(jax.sharding.AxisType.Explicit,) * "
            f"{len(mesh.jax_mesh.axis_names)}."
        )
    names = set(mesh.jax_mesh.axis_names) - {mesh.mpmd_axis_name}
    return canonical(keep_axes(spec, names.__contains__))


def broadcast_shardings(prefix: Any, tree: Any, what: str, mesh: MpmdMesh) -> list[RankSharding]:
    """Return the request for each leaf of `tree`; a prefix may hold specs or shardings, and None for no request.

    Raises:
      ValueError: if `prefix` is not a prefix of `tree`, or names an unknown axis, partial sums or an unsupported
        memory.
    """
    names = set(mesh.jax_mesh.axis_names)
    shardings: list[RankSharding] = []
    for where, node in broadcast_prefix(prefix, tree, what):
        spec: PartitionSpec | None = node if isinstance(node, PartitionSpec) else getattr(node, "spec", None)
        for name in () if spec is None else (*axes_in(spec), *spec.unreduced, *spec.reduced):
            if name not in names:
                raise ValueError(
                    f"{where} is {spec}, but the mesh has no axis {name!r}: its axes are "
                    f"{sorted(names)}. Use one of these, or make a mesh that has it."
                )
        shardings.append(
            RankSharding(None if spec is None else _within_submesh(spec, mesh, where), memory_wanted(node, where))
        )
    return shardings


def broadcast_prefix(prefix: Any, tree: Any, what: str) -> list[tuple[str, Any]]:
    """Return, for each leaf of `tree`, the node of a prefix tree that covers it, and the node's name.

    Raises:
      ValueError: if `prefix` is not a prefix of `tree`.
    """
    if prefix is None:
        return [(what, None)] * len(jax.tree.leaves(tree))
    is_leaf = lambda x: x is None or isinstance(x, (PartitionSpec, Sharding))  # noqa: E731
    nodes: list[tuple[str, Any]] = []

    def add(path: Any, node: Any, sub: Any) -> None:
        nodes.extend([(f"{what}{keystr(path)}", node)] * len(jax.tree.leaves(sub)))

    try:
        jax.tree_util.tree_map_with_path(add, prefix, tree, is_leaf=is_leaf)
    except ValueError as error:
        raise ValueError(
            f"{what} is not a prefix of the tree it describes: {prefix!r} against {jax.tree.structure(tree)}."
        ) from error
    return nodes


def with_memories(fun: Callable[..., Any], out_shardings: Any) -> Callable[..., Any]:
    """Let the function move each of its results to the memory that a prefix tree of shardings names."""
    is_leaf = lambda x: isinstance(x, (PartitionSpec, Sharding))  # noqa: E731
    nodes = jax.tree.leaves(out_shardings, is_leaf=is_leaf)
    if all(getattr(node, "memory_kind", None) is None for node in nodes):
        return fun

    @functools.wraps(fun)
    def moving(*args: Any, **kwargs: Any) -> Any:
        results = fun(*args, **kwargs)
        wanted = [
            memory_wanted(node, where) for where, node in broadcast_prefix(out_shardings, results, "out_shardings")
        ]
        leaves, tree = jax.tree.flatten(results)
        return jax.tree.unflatten(tree, map(moved, leaves, wanted))

    return moving


def moved(leaf: Any, kind: str | None) -> Any:
    """Return an array in the memory that is asked of it; None asks for none."""
    present = (memory_kind_of(jax.typeof(leaf)) or "device") if isinstance(leaf, jax.Array) else "device"
    return leaf if kind is None or kind == present else jax.device_put(leaf, SPACES[kind])


def check_divides(
    names: Sequence[str], values: Sequence[Any], specs: Sequence[PartitionSpec | None], sizes: Mapping[str, int]
) -> None:
    """Refuse specs that cannot cut arguments or results into equal parts over axes of these sizes.

    Raises:
      ValueError: naming the value, the dimension and the axes.

    Example:
      >>> import jax
      >>> check_divides(["argument[0]"], [jax.ShapeDtypeStruct((3, 4), "int8")], [PartitionSpec("data")], {"data": 2})
      Traceback (most recent call last):
        ...
      ValueError: argument[0] has shape (3, 4), and ... cuts its dimension 0 into 2 equal parts (data: 2); 3 is no...
    """
    for name, value, spec in zip(names, values, specs, strict=True):
        if spec is not None:
            _check_one(name, value.shape, spec, sizes)


def _check_one(name: str, shape: Sequence[int], spec: PartitionSpec, sizes: Mapping[str, int]) -> None:
    entries = spec.partitions
    if len(entries) > len(shape):
        raise ValueError(
            f"{name} has shape {tuple(shape)}, but {spec} says how {len(entries)} dimensions are cut. Give an entry "
            "for each dimension at most."
        )
    for dimension, (size, entry) in enumerate(zip(shape, entries, strict=False)):
        axes = entry if isinstance(entry, tuple) else (entry,)
        parts = math.prod(sizes[axis] for axis in axes if axis in sizes)
        if size % parts:
            lower = size - size % parts
            fits = " or ".join(str(n) for n in (lower, lower + parts) if n)
            raise ValueError(
                f"{name} has shape {tuple(shape)}, and {spec} cuts its dimension {dimension} into {parts} equal parts "
                f"({', '.join(f'{axis}: {sizes[axis]}' for axis in axes if axis in sizes)}); {size} is no multiple of "
                f"{parts}. Make the dimension {fits}, or leave it whole: None in its place."
            )
