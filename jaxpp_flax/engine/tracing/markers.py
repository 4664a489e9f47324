"""Stage markers: identity primitives that show where a pipeline may be cut.

A marker does not change values. Its transpose emits the matching backward marker. So a differentiated loop body shows
the cuts of the forward pass in order, then the cuts of the backward pass in reverse order. Outside a pipeline, a marker
lowers to no operation.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir

__all__ = [
    "BACKWARD",
    "FORWARD",
    "TANGENT",
    "Mark",
    "block_names",
    "mark_stage_end",
    "marker_p",
    "pipeline_enter_stage",
    "segment_names",
]

FORWARD, TANGENT, BACKWARD = "forward", "tangent", "backward"

T = TypeVar("T")

# Identifies the original of a recomputed or transposed marker. Only identity matters, never the count: a cached inner
# jit repeats an identifier, and the passes align repetitions by order.
_identifiers = itertools.count()

marker_p = jex_core.Primitive("stage_marker")
marker_p.multiple_results = True


marker_p.def_impl(lambda *operands, **_: list(operands))
marker_p.def_abstract_eval(lambda *avals, **_: list(avals))


def _marked(xs: Sequence[Any], which: Callable[[Any], bool], **params: Any) -> list[Any]:
    """Return the values, those of one kind passed through a marker."""
    positions = [i for i, x in enumerate(xs) if which(x)]
    out: list[Any] = list(xs)
    if positions:
        for i, x in zip(positions, marker_p.bind(*(xs[i] for i in positions), **params), strict=True):
            out[i] = x
    return out


def _is_live(tangent: Any) -> bool:
    return not isinstance(tangent, ad.Zero)


def _marker_jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[list[Any], list[Any]]:
    return marker_p.bind(*primals, **params), _marked(tangents, _is_live, **{**params, "direction": TANGENT})


def _marker_transpose(cotangents: Sequence[Any], *operands: Any, **params: Any) -> list[Any]:
    marked = _marked(cotangents, _is_live, **{**params, "direction": BACKWARD})
    return [ct if ad.is_undefined_primal(x) else None for ct, x in zip(marked, operands, strict=True)]


ad.primitive_jvps[marker_p] = _marker_jvp
ad.primitive_transposes[marker_p] = _marker_transpose
batching.primitive_batchers[marker_p] = lambda operands, dims, **params: (marker_p.bind(*operands, **params), dims)
mlir.register_lowering(marker_p, lambda ctx, *operands, **_: list(operands))


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic))


def mark_stage_end(x: T, name: str | None = None, *, closes_block: bool = False) -> T:
    """Mark the end of a stage: work that reads the result may run on the next stage.

    Args:
      x: the values that leave the stage: any pytree with arrays of any shape and dtype. All leaves are returned
        unchanged.
      name: the name of the block that ends here, for assignments by name and for messages.
      closes_block: True if the mark closes a named block: then the work after the last such mark (head, loss) belongs
        to the last block, and is not a block of its own. `PipelineStage` sets this.

    Returns:
      `x`, with its arrays passed through the marker.

    Raises:
      ValueError: if `x` holds no array to mark.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> def model(w, x):
      ...     x = mark_stage_end(jnp.tanh(x @ w[0]))
      ...     return x @ w[1]
      >>> w = jnp.ones((2, 3, 3))
      >>> jax.jit(model)(w, jnp.ones((1, 3))).shape
      (1, 3)

    The idea comes from NVIDIA's JaxPP (`pipeline_enter_stage`), after Xhebraj, Lee, Chen and Grover, "Scaling Deep
    Learning Training with MPMD Pipeline Parallelism", 2024.
    """
    leaves, treedef = jax.tree_util.tree_flatten(x)
    if not any(map(_is_array, leaves)):
        kinds = ", ".join(sorted({type(leaf).__name__ for leaf in leaves})) or "nothing"
        raise ValueError(
            f"mark_stage_end got no array to mark (stage {name!r}; it got {kinds}). "
            "Pass the activations that the next stage reads, e.g. `x = mark_stage_end(x)`."
        )
    params = {"name": name, "identifier": next(_identifiers), "direction": FORWARD, "closes_block": closes_block}
    return jax.tree_util.tree_unflatten(treedef, _marked(leaves, _is_array, **params))


def pipeline_enter_stage(x: T, name: str | None = None) -> T:
    """Mark the end of a stage; the same as `mark_stage_end`, under its older name in NVIDIA's JaxPP."""
    return mark_stage_end(x, name)


@dataclass(frozen=True)
class Mark:
    """A forward marker, for an assignment of stages: a possible cut, in program order."""

    name: str | None
    closes_block: bool
    where: str


def block_names(marks: Sequence[Mark]) -> tuple[str, ...]:
    """Return a distinct name for each mark: its own, numbered if it repeats; `mark_<index>` for an unnamed one.

    Example:
      >>> block_names([Mark("Block", True, "m.py:1"), Mark("Block", True, "m.py:1"), Mark(None, False, "m.py:2")])
      ('Block_0', 'Block_1', 'mark_2')
    """
    plain = [mark.name if mark.name is not None else f"mark_{i}" for i, mark in enumerate(marks)]
    earlier = [plain[:i].count(name) for i, name in enumerate(plain)]
    return tuple(f"{name}_{n}" if plain.count(name) > 1 else name for name, n in zip(plain, earlier, strict=True))


def segment_names(marks: Sequence[Mark]) -> tuple[str, ...]:
    """Return the names of the blocks, and a name for the work after the last mark.

    Example:
      >>> segment_names([Mark("embed", True, "m.py:1"), Mark("head", True, "m.py:2")])
      ('embed', 'head', 'after_head')
    """
    names = block_names(marks)
    tail = f"after_{names[-1]}" if names else "all"
    while tail in names:
        tail += "_"
    return (*names, tail)
