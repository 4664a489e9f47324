"""Where a run stands in its data, as JSON: what a checkpoint keeps of the data iterator."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import jax
import numpy as np

from jaxpp_flax.checkpoint.agreeing import everyones
from jaxpp_flax.trainers.errors import DataPositionError
from jaxpp_flax.trainers.progress import Meter

__all__ = ["DataPosition", "ResumeData", "own_position", "seek", "state_of", "together"]

ResumeData = Literal["fast_forward", "refuse", "restart"]

# Below this many batches no bar is shown.
_WORTH_A_BAR = 100


@dataclass(frozen=True, kw_only=True)
class DataPosition:
    """How much of its data a run has used.

    Args:
      batches: drawn in all.
      epoch: complete passes before the one under way.
      in_epoch: batches drawn in that one.
      iterator: what the data's own `get_state` returned (grain iterators have it); None without one.

    Example:
      >>> position = DataPosition(batches=7, epoch=1, in_epoch=2, iterator={"seed": b"ab"})
      >>> DataPosition.from_json(position.to_json()) == position
      True
    """

    batches: int
    epoch: int
    in_epoch: int
    iterator: Any = None

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "iterator": _encode(self.iterator)}

    @classmethod
    def from_json(cls, value: Any) -> DataPosition | None:
        """The inverse; None for None."""
        return None if value is None else cls(**{**value, "iterator": _decode(value["iterator"])})


def together(mine: Any) -> Any:
    """The positions of all processes as JSON: one, where all stand alike, and else a list."""
    all_of_them = everyones("where the data stands", mine)
    return mine if all(position == mine for position in all_of_them) else {"processes": all_of_them}


def own_position(value: Any) -> DataPosition | None:
    """This process's, of what `together` gave.

    A run of another number of processes divides its data otherwise: it goes on after as many batches, each iterator
    from its own beginning.

    Example:
      >>> mine = DataPosition(batches=7, epoch=1, in_epoch=2)
      >>> own_position(together(mine.to_json())) == mine
      True
    """
    if not isinstance(value, dict) or "processes" not in value:
        return DataPosition.from_json(value)
    positions = value["processes"]
    if len(positions) == jax.process_count():
        return DataPosition.from_json(positions[jax.process_index()])
    first = DataPosition.from_json(positions[0])
    return None if first is None else replace(first, iterator=None)


def state_of(iterator: Any) -> Any:
    """The iterator's own state, where it has `get_state` and `set_state`."""
    return iterator.get_state() if hasattr(iterator, "get_state") and hasattr(iterator, "set_state") else None


def seek(iterator: Iterator[Any], position: DataPosition, how: ResumeData, meter: Meter) -> None:
    """Bring a fresh iterator of a pass to `position`.

    Raises:
      DataPositionError: if it has no `set_state` and `how` is "refuse", or it ends before that position.
    """
    if position.iterator is not None and hasattr(iterator, "set_state"):
        iterator.set_state(position.iterator)  # pyright: ignore[reportAttributeAccessIssue]
        return
    count = position.in_epoch
    if not count:
        return
    if how == "refuse":
        raise DataPositionError(
            f"the checkpoint was written after {count} batches of a pass over the data, and a "
            f"{type(iterator).__name__} has no `set_state` to go there. Use an iterator with get_state and set_state "
            'such as grain\'s; or resume_data="fast_forward" draws these batches and drops them.'
        )
    bar = count >= _WORTH_A_BAR
    if bar:
        meter.message(f"fast-forwarding the data by {count} batches")
        meter.start(count, 0)
    try:
        for done in range(count):
            try:
                next(iterator)
            except StopIteration:
                raise DataPositionError(
                    f"the checkpoint was written after {count} batches of a pass over the data, but this data ended "
                    f'after {done}. Pass the same data, or resume_data="restart" to begin it anew.'
                ) from None
            if bar:
                meter.advance(done + 1)
    finally:
        if bar:
            meter.stop()


def _encode(value: Any) -> Any:
    """JSON for what iterators return; other kinds are refused."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, bytes):
        return {"__bytes__": base64.b64encode(value).decode("ascii")}
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.ascontiguousarray(value)
        data = base64.b64encode(array.tobytes()).decode("ascii")
        return {"__array__": data, "dtype": array.dtype.str, "shape": list(np.shape(value))}
    if isinstance(value, dict):
        return {"__items__": [[_encode(key), _encode(item)] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        return {"__tuple__" if isinstance(value, tuple) else "__list__": [_encode(item) for item in value]}
    raise DataPositionError(
        f"the data iterator's get_state returned a {type(value).__name__}, which a checkpoint cannot hold. Return "
        "numbers, texts, bytes, NumPy arrays, lists, tuples and dictionaries of these."
    )


def _decode(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "__bytes__" in value:
        return base64.b64decode(value["__bytes__"])
    if "__array__" in value:
        flat = np.frombuffer(base64.b64decode(value["__array__"]), np.dtype(value["dtype"]))
        return flat.reshape(value["shape"]).copy()
    if "__items__" in value:
        return {_decode(key): _decode(item) for key, item in value["__items__"]}
    if "__tuple__" in value:
        return tuple(_decode(item) for item in value["__tuple__"])
    return [_decode(item) for item in value["__list__"]]
