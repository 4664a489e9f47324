"""What a generation returns: the new tokens of each sequence, and their log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.engine.runtime.reshard import on_every_process
from jaxpp_flax.trainers.generation.sampling import Sampling

__all__ = ["Generated", "read_generated"]


@dataclass(frozen=True, eq=False)
class Generated(Sequence[np.ndarray]):
    """The sequences that `trainer.generate` adds to prompts, one after another: all samples of the first prompt first.

    It is itself the sequence of `tokens`.

    Args:
      tokens: for each sample the new tokens, int32 (n,), without padding; an end token is included.
      logprobs: for each sample the log-probabilities of these tokens, float32 (n,); None without `logprobs=`.
      prompt_logprobs: for each prompt those of its tokens but the first, float32 (length - 1,), by the model, each
        given the tokens before; None without `prompt_logprobs=True`.

    Example:
      >>> generated = Generated([np.array([3, 1]), np.array([2])])
      >>> len(generated), [row.tolist() for row in generated]
      (2, [[3, 1], [2]])
    """

    tokens: list[np.ndarray]
    logprobs: list[np.ndarray] | None = None
    prompt_logprobs: list[np.ndarray] | None = None

    @overload
    def __getitem__(self, index: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, index: slice) -> list[np.ndarray]: ...
    def __getitem__(self, index: int | slice) -> np.ndarray | list[np.ndarray]:
        return self.tokens[index]

    def __len__(self) -> int:
        return len(self.tokens)

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter(self.tokens)


def read_generated(
    groups: Sequence[Mapping[str, np.ndarray]], ended: Sequence[Mapping[str, Any]], sampling: Sampling
) -> Generated:
    """Fetch the results of all groups, from their progress at the end; every process must call this."""
    tokens, logprobs, prompts = dict[int, np.ndarray](), dict[int, np.ndarray](), dict[int, np.ndarray]()
    for group, progress in zip(groups, ended, strict=True):
        known = _fetch(progress["tokens"])
        scores = _fetch(progress["logprobs"]) if sampling.scores else np.zeros_like(known)
        for row in range(len(known)):
            begin, end = int(group["lengths"][row]), int(group["limits"][row])
            ends = np.flatnonzero(np.isin(known[row, begin:end], sampling.end_tokens))
            end = begin + int(ends[0]) + 1 if ends.size else end
            prompt = int(group["sequences"][row])
            number = prompt * sampling.samples + int(group["samples"][row])
            tokens[number], logprobs[number] = known[row, begin:end].copy(), scores[row, begin:end].copy()
            prompts[prompt] = scores[row, int(group["padding"][row]) + 1 : begin].copy()
    return Generated(
        _in_order(tokens),
        None if sampling.logprobs is None else _in_order(logprobs),
        _in_order(prompts) if sampling.prompt_logprobs else None,
    )


def _in_order(found: Mapping[int, np.ndarray]) -> list[np.ndarray]:
    return [found[i] for i in range(len(found))]


def _fetch(value: Any) -> np.ndarray:
    several = isinstance(value, MpmdArray) and value.sharding.mpmd_mesh.is_multi_process
    return np.asarray(on_every_process(value) if several else value)
