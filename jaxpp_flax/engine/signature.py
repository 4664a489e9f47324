"""A call of a compiled function: the types of its arguments, and whether a later call has the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray

__all__ = ["Leaf", "Signature", "not_an_array", "type_of"]


@dataclass(frozen=True)
class Leaf:
    """The type of one leaf of the arguments."""

    path: str
    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool
    spec: PartitionSpec

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Signature:
    """What a compiled step takes and returns."""

    tree: Any
    leaves: tuple[Leaf, ...]
    out_tree: Any
    donated: tuple[bool, ...]

    def check(self, leaves: Sequence[Any], tree: Any, args: Any, kwargs: Any) -> None:
        """Refuse a call with other arguments.

        Args:
          leaves, tree: of `(args, kwargs)`.

        Raises:
          TypeError: naming what differs.
        """
        if tree != self.tree:
            raise TypeError(
                "a compiled step was called with arguments of another structure than it was compiled for: "
                f"{_first_difference(self, args, kwargs)} Compile it again for these, or call the function itself."
            )
        wrong: list[str] = []
        for leaf, expected in zip(leaves, self.leaves, strict=True):
            try:
                shape, dtype, _ = type_of(leaf)
            except TypeError:  # no array
                wrong.append(f"argument{expected.path}: got a {type(leaf).__name__}, compiled for {expected}")
                continue
            if (shape, dtype) != (expected.shape, expected.dtype):
                wrong.append(f"argument{expected.path}: got {dtype}{list(shape)}, compiled for {expected}")
        if wrong:
            shown = "; ".join(wrong[:10]) + (f"; and {len(wrong) - 10} more" if len(wrong) > 10 else "")
            raise TypeError(
                f"a compiled step was called with arguments of other types than it was compiled for: {shown}. "
                "Compile it again for these, or call the function itself, which compiles once per signature."
            )


def type_of(leaf: Any) -> tuple[tuple[int, ...], Any, bool]:
    """Shape, dtype and whether the type is weak; of other values those that JAX gives them.

    Raises:
      TypeError: if `leaf` is no array.
    """
    if isinstance(leaf, MpmdArray):
        return leaf.shape, leaf.dtype, leaf.weak_type
    if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
        return tuple(leaf.shape), leaf.dtype, bool(getattr(leaf, "weak_type", False))
    if isinstance(leaf, (np.ndarray, np.generic)):
        return tuple(leaf.shape), jax.dtypes.canonicalize_dtype(leaf.dtype), False
    aval = jax.typeof(leaf)
    return tuple(aval.shape), aval.dtype, bool(aval.weak_type)


def not_an_array(tree: Any, leaves: Sequence[Any]) -> TypeError:
    """What to raise when the type of some leaf of `(args, kwargs)` is unknown to JAX."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(jax.tree_util.tree_unflatten(tree, leaves)):
        try:
            type_of(leaf)
        except TypeError:
            return TypeError(
                f"argument{jax.tree_util.keystr(path[1:])} is a {type(leaf).__name__}, which is no array. Pass "
                "arrays or numbers, or name the argument in `static_argnums`/`static_argnames`."
            )
    return TypeError("an argument is no array.")


def _first_difference(wanted: Signature, args: Any, kwargs: Any) -> str:
    got = {jax.tree_util.keystr(path[1:]) for path, _ in jax.tree_util.tree_leaves_with_path((args, kwargs))}
    expected = {leaf.path for leaf in wanted.leaves}
    missing, extra = sorted(expected - got), sorted(got - expected)
    parts = [f"missing argument{p}" for p in missing[:5]] + [f"unexpected argument{p}" for p in extra[:5]]
    return (", ".join(parts) or "the containers differ") + "."
