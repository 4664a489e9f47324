"""The rule for a last batch smaller than the first: leave it out, fill it with uncounted examples, or refuse it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import jax
import numpy as np

from jaxpp_flax.trainers.data.batch import batch_size, dtype_of
from jaxpp_flax.trainers.data.position import examples_in
from jaxpp_flax.trainers.errors import BatchError, LossError
from jaxpp_flax.trainers.progress import Display

Remainder = Literal["drop", "pad", "error"]

MASK = "mask"
"""The name of the batch leaf that marks the examples that count."""

_CHOICES = (
    'remainder="drop" leaves such batches out; "pad" fills them with examples that the loss leaves out by '
    f"batch[{MASK!r}]"
)


@dataclass(kw_only=True)
class RemainderRule:
    """The rule for a batch that is smaller than the first one. A larger one is refused.

    Even if such a batch can be cut into microbatches, a step of its size would be compiled, and each of its examples
    would weigh more.

    Example:
      >>> rule = RemainderRule(how="drop")
      >>> [size for size in (8, 8, 5, 4) if rule.fitted(np.zeros(size), 8) is not None]
      [8, 8]
    """

    how: Remainder | None  # None: "error" if all sizes are known before the first step, else "drop"
    display: Display = field(
        default_factory=lambda: Display(False)
    )  # prints a message about the first batch that is left out
    _has_told: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if self.how is not None and self.how not in get_args(Remainder):
            raise ValueError(f'remainder={self.how!r}: it must be "drop", "pad" or "error".')

    @classmethod
    def of(cls, remainder: Remainder | None, global_batch_size: int | None, display: Display) -> RemainderRule:
        """Make the rule from the arguments of `fit`, or raise a `ValueError` if they contradict each other."""
        if global_batch_size is not None and remainder is not None:
            raise ValueError(
                f"remainder={remainder!r} and global_batch_size={global_batch_size}: every batch then has so many "
                "examples, of which a process sees a part alone. Let the data leave out or fill smaller ones."
            )
        return cls(how=remainder if global_batch_size is None else "error", display=display)

    def left_out(self, data: Any, begin: int, end: int | None) -> int:
        """Before the first step, count the batches of a pass, from `begin` to `end`, that will be left out.

        For data that is not a list or tuple the count is 0. Refuse a batch of another size than the first one that
        can be neither left out nor filled.
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
            count += self.how == "drop"
        return count

    def fitted(self, batch: Any, full: int | None) -> Any:
        """Return the batch to train on: unchanged or filled; None to leave the batch out.

        `full` is the number of examples of the first batch; None if it is not known.
        """
        size = examples_in(batch)
        if not size or not full or size == full:
            return batch
        if size > full or self.how == "error":
            raise BatchError(f"data gave a batch of {size} examples. {_rule(size, full)}")
        if self.how == "pad":
            return filled(batch, full)
        if not self._has_told:
            self._has_told = True
            also = "" if self.how == "drop" else f". {_CHOICES}"
            self.display.message(
                f"a batch of {size} examples is left out, as are others like it: the first one has {full}{also}"
            )
        return None


def _rule(size: int, full: int) -> str:
    """Return the rest of the message about a batch of another size than the first one."""
    remedy = _CHOICES if size < full else "Only smaller ones can be left out or filled: put a full batch first"
    return f"The first one has {full}, and all need its size. {remedy}. `train_step` takes batches of any size."


def filled(batch: Any, size: int) -> Any:
    """Repeat the last example of a batch up to `size` examples, with a mask of 0 for the repeated ones.

    Example:
      >>> filled({"x": np.array([5, 7]), "mask": np.ones(2)}, 3)
      {'x': array([5, 7, 7]), 'mask': array([1., 1., 0.])}
    """
    check_mask(batch)
    examples = batch_size(batch)
    rows = np.minimum(np.arange(size), examples - 1)

    def repeat(leaf: Any) -> Any:
        if not np.shape(leaf):
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct((size, *leaf.shape[1:]), dtype_of(leaf))
        return leaf[rows]

    repeated = {name: jax.tree.map(repeat, leaf) for name, leaf in batch.items()}
    if not isinstance(repeated[MASK], jax.ShapeDtypeStruct):
        counts = (np.arange(size) < examples).reshape(-1, *[1] * (repeated[MASK].ndim - 1))
        repeated[MASK] = (repeated[MASK] * counts).astype(repeated[MASK].dtype)
    return repeated


def check_mask(batch: Any) -> None:
    """Refuse a batch that cannot be filled: raise a `BatchError` that names the missing part."""
    mask = batch.get(MASK) if isinstance(batch, Mapping) else None
    if mask is None or not np.shape(mask):
        kind = f"a dict of {', '.join(map(repr, batch))}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
        raise BatchError(
            f'remainder="pad" needs batches that are dicts with {MASK!r}, an array whose first axis counts the '
            f"examples: 1 for each, and 0 where one is filled in. This batch is {kind}. {_MASKED_LOSS}"
        )


def check_masked(weighed_by: Sequence[str], unweighted: Sequence[str] | None) -> None:
    """Before the first step, refuse "pad" if the filled examples would count.

    Args:
      weighed_by: the leaves of the batch that loss and weight depend on, such as "['mask']".
      unweighted: the metrics that are not pairs (sum, weight); None if the loss itself is not such a pair.
    """
    if unweighted is None or f"[{MASK!r}]" not in weighed_by:
        given = "the loss is a mean" if unweighted is None else f"loss and weight do not both use batch[{MASK!r}]"
        raise LossError(
            f'remainder="pad" fills a batch with examples that are not to count, but {given}. {_MASKED_LOSS}'
        )
    if unweighted:
        raise LossError(
            f'remainder="pad" fills a batch with examples that are not to count, but the metric {unweighted[0]!r} is a '
            f"mean over all. Return it as a pair too: (sum over batch[{MASK!r}], sum of batch[{MASK!r}])."
        )


_MASKED_LOSS = (
    f"Let loss_fn return the pair (jnp.sum(losses * batch[{MASK!r}]), jnp.sum(batch[{MASK!r}])), with one value of "
    "`losses` for each example."
)
