"""The leaves of a batch: their names, and the refusal of what is no array, with a conversion that works."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp_flax.engine.arrays.mesh import named_memory
from jaxpp_flax.layers.marking import article
from jaxpp_flax.trainers.errors import BatchError

__all__ = ["check_leaf", "is_list_of_numbers", "leaf_name", "leaves_of"]

# How other libraries make NumPy arrays of theirs.
_TO_NUMPY = {
    "torch": "`tensor.numpy()` in `collate_fn=` (of bfloat16, `tensor.float().numpy()`); for a tokenizer, "
    '`return_tensors="np"`',
    "tensorflow": "`dataset.as_numpy_iterator()`; for ragged ones, `tensor.to_tensor().numpy()`",
    "pandas": "`series.to_numpy(dtype)`",
    "polars": "`series.to_numpy()`",
}


def is_list_of_numbers(node: Any) -> bool:
    """Return True for a list or tuple of numbers, or of such lists: JAX would take each number for a leaf."""
    if type(node) not in (list, tuple) or not node:  # a named tuple has names for its numbers
        return False
    return all(_is_number(item) or is_list_of_numbers(item) for item in node)


def _is_number(item: Any) -> bool:
    return isinstance(item, complex | float | int) or (hasattr(item, "dtype") and np.shape(item) == ())


def leaves_of(batch: Any) -> tuple[list[tuple[Any, Any]], Any]:
    """Return the paths and leaves of a batch, and its structure; a list of numbers is a leaf, for `check_leaf`."""
    return jax.tree_util.tree_flatten_with_path(batch, is_leaf=is_list_of_numbers)


def leaf_name(path: Any) -> str:
    """Return the name of a batch leaf for messages, such as "batch['x']"."""
    return f"batch{jax.tree_util.keystr(path)}"


def check_leaf(path: Any, leaf: Any) -> None:
    """Refuse a leaf that is neither an array nor a number, or in other than device memory: raise a `BatchError`."""
    if type(leaf) is np.ndarray and _is_jax_dtype(leaf.dtype):  # most leaves
        return
    if is_list_of_numbers(leaf):
        raise BatchError(f"{leaf_name(path)} is a {type(leaf).__name__} of {_about_list(leaf)}")
    if not isinstance(leaf, complex | float | int) and not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        kind = type(leaf).__name__
        raise BatchError(f"{leaf_name(path)} is {article(kind)} {kind}, {_about_object(leaf_name(path), leaf)}")
    if isinstance(leaf, np.ma.MaskedArray):
        raise BatchError(
            f"{leaf_name(path)} is a masked array, whose mask JAX does not know. Pass `leaf.filled(value)`, and the "
            "mask as a leaf of its own."
        )
    if not _is_jax_dtype(getattr(leaf, "dtype", np.dtype(float))):
        raise BatchError(f"{leaf_name(path)} is {_about_dtype(leaf)}")
    if (kind := named_memory(getattr(leaf, "sharding", None))) is not None:
        raise BatchError(
            f"{leaf_name(path)} is a jax.Array in {kind!r} memory, but a step computes with its "
            "batch in the devices' own memory. Pass `np.asarray(leaf)`, which the step copies to its devices, or "
            "`jax.device_put(leaf, jax.devices()[0])`."
        )


@lru_cache  # called for each leaf of each step
def _is_jax_dtype(dtype: Any) -> bool:
    try:
        kinds = (np.number, np.bool_) if isinstance(dtype, (np.dtype, type)) else (jax.dtypes.extended,)  # PRNG keys
        return any(jnp.issubdtype(dtype, kind) for kind in kinds)
    except TypeError:  # another library's
        return False


def _about_list(leaf: Any) -> str:
    """Return what is wrong with a list of numbers, after the word "of"."""
    begin = f"{len(leaf)} {'numbers' if _is_number(leaf[0]) else 'lists'}"
    try:
        np.asarray(leaf)
    except ValueError:
        lengths = sorted({len(item) for item in leaf if not _is_number(item)})
        return (
            f"{begin} of different lengths ({', '.join(map(str, lengths))}). Pad them to one length, then convert them "
            'with `np.asarray`; a tokenizer does both with `padding=True, return_tensors="np"`.'
        )
    return (
        f"{begin}, and each number would be a constant of the step. Convert it with `np.asarray`; give real constants "
        "names, in a dict."
    )


def _about_object(name: str, leaf: Any) -> str:
    """Return what is wrong with a leaf that is no array, after its type and a comma."""
    kind = type(leaf).__name__
    if isinstance(leaf, str | bytes):
        return (
            "not an array, and a step takes numbers only. Leave texts out of the batch: "
            "`{name: batch[name] for name in names}`."
        )
    if isinstance(leaf, Mapping):
        passes = ", in the loader's `collate_fn=` or a class with `__iter__`" if name == "batch" else ""
        return f"a mapping that JAX does not know as a pytree. Convert it with `dict({name})`{passes}."
    if isinstance(leaf, list | tuple):
        base = "list" if isinstance(leaf, list) else "tuple"
        return f"a {base} that JAX does not know as a pytree. Convert it with `{base}({name})`."
    if dataclasses.is_dataclass(leaf):
        return (
            f"which JAX does not know as a pytree. Register its class once: `jax.tree_util.register_dataclass({kind})`."
        )
    if hasattr(leaf, "__attrs_attrs__"):
        return f"which JAX does not know as a pytree. Convert it with `attrs.asdict({name}, recurse=False)`."
    if hasattr(leaf, "__array__"):
        return "not an array. Convert it with `np.asarray`."
    if hasattr(leaf, "__dict__") and not callable(leaf):
        return f"which JAX does not know as a pytree. Convert it with `vars({name})`, or pass a dict of its arrays."
    return "not an array. Leave it out of the batch, or pass a NumPy array in its place."


def _about_dtype(leaf: Any) -> str:
    """Return what is wrong with an array whose dtype JAX does not take, after the word "is"."""
    library = type(leaf).__module__.partition(".")[0]
    if getattr(leaf.dtype, "names", None):
        return (
            f"a structured array of dtype {leaf.dtype}, but JAX takes arrays of one type. Pass its fields in a dict: "
            "`{name: leaf[name] for name in leaf.dtype.names}`."
        )
    if library in ("numpy", "jaxlib", "jax"):
        return (
            f"an array of dtype {leaf.dtype}, but a step takes numbers only. Leave it out of the batch "
            "(`{name: batch[name] for name in names}`), or convert it with `astype`."
        )
    how = _TO_NUMPY.get(library, "`np.asarray(leaf)`, if it can")
    return f"a {library} {type(leaf).__name__}, which JAX does not take. Let the loader give NumPy arrays: {how}."
