"""The prompts of a generation: checked, sorted by length, and divided into groups of equal size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["check_vocabulary", "make_groups", "read_prompts", "tokens_of_calls"]


def make_groups(
    prompts: Sequence[np.ndarray],
    count: int,
    *,
    max_new_tokens: int,
    multiple: int = 1,
    cache_length: int | None = None,
) -> list[dict[str, np.ndarray]]:
    """Divide prompts into at most `count` groups of one size, a multiple of `multiple`, by length.

    The last sequence stands in several rows, if it needs more to fill its group. The arrays of a group, int32:

    - `tokens` (rows, positions of the cache + 1): the prompts from the left, then zeros.
    - `lengths` (rows,): of the prompts. `limits` (rows,): the largest length with the new tokens.
    - `sequences` (rows,): the number of the sequence among all prompts.

    Raises:
      ValueError: if the longest sequence does not fit into a cache of `cache_length` positions.

    Example:
      >>> groups = make_groups(read_prompts([[5, 6, 7], [8]]), 2, max_new_tokens=1)
      >>> [group["tokens"].tolist() for group in groups]
      [[[8, 0, 0, 0]], [[5, 6, 7, 0]]]
    """
    sizes = np.array([prompt.size for prompt in prompts], np.int32)
    longest = int(sizes.max())
    needed = longest + max_new_tokens - 1  # the last token is not put in
    if cache_length is not None and cache_length < needed:
        raise ValueError(
            f"cache_length={cache_length}: the longest prompt, {longest} tokens, with "
            f"max_new_tokens={max_new_tokens} needs {needed} positions. Pass at least as many, or leave it out."
        )
    order = np.argsort(sizes, kind="stable").astype(np.int32)
    rows = -(-len(order) // (count * multiple)) * multiple
    groups: list[dict[str, np.ndarray]] = []
    for start in range(0, len(order), rows):
        members = order[np.minimum(np.arange(start, start + rows), len(order) - 1)]
        tokens = np.zeros((rows, 1 + (cache_length or needed)), np.int32)
        for row, member in zip(tokens, members, strict=True):
            row[: sizes[member]] = prompts[member]
        limits = sizes[members] + np.int32(max_new_tokens)
        groups.append({"tokens": tokens, "lengths": sizes[members], "limits": limits, "sequences": members})
    return groups


def tokens_of_calls(group: Mapping[str, np.ndarray], prefill: int) -> list[int]:
    """Return the number of tokens that each call of the model takes, until the longest sequence is complete.

    Every sequence of the group starts at position 0. While all are inside their prompts, a call takes a power of two
    of tokens, at most `prefill`; then each call takes one: of the prompt, or the token chosen before.

    Example:
      >>> tokens_of_calls(make_groups(read_prompts([[1] * 7, [1] * 9]), 1, max_new_tokens=3)[0], prefill=4)
      [4, 2, 1, 1, 1, 1, 1]
    """
    left, found = int(group["lengths"].min()), list[int]()
    while left:
        found.append(1 << (min(left, prefill).bit_length() - 1))
        left -= found[-1]
    return found + [1] * (int(group["limits"].max()) - 1 - sum(found))


def read_prompts(prompts: Any, lengths: Any = None) -> list[np.ndarray]:
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
    rows = [_row(i, prompt) for i, prompt in enumerate(prompts if shape is None else np.asarray(prompts))]
    if not rows:
        raise ValueError("prompts is empty: pass at least one list of tokens.")
    if lengths is not None:
        rows = _cut(rows, lengths, shape)
    for i, row in enumerate(rows):
        if not row.size:
            raise ValueError(f"prompts[{i}] is empty. Begin it with a token, such as the tokenizer's first one.")
    return rows


def check_vocabulary(prompts: Sequence[np.ndarray], size: int) -> None:
    """Refuse tokens that the model does not have.

    Raises:
      ValueError: the message names the prompt, the place and the token.
    """
    for i, row in enumerate(prompts):
        wrong = np.flatnonzero((row < 0) | (row >= size))
        if wrong.size:
            raise ValueError(
                f"prompts[{i}] has the token {int(row[wrong[0]])} at position {int(wrong[0])}, but the model has "
                f"tokens from 0 to {size - 1}. Use the tokenizer of this model; pad with lengths=."
            )


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
