"""The rule for a last batch smaller than the first: leave it out, or refuse it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from jaxpp_flax.trainers.data.position import examples_in
from jaxpp_flax.trainers.errors import BatchError
from jaxpp_flax.trainers.progress import Display

Remainder = Literal["drop", "error"]

_CHOICE = 'remainder="drop" leaves such batches out'


@dataclass(kw_only=True)
class RemainderRule:
    """The rule for a batch that is smaller than the first one. A larger one is refused.

    Even if such a batch can be cut into microbatches, a step of its size would be compiled, and each of its examples
    would weigh more.

    Example:
      >>> rule = RemainderRule(how="drop")
      >>> [size for size in (8, 8, 5, 4) if rule.takes(size, 8)]
      [8, 8]
    """

    how: Remainder | None  # None: "error" if all sizes are known before the first step, else "drop"
    # Prints a message about the first batch that is left out.
    display: Display = field(default_factory=Display.silent)
    _has_told: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if self.how is not None and self.how not in get_args(Remainder):
            raise ValueError(f'remainder={self.how!r}: it must be "drop" or "error".')

    @classmethod
    def of(cls, remainder: Remainder | None, global_batch_size: int | None, display: Display) -> RemainderRule:
        """Make the rule from the arguments of `fit`, or raise a `ValueError` if they contradict each other."""
        if global_batch_size is not None and remainder is not None:
            raise ValueError(
                f"remainder={remainder!r} and global_batch_size={global_batch_size}: every batch then has so many "
                "examples, and a process sees only its part of them. Make the data leave out smaller batches."
            )
        return cls(how=remainder if global_batch_size is None else "error", display=display)

    def left_out(self, data: Any, begin: int, end: int | None) -> int:
        """Before the first step, count the batches of a pass, from `begin` to `end`, that will be left out.

        For data that is not a list or tuple the count is 0. Refuse a batch of another size than the first one that
        cannot be left out.
        """
        if not isinstance(data, (list, tuple)) or not data:  # another sequence may load each batch anew
            return 0
        full, count = examples_in(data[0]), 0
        for index in range(begin, len(data) if end is None else end):
            size = examples_in(data[index])
            if not size or not full or size == full:
                continue
            if size > full or self.how in ("error", None):
                raise BatchError(f"batch {index} of the {len(data)} in data has {size} examples. {_rule(size, full)}")
            count += 1
        return count

    def takes(self, size: int | None, full: int | None) -> bool:
        """Return True to train on a batch of `size` examples, False to leave it out.

        `full` is the number of examples of the first batch; None if it is not known.
        """
        if not size or not full or size == full:
            return True
        if size > full or self.how == "error":
            raise BatchError(f"data gave a batch of {size} examples. {_rule(size, full)}")
        if not self._has_told:
            self._has_told = True
            also = "" if self.how == "drop" else f". {_CHOICE}"
            self.display.message(
                f"a batch of {size} examples is left out, as are others like it: the first one has {full}{also}"
            )
        return False


def _rule(size: int, full: int) -> str:
    """Return the rest of the message about a batch of another size than the first one."""
    remedy = _CHOICE if size < full else "Only smaller ones can be left out: put a full batch first"
    return f"The first one has {full}, and all must have this size. {remedy}. `train_step` takes batches of any size."
