"""The position of a run in its data, a value that a checkpoint keeps as JSON."""

from __future__ import annotations

import base64
import importlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import jax
import numpy as np

from jaxpp_flax.engine.tracing.bodies.microbatches import Microbatches
from jaxpp_flax.processes import exchange_values, process_group, value_hash
from jaxpp_flax.trainers.errors import DataPositionError

__all__ = ["BEGINNING", "DataPosition", "examples_in", "gather_positions", "own_position"]

# The elements to hash of an array, and the arrays of a batch: enough to tell two batches apart, in microseconds.
_HASHED, _HASHED_LEAVES = 1 << 10, 4


@dataclass(frozen=True, kw_only=True)
class DataPosition:
    """The amount of data that a run has used.

    Example:
      >>> position = DataPosition(batches=7, epoch=1, in_epoch=2, iterator={"seed": b"ab"})
      >>> DataPosition.from_json(position.to_json()) == position
      True
    """

    batches: int  # drawn in all
    epoch: int  # complete passes before the current pass
    in_epoch: int  # batches drawn in the current pass
    examples: int | None = None  # in these batches, if they are arrays; None for positions of older checkpoints
    batch_size: int | None = None  # the number of examples in the first of these batches
    iterator: Any = None  # the iterator's own state: the result of its `get_state` or `state_dict`
    order: str | None = None  # the hash of these batches in their order, of data whose order is not known

    def after(self, leaves: Sequence[Any], *, hashes: bool, is_sized: bool = True) -> DataPosition:
        """Return the position after a batch with these leaves, without the iterator's state; `hashes`: note the order.

        `is_sized`: the first leaf counts the examples of the batch; not so of `Microbatches`.

        Example:
          >>> after = BEGINNING.after([np.zeros((6, 3))], hashes=False)
          >>> after.batches, after.in_epoch, after.examples, after.batch_size
          (1, 1, 6, 6)
        """
        size = examples_in(leaves) if is_sized else None
        own = _hash_of(leaves) if hashes and self.order is not None else None
        return DataPosition(
            batches=self.batches + 1,
            epoch=self.epoch,
            in_epoch=self.in_epoch + 1,
            examples=None if size is None or self.examples is None else self.examples + size,
            batch_size=size if self.batch_size is None else self.batch_size,
            order=None if own is None else sha256(f"{self.order} {own}".encode()).hexdigest(),
        )

    def next_pass(self) -> DataPosition:
        """Return the beginning of the next pass."""
        return replace(self, epoch=self.epoch + 1, in_epoch=0, examples=0, iterator=None, order="")

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "iterator": _encode(self.iterator)}

    @classmethod
    def from_json(cls, value: Any) -> DataPosition | None:
        return None if value is None else cls(**{**value, "iterator": _decode(value["iterator"])})


BEGINNING = DataPosition(batches=0, epoch=0, in_epoch=0, examples=0, order="")


def gather_positions(mine: Any) -> Any:
    """Return the positions of all processes as JSON: one position if all are equal, else a list."""
    positions = exchange_values(process_group(), "where the data stands", mine)
    return mine if all(position == mine for position in positions) else {"processes": positions}


def own_position(value: Any) -> DataPosition | None:
    """Return this process's position from the result of `gather_positions`.

    A run with another number of processes divides its data differently. The run continues after the same number of
    batches, and each iterator starts from its own beginning.

    Example:
      >>> mine = DataPosition(batches=7, epoch=1, in_epoch=2)
      >>> own_position(gather_positions(mine.to_json())) == mine
      True
    """
    if not isinstance(value, dict) or "processes" not in value:
        return DataPosition.from_json(value)
    positions = value["processes"]
    if len(positions) == jax.process_count():
        return DataPosition.from_json(positions[jax.process_index()])
    first = DataPosition.from_json(positions[0])
    return None if first is None else replace(first, examples=None, batch_size=None, iterator=None)


def examples_in(batch: Any) -> int | None:
    """Return the number of examples of a batch: the first axis of its first array.

    None without an array, and for `Microbatches`: these may have any number of examples.

    Example:
      >>> examples_in({"scale": np.float32(1), "x": np.zeros((6, 3))}), examples_in(7)
      (6, None)
    """
    if isinstance(batch, Microbatches):
        return None
    return next((shape[0] for leaf in jax.tree.leaves(batch) if (shape := getattr(leaf, "shape", ()))), None)


def _hash_of(leaves: Sequence[Any]) -> str | None:
    """Return a hash of the NumPy arrays; None without one, and for a process that reads a part of the batch."""
    arrays = [leaf for leaf in leaves if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject]
    if not arrays or jax.process_count() > 1:
        return None
    return "".join(str(value_hash(array, _HASHED)) for array in arrays[:_HASHED_LEAVES])


def _encode(value: Any) -> Any:
    """Convert an iterator's state to JSON; refuse values of unsupported types."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, bytes):
        return {"__bytes__": base64.b64encode(value).decode("ascii")}
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.ascontiguousarray(value)
        data = base64.b64encode(array.tobytes()).decode("ascii")
        return {"__array__": data, "dtype": array.dtype.str, "shape": list(np.shape(value))}
    if type(value).__module__ == "torch" and hasattr(value, "numpy"):  # the state of a random generator of torch
        return {**_encode(value.numpy()), "torch": True}
    if isinstance(value, dict):
        return {"__items__": [[_encode(key), _encode(item)] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        return {"__tuple__" if isinstance(value, tuple) else "__list__": [_encode(item) for item in value]}
    raise DataPositionError(
        f"the data iterator's state_dict or get_state returned a {type(value).__name__}, which a checkpoint cannot "
        "hold. Return numbers, texts, bytes, NumPy arrays, lists, tuples and dictionaries of these."
    )


def _decode(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "__bytes__" in value:
        return base64.b64decode(value["__bytes__"])
    if "__array__" in value:
        flat = np.frombuffer(base64.b64decode(value["__array__"]), np.dtype(value["dtype"]))
        array = flat.reshape(value["shape"]).copy()
        return importlib.import_module("torch").from_numpy(array) if value.get("torch") else array
    if "__items__" in value:
        return {_decode(key): _decode(item) for key, item in value["__items__"]}
    if "__tuple__" in value:
        return tuple(_decode(item) for item in value["__tuple__"])
    return [_decode(item) for item in value["__list__"]]
