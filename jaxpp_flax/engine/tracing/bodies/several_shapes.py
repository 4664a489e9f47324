"""The bodies of a loop over microbatches of several shapes: one for each shape, over the same constants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpp_flax.engine.tracing.bodies.microbatches import Microbatches, StackedMicrobatches, shape_numbers
from jaxpp_flax.engine.tracing.ir import Graph, Value

__all__ = ["Entries", "check_same_types", "over_shared_constants", "split_operands"]


@dataclass(frozen=True, kw_only=True)
class Entries:
    """The microbatches of a loop, and one for each further shape.

    Attributes:
      leaves: the leaves of each entry, with an axis of size 1 in front: a loop slices its microbatch from them.
      pattern: for each entry, the number of its shape.
      length: the number of entries that are microbatches; the others are shapes that the loop is prepared for.
      tree: the structure of a microbatch.
    """

    leaves: tuple[tuple[Any, ...], ...]
    pattern: tuple[int, ...]
    length: int
    tree: Any

    @classmethod
    def of(cls, batch: Microbatches | StackedMicrobatches) -> Entries:
        """Read the entries of a batch; the leaves of `Microbatches` get their first axis."""
        items = tuple(batch.items)
        if isinstance(batch, Microbatches) and batch.own_rows:
            raise ValueError(
                "treduce got Microbatches(own_rows=True), whose rows are not all here: only PipelineTrainer joins the "
                "rows of several processes. Pass whole microbatches."
            )
        if isinstance(batch, StackedMicrobatches):
            stacked = (*items, *batch.further)
        else:
            stacked = jax.tree.map(lambda leaf: jnp.expand_dims(jnp.asarray(leaf), 0), items)
        leaves = tuple(tuple(jax.tree.leaves(item)) for item in stacked)
        pattern = shape_numbers([tuple(map(jax.typeof, entry)) for entry in leaves])
        return cls(leaves=leaves, pattern=tuple(pattern), length=len(items), tree=jax.tree.structure(items[0]))

    @property
    def of_shapes(self) -> list[tuple[Any, ...]]:
        """The leaves of the first entry of each shape."""
        return [self.leaves[self.pattern.index(number)] for number in range(max(self.pattern) + 1)]

    def microbatch(self, leaves: Sequence[Any], index: Any) -> Any:
        """Return a microbatch from the leaves of its entry.

        The index is clamped to the only place. So the body slices what it reads by the index, as any loop's does, and
        every analysis knows these leaves for data.
        """
        sliced = [jax.lax.dynamic_index_in_dim(leaf, index, 0, keepdims=False) for leaf in leaves]
        return jax.tree.unflatten(self.tree, sliced)


def over_shared_constants(traced: Sequence[tuple[Graph, Sequence[Any]]]) -> tuple[tuple[Graph, ...], list[Any]]:
    """Return graphs that all take the same constants, the arrays that any of them captures; and these constants.

    Args:
      traced: graphs whose first inputs are the arrays that they capture, with these arrays.
    """
    shared: dict[int, Any] = {id(array): array for _, captured in traced for array in captured}
    graphs: list[Graph] = []
    for graph, captured in traced:
        own = dict(zip(map(id, captured), graph.inputs, strict=False))
        inputs = [own.get(key) or Value(jax.typeof(array)) for key, array in shared.items()]
        graphs.append(Graph((*inputs, *graph.inputs[len(captured) :]), graph.outputs, graph.equations))
    return tuple(graphs), list(shared.values())


def split_operands(operands: Sequence[Any], entries: int, num_leaves: int) -> tuple[list[Any], list[list[Any]]]:
    """Return the shared ones of a loop's constants, and the leaves of each entry, which stand behind them."""
    first = len(operands) - entries * num_leaves
    leaves = [list(operands[begin : begin + num_leaves]) for begin in range(first, len(operands), num_leaves)]
    return list(operands[:first]), leaves if num_leaves else [[] for _ in range(entries)]


def check_same_types(results: Any, others: Any, shapes: tuple[str, str], same_type: Callable[[Any, Any], bool]) -> None:
    """Refuse a body that returns other types for one shape of microbatches than for another.

    Raises:
      TypeError: naming the leaf of the results, and the shapes.
    """
    (leaves, tree), (further, other) = map(jax.tree_util.tree_flatten_with_path, (results, others))
    if tree != other:
        raise TypeError(
            f"treduce's body returns the structure {tree} for microbatches of {shapes[0]}, but {other} for those of "
            f"{shapes[1]}. Return the same structure for every shape."
        )
    for (path, one), (_, two) in zip(leaves, further, strict=True):
        if not same_type(one, two):
            raise TypeError(
                f"treduce cannot reduce its result{jax.tree_util.keystr(path)}: it is {_text(one)} for microbatches of "
                f"{shapes[0]}, but {_text(two)} for those of {shapes[1]}. Results are stacked or added over all "
                "microbatches: reduce this one to a type that no length changes, or pad it."
            )


def _text(struct: Any) -> str:
    return f"{struct.dtype}{list(struct.shape)}"
