"""The prompts of a generation: checked, sorted by length, and divided into groups of equal size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Group", "Prompts"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """Sequences that one call of the model continues together; unused rows pad the group.

    Args:
      tokens: (rows, positions of the cache + 1) int32: the prompts from the left, then zeros.
      lengths: (rows,) int32: of the prompts; an unused row has 1.
      limits: (rows,) int32: the largest length with the new tokens; an unused row has 1.
      sequences: (rows,) int32: the number of the sequence among all prompts; an unused row has -1.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    limits: np.ndarray
    sequences: np.ndarray

    def calls(self, prefill: int) -> list[int]:
        """Return the number of tokens that each call of the model takes, until the longest sequence is complete.

        Every sequence of the group starts at position 0. While all are inside their prompts, a call takes a power of
        two of tokens, at most `prefill`; then each call takes one: of the prompt, or the token chosen before.

        Example:
          >>> Prompts.of([[1] * 7, [1] * 9]).groups(1, max_new_tokens=3)[0].calls(prefill=4)
          [4, 2, 1, 1, 1, 1, 1]
        """
        used = self.sequences >= 0
        left, found = int(self.lengths[used].min()), list[int]()
        while left:
            found.append(1 << (min(left, prefill).bit_length() - 1))
            left -= found[-1]
        return found + [1] * (int(self.limits.max()) - 1 - sum(found))


@dataclass(frozen=True, eq=False)
class Prompts:
    """The checked prompts.

    Example:
      >>> prompts = Prompts.of([[5, 6, 7], [8]])
      >>> prompts.longest, [group.tokens.tolist() for group in prompts.groups(2, max_new_tokens=1)]
      (3, [[[8, 0, 0, 0]], [[5, 6, 7, 0]]])
    """

    rows: tuple[np.ndarray, ...]  # one-dimensional, int32

    @classmethod
    def of(cls, prompts: Any, lengths: Any = None) -> Prompts:
        """Read prompts: a sequence of sequences of tokens; or an array (batch, length), with `lengths` if padded.

        Raises:
          TypeError: if the tokens are no whole numbers.
          ValueError: if there is no prompt, a prompt is empty, or `lengths` do not fit.
        """
        if isinstance(prompts, (str, bytes)):
            raise TypeError(f"prompts={prompts!r} is text. Pass lists of tokens: those of your tokenizer.")
        shape = getattr(prompts, "shape", None)
        if shape is not None and len(shape) != 2:
            raise ValueError(
                f"prompts has shape {tuple(shape)}: an array of prompts is (batch, length). Pass prompts[None] for a "
                "single one, or a list of lists."
            )
        given = np.asarray(prompts) if shape is not None else prompts
        rows = [_row(i, prompt) for i, prompt in enumerate(given)]
        if not rows:
            raise ValueError("prompts is empty: pass at least one list of tokens.")
        if lengths is not None:
            rows = _cut(rows, lengths, shape)
        for i, row in enumerate(rows):
            if not row.size:
                raise ValueError(f"prompts[{i}] is empty. Begin it with a token, such as the tokenizer's first one.")
        return cls(tuple(rows))

    @property
    def longest(self) -> int:
        """The length of the longest prompt."""
        return max(row.size for row in self.rows)

    def check_vocabulary(self, size: int) -> None:
        """Refuse tokens that the model does not have.

        Raises:
          ValueError: the message names the prompt, the place and the token.
        """
        for i, row in enumerate(self.rows):
            wrong = np.flatnonzero((row < 0) | (row >= size))
            if wrong.size:
                raise ValueError(
                    f"prompts[{i}] has the token {int(row[wrong[0]])} at position {int(wrong[0])}, but the model has "
                    f"tokens from 0 to {size - 1}. Use the tokenizer of this model; pad with lengths=."
                )

    def groups(
        self, count: int, *, max_new_tokens: int, multiple: int = 1, cache_length: int | None = None
    ) -> list[Group]:
        """Divide the prompts into at most `count` groups of one size, a multiple of `multiple`, by length.

        Raises:
          ValueError: if the longest sequence does not fit into a cache of `cache_length` positions.
        """
        needed = self.longest + max_new_tokens - 1  # the last token is not put in
        if cache_length is not None and cache_length < needed:
            raise ValueError(
                f"cache_length={cache_length}: the longest prompt, {self.longest} tokens, with "
                f"max_new_tokens={max_new_tokens} needs {needed} positions. Pass at least as many, or leave it out."
            )
        width = 1 + (needed if cache_length is None else cache_length)
        order = sorted(range(len(self.rows)), key=lambda i: self.rows[i].size)
        size = -(-len(order) // (count * multiple)) * multiple
        return [
            self._group(order[start : start + size], (size, width), max_new_tokens)
            for start in range(0, len(order), size)
        ]

    def _group(self, members: Sequence[int], shape: tuple[int, int], max_new_tokens: int) -> Group:
        tokens, size = np.zeros(shape, np.int32), shape[0]
        lengths, limits = np.ones(size, np.int32), np.ones(size, np.int32)
        sequences = np.full(size, -1, np.int32)
        for row, member in enumerate(members):
            prompt = self.rows[member]
            tokens[row, : prompt.size] = prompt
            lengths[row], limits[row], sequences[row] = prompt.size, prompt.size + max_new_tokens, member
        return Group(tokens=tokens, lengths=lengths, limits=limits, sequences=sequences)


def _row(number: int, prompt: Any) -> np.ndarray:
    row = np.asarray(prompt)
    if row.ndim != 1:
        raise ValueError(f"prompts[{number}] has shape {row.shape}: a prompt is a list of tokens.")
    if row.size and not np.issubdtype(row.dtype, np.integer):
        raise TypeError(f"prompts[{number}] holds {row.dtype} values: tokens are whole numbers.")
    if row.size and not np.array_equal(row, row.astype(np.int32)):
        raise ValueError(f"prompts[{number}] has a token that is no 32-bit number: {row.min()} to {row.max()}.")
    return row.astype(np.int32)


def _cut(rows: list[np.ndarray], lengths: Any, shape: Any) -> list[np.ndarray]:
    if shape is None:
        raise ValueError("lengths are for an array of prompts, padded on the right; lists have their own lengths.")
    counts = np.asarray(lengths)
    if counts.shape != (len(rows),) or not np.issubdtype(counts.dtype, np.integer):
        raise ValueError(
            f"lengths has shape {counts.shape} and dtype {counts.dtype}: it must be one whole number for each of the "
            f"{len(rows)} prompts."
        )
    if counts.min() < 1 or counts.max() > shape[1]:
        raise ValueError(f"lengths={counts.tolist()}: each must be from 1 to {shape[1]}, the length of the array.")
    return [row[:count] for row, count in zip(rows, counts, strict=True)]
