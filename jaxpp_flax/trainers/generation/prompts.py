"""The prompts of a generation: checked, sorted by length, and divided into groups of equal size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Lengths", "check_vocabulary", "make_groups", "read_prompts", "tokens_of_calls"]


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """The slots of a generation: how long prompts and caches are, and how many tokens of a prompt one call takes.

    With `padded`, all prompts end in slot `padded`, and shorter ones begin later. Otherwise all begin in slot 0.
    """

    new: int
    cache: int
    prefill: int
    padded: int | None = None

    @classmethod
    def of(
        cls, longest: int, new: int, *, pads: bool, most: int | None, prefill: int | None, cache: int | None
    ) -> Lengths:
        """Choose what is not given: `pads` and `most` are what the model takes.

        Padded prompts have a power of two of slots, or a multiple of `prefill`, so that few programs serve all.

        Raises:
          ValueError: if the longest sequence does not fit into the cache, or the model takes fewer tokens in a call.

        Example:
          >>> Lengths.of(100, 8, pads=True, most=None, prefill=None, cache=None)
          Lengths(new=8, cache=135, prefill=128, padded=128)
        """
        needed = longest + new - 1  # the last token is not put in
        if cache is not None and cache < needed:
            raise ValueError(
                f"cache_length={cache}: the longest prompt, {longest} tokens, with max_new_tokens={new} needs {needed} "
                "positions. Pass at least as many, or leave it out."
            )
        if prefill is not None and most is not None and prefill > most:
            raise ValueError(f"prefill={prefill}: the model's cache takes {most} tokens in one call, by its own word.")
        limit = prefill or most
        if not pads:
            return cls(new=new, cache=cache or needed, prefill=limit or longest)
        padded = -(-longest // limit) * limit if limit else 1 << (longest - 1).bit_length()
        padded = padded if cache is None else min(padded, cache - new + 1)
        return cls(new=new, cache=cache or padded + new - 1, prefill=limit or padded, padded=padded)


def make_groups(
    prompts: Sequence[np.ndarray], count: int, lengths: Lengths, *, multiple: int = 1, samples: int = 1
) -> list[dict[str, np.ndarray]]:
    """Divide prompts into at most `count` groups of one size, a multiple of `multiple`, by length.

    The last sequence stands in several rows, if it needs more to fill its group. The arrays of a group, int32, have
    `samples` rows for each of its prompts:

    - `tokens` (rows, slots of the cache + 1): the prompts, and zeros.
    - `padding` (rows,): the slots before a prompt. `lengths` (rows,): those up to its end. `limits` (rows,): up to the
      end of the new tokens.
    - `sequences` (rows,): the number of the prompt among all. `samples` (rows,): the number of the sample.

    Example:
      >>> prompts = read_prompts([[5, 6, 7], [8]])
      >>> [group["tokens"].tolist() for group in make_groups(prompts, 2, Lengths(new=1, cache=3, prefill=1))]
      [[[8, 0, 0, 0]], [[5, 6, 7, 0]]]
      >>> [group["tokens"].tolist() for group in make_groups(prompts, 2, Lengths(new=1, cache=4, prefill=4, padded=4))]
      [[[0, 0, 0, 8, 0]], [[0, 5, 6, 7, 0]]]
    """
    sizes = np.array([prompt.size for prompt in prompts], np.int32)
    order = np.argsort(sizes, kind="stable").astype(np.int32)
    rows = -(-len(order) // (count * multiple)) * multiple
    groups: list[dict[str, np.ndarray]] = []
    for start in range(0, len(order), rows):
        members = order[np.minimum(np.arange(start, start + rows), len(order) - 1)]
        padding = np.zeros(rows, np.int32) if lengths.padded is None else np.int32(lengths.padded) - sizes[members]
        ends = padding + sizes[members]
        tokens = np.zeros((rows, 1 + lengths.cache), np.int32)
        for row, member, begin, end in zip(tokens, members, padding, ends, strict=True):
            row[begin:end] = prompts[member]
        group = {"tokens": tokens, "padding": padding, "lengths": ends, "limits": ends + np.int32(lengths.new)}
        group = {name: np.repeat(of, samples, axis=0) for name, of in {**group, "sequences": members}.items()}
        groups.append({**group, "samples": np.tile(np.arange(samples, dtype=np.int32), rows)})
    return groups


def tokens_of_calls(group: Mapping[str, np.ndarray], lengths: Lengths) -> tuple[list[int], list[int]]:
    """Return the number of tokens of each call while all sequences are inside their prompts, and of each later one.

    Padded prompts are taken in equal parts, and what is left first. Others are taken in powers of two, up to the end
    of the shortest. A later call takes one token: of a longer prompt, or the token chosen before.

    Example:
      >>> lengths = Lengths(new=3, cache=11, prefill=4)
      >>> tokens_of_calls(make_groups(read_prompts([[1] * 7, [1] * 9]), 1, lengths)[0], lengths)
      ([4, 2, 1], [1, 1, 1, 1])
    """
    left, found = int(group["lengths"].min()), list[int]()
    if lengths.padded is not None:
        found = [left % lengths.prefill] * (left % lengths.prefill > 0) + [lengths.prefill] * (left // lengths.prefill)
        left = 0
    while left:
        found.append(1 << (min(left, lengths.prefill).bit_length() - 1))
        left -= found[-1]
    return found, [1] * (int(group["limits"].max()) - 1 - sum(found))


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
