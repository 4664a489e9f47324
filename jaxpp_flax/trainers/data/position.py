"""The position of a run in its data, as JSON: a checkpoint keeps this position."""

from __future__ import annotations

import base64
import copy
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, Literal

import jax
import numpy as np

from jaxpp_flax.messages import warn_user
from jaxpp_flax.processes import exchange_values, process_group, value_hash
from jaxpp_flax.trainers.errors import DataPositionError
from jaxpp_flax.trainers.progress import Display

ResumeData = Literal["fast_forward", "refuse", "restart"]

# No bar is shown for fewer batches than this.
_WORTH_A_BAR = 100
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
    iterator: Any = None  # the result of the iterator's `get_state`, which grain iterators have
    order: str | None = None  # the hash of these batches in their order, of data whose order is not known

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "iterator": _encode(self.iterator)}

    @classmethod
    def from_json(cls, value: Any) -> DataPosition | None:
        return None if value is None else cls(**{**value, "iterator": _decode(value["iterator"])})


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


def state_of(iterator: Any) -> Any:
    """Return a copy of the iterator's own state, if the iterator has `get_state` and `set_state`.

    The iterator may return the object that each draw changes.
    """
    if not _has(iterator, "get_state", "set_state"):
        return None
    state = iterator.get_state()
    try:
        return copy.deepcopy(state)
    except Exception:  # a checkpoint cannot hold it either: `_encode` refuses it by name
        return state


def has_own_state(iterator: Any, position: DataPosition) -> bool:
    """Return True if `iterator` can go to `position` with its saved state; else batches are drawn up to `position`."""
    return position.iterator is not None and _has(iterator, "set_state")


def _has(iterator: Any, *methods: str) -> bool:
    return all(callable(getattr(iterator, name, None)) for name in methods)  # a subclass may set them to None


def examples_in(batch: Any) -> int | None:
    """Return the number of examples of a batch: the first axis of its first array; None without an array.

    Example:
      >>> examples_in({"scale": np.float32(1), "x": np.zeros((6, 3))}), examples_in(7)
      (6, None)
    """
    return next((shape[0] for leaf in jax.tree.leaves(batch) if (shape := getattr(leaf, "shape", ()))), None)


def hash_of(batch: Any) -> str | None:
    """Return a hash of a batch's NumPy arrays; None without one, and for a process that reads a part of the batch.

    Example:
      >>> hash_of({"x": np.arange(3)}) == hash_of({"x": np.arange(3)}), hash_of(7)
      (True, None)
    """
    arrays = [leaf for leaf in jax.tree.leaves(batch) if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject]
    if not arrays or jax.process_count() > 1:
        return None
    return "".join(str(value_hash(array, _HASHED)) for array in arrays[:_HASHED_LEAVES])


@dataclass
class Drawn:
    """The batches that an iterator has given so far in its pass, used or dropped."""

    batches: int = 0
    examples: int | None = 0  # None if batches are not arrays
    batch_size: int | None = None  # of the first batch of the first pass
    hashes: bool = False  # whether to note the order
    order: str | None = ""  # the hash of all these batches; None if one has no hash

    def add(self, batch: Any) -> None:
        size = examples_in(batch)
        mine = hash_of(batch) if self.hashes and self.order is not None else None
        self.order = None if mine is None else sha256(f"{self.order} {mine}".encode()).hexdigest()
        self.batch_size = size if self.batch_size is None else self.batch_size
        self.batches += 1
        self.examples = None if size is None or self.examples is None else self.examples + size


def named(data: Any) -> str:
    """Return the name of the class of `data`, with its article.

    Example:
      >>> named([]), named(iter({}.items()))
      ('a list', 'a dict_itemiterator')
      >>> named(type("Indexed", (), {})())
      'an Indexed'
    """
    name = type(data).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def keeps_order(data: Any) -> bool:
    """Return True if all passes over `data` are equal; a subclass of a list may shuffle them.

    Example:
      >>> keeps_order([1, 2]), keeps_order(iter([1, 2]))
      (True, False)
    """
    return type(data) in (list, tuple, range)


def seek_pass(
    data: Iterable[Any], iterator: Iterator[Any], position: DataPosition, how: ResumeData, display: Display
) -> Iterator[Any]:
    """Return an iterator over the pass of `position`; `iterator` is the first one that `data` has made.

    All passes over a list are equal. Other data may give each pass a new order, so it goes through the passes before.
    """
    if not position.epoch or iterator is data or keeps_order(data):
        return iterator
    if has_own_state(iterator, position):  # a loader may count its passes
        for _ in range(position.epoch):
            iterator = iter(data)
        return iterator
    if how == "refuse":
        raise DataPositionError(
            f"the checkpoint was written in pass {position.epoch + 1} over the data, and the order of a pass over a "
            f"{type(data).__name__} may depend on the passes before. Use an iterator with get_state and set_state such "
            'as grain\'s, or a list; or resume_data="fast_forward" draws these passes and drops them.'
        )
    count = position.batches - position.in_epoch
    with _bar(count, f"of {position.epoch} passes, since the next order may depend on them", display) as tell:
        done = 0
        for _ in range(position.epoch):
            for _ in iterator:
                done += 1
                tell(done)
            iterator = iter(data)
    return iterator


@contextmanager
def _bar(count: int, of: str, display: Display) -> Generator[Callable[[int], None]]:
    """Show the progress of drawing `count` batches, if it may take long."""
    if count < _WORTH_A_BAR:
        yield lambda _: None
        return
    display.message(f"fast-forwarding the data by {count} batches{of and ' '}{of}")
    display.start(count, 0)
    try:
        yield display.advance
    finally:
        display.stop()


def seek(
    data: Iterable[Any],
    iterator: Iterator[Any],
    position: DataPosition,
    how: ResumeData,
    display: Display,
    drawn: Drawn,
) -> None:
    """Move an iterator over `data` to `position`, and update `drawn`, the batches that it has given in this pass.

    If batches are arrays, their examples are counted, so that the batch size may change between runs. `how` is the
    method for an iterator without `set_state`. Refuse an iterator that ends before the position, or is past it.
    """
    if has_own_state(iterator, position):
        # A copy: the iterator may change the object with each draw.
        iterator.set_state(copy.deepcopy(position.iterator))  # pyright: ignore[reportAttributeAccessIssue]
        drawn.batches, drawn.examples, drawn.batch_size = position.in_epoch, position.examples, position.batch_size
        return
    left = _left(position, drawn)
    if not left:
        return
    if left < 0:
        raise DataPositionError(
            f"the checkpoint was written after {position.in_epoch} batches of a pass over the data, but "
            f"{drawn.batches} are drawn from this {type(iterator).__name__}, which cannot go back. Pass data that "
            "starts at its beginning."
        )
    if how == "refuse":
        raise DataPositionError(
            f"the checkpoint was written after {position.in_epoch} batches of a pass over the data, and a "
            f"{type(iterator).__name__} has no `set_state`. Use an iterator with get_state and set_state "
            'such as grain\'s; or resume_data="fast_forward" draws these batches and drops them.'
        )
    with _bar(position.in_epoch - drawn.batches, "", display) as tell:
        _drop(iterator, position, drawn, tell)
    _compare_order(data, position, drawn, display)


def _left(position: DataPosition, drawn: Drawn) -> int:
    """Return the number of examples up to the position; the number of batches, if examples are not known."""
    if position.examples is None or drawn.examples is None:
        return position.in_epoch - drawn.batches
    return position.examples - drawn.examples


def _compare_order(data: Iterable[Any], position: DataPosition, drawn: Drawn, display: Display) -> None:
    """Warn if the batches before the position are others than in the run before; tell if that cannot be known."""
    if not drawn.hashes or drawn.batch_size != position.batch_size:  # in batches of another size
        return
    name = f"the data ({named(data)})"
    place = f"up to batch {position.in_epoch} of pass {position.epoch + 1}"
    if position.order is None or drawn.order is None:
        if keeps_order(data):  # few programs shuffle a list, and each run with JAX arrays would be told
            return
        why, remedy = "the checkpoint does not tell", "Give an iterator with get_state and set_state."
        if jax.process_count() > 1:
            why = "each process reads a part"
        elif drawn.order is None:
            why = "they are no NumPy arrays"
            remedy = "Give NumPy arrays, or an iterator with get_state and set_state."
        display.message(
            f"{name} was drawn again {place}. Whether these are the batches of the run before is not known: {why}. "
            f"{remedy}"
        )
    elif position.order != drawn.order:
        warn_user(
            f"{name} does not draw the order of the run before: {place} it has drawn other batches. The run goes on, "
            "but it may repeat examples and leave others out. Shuffle with a fixed seed, or give the iterator "
            "get_state and set_state, as grain's have.",
            UserWarning,
        )


def _drop(iterator: Iterator[Any], position: DataPosition, drawn: Drawn, tell: Callable[[int], None]) -> None:
    """Draw and drop batches up to the position."""
    done, size = 0, None
    while (left := _left(position, drawn)) > 0:
        try:
            batch = next(iterator)
        except StopIteration:
            raise DataPositionError(
                f"the checkpoint was written after {position.in_epoch} batches of a pass over the data, but this data "
                f'ended after {drawn.batches}. Pass the same data, or resume_data="restart" to start it again.'
            ) from None
        drawn.add(batch)
        done, size = done + 1, examples_in(batch)
        tell(done)
    if left < 0:
        raise DataPositionError(
            f"the checkpoint was written after {position.examples} examples of a pass over the data, in batches of "
            f"{position.batch_size}. Batches of {size} do not end there. Use a batch size that divides "
            f'{position.examples}, or resume_data="restart" to start the data again.'
        )


def check_batch_size(iterator: Any, position: DataPosition, batch: Any, drawn: Drawn) -> None:
    """Refuse another batch size in the first batch after `set_state`: the state counts batches of the old size.

    If it is refused, `drawn` counts batches of the new size: these are what the iterator has given.
    """
    size, before = examples_in(batch), position.batch_size
    if not has_own_state(iterator, position):
        return  # examples were counted
    if size is None or before is None or size == before:
        return
    if size < before and state_of(iterator) is not None and _is_last(iterator):
        return  # the rest of a pass
    drawn.examples, drawn.batch_size = drawn.batches * size, size
    raise DataPositionError(
        f"the checkpoint was written with batches of {before} examples, and this data gives batches of "
        f"{size}: the saved state of the iterator counts batches of the old size. Use batches of "
        f'{before} examples, or resume_data="restart" to start the data again.'
    )


def _is_last(iterator: Any) -> bool:
    """Return True if the iterator has no further batch; the position of the iterator does not change."""
    state, nothing = state_of(iterator), object()
    try:
        return next(iterator, nothing) is nothing
    finally:
        iterator.set_state(state)


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
