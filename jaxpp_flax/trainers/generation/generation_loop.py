"""A generation's step, one call of the model for a group of sequences, and the loop in which the groups take turns."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp_flax.engine.tracing.hints import place_with
from jaxpp_flax.engine.tracing.treduce import Last, treduce_i
from jaxpp_flax.schedules import Schedule
from jaxpp_flax.trainers.generation.decoding_form import Decode
from jaxpp_flax.trainers.generation.sampling import Sampling
from jaxpp_flax.trainers.state.train_state import TrainState

__all__ = ["first_progress", "make_step", "take_turns"]


def first_progress(group: Mapping[str, np.ndarray], sampling: Sampling) -> dict[str, Any]:
    """Return the progress of a group before its first call, of NumPy values."""
    ended, position = np.zeros(len(group["tokens"]), bool), np.int32(0)
    return {**group, **sampling.numbers(), "ended": ended, "position": position}


def make_step(decode: Decode, sampling: Sampling, schedule: Schedule | None) -> Callable[..., tuple[Any, Any, Any]]:
    """Return a pure function of `(state, carried, tokens)`, which also runs under plain `jax.jit`.

    `carried` is the pair of the cache, on the devices of its stages, and the progress, on those of the last stage. The
    function returns the new `carried`; the next tokens (batch, 1), on the devices that read `tokens`; and a scalar:
    whether all sequences of the group have ended.

    Args:
      decode: the model in decoding form.
      sampling: chooses the next token; it stands for all with equal compiled parts.
      schedule: of the stages, forward only; None for one stage.
    """

    def step(state: TrainState, carried: Any, tokens: Any) -> tuple[Any, Any, Any]:
        def body(carried: Any, _: Any) -> Any:
            cache, progress = carried
            logits, cache = decode(state, cache, tokens)
            progress, chosen = _advance(sampling, progress, logits[:, -1], tokens.shape[1])
            return (cache, progress), (chosen[:, None], progress["ended"].all())

        carried, (chosen, ended) = treduce_i(body, 1, schedule, Last, init=carried)
        return carried, place_with(chosen, tokens), ended

    return step


def _advance(sampling: Sampling, progress: dict[str, Any], logits: Any, taken: int) -> tuple[dict[str, Any], Any]:
    """Add one token to each sequence: that of its prompt, or the one that is chosen.

    A sequence that has ended goes on until all of its group have; what it adds is not returned.
    """
    position, known = progress["position"] + taken, progress["tokens"]
    new = sampling.choose(logits, progress, progress["sequences"], position)
    in_prompt = position < progress["lengths"]
    of_prompt = jax.lax.dynamic_index_in_dim(known, position, axis=1, keepdims=False)
    chosen = jnp.where(in_prompt, of_prompt, new)
    ended = progress["ended"] | (position + 1 >= progress["limits"])
    for token in sampling.end_tokens:
        ended |= ~in_prompt & (chosen == token)
    known = jax.lax.dynamic_update_index_in_dim(known, chosen, position, axis=1)
    return {**progress, "tokens": known, "ended": ended, "position": position}, chosen


def take_turns(
    groups: Sequence[Mapping[str, np.ndarray]],
    calls: Sequence[Sequence[int]],
    steps: Mapping[int, Callable[..., Any]],
    state: Any,
    carried: list[Any],
    most_under_way: int,
) -> None:
    """Begin the calls of all groups in turn; of `carried`, the progress is left, and caches are freed.

    Wait only for the oldest of more than `most_under_way` calls. So a group that has ended early is known by a call
    that began some turns ago, and begins no further one.

    Args:
      groups: their prompts.
      calls: the number of tokens of each call, for each group.
      steps: the compiled step for each number of tokens.
      state, carried: as the steps take them, on their devices; `carried` for each group.
      most_under_way: how many calls may be unfinished.
    """
    chosen: list[Any] = [None] * len(groups)
    ended, under_way = set[int](), deque[tuple[int, Any]]()
    ends = [list(itertools.accumulate(taken)) for taken in calls]
    for turn in range(max(map(len, calls))):
        for i, (group, taken) in enumerate(zip(groups, calls, strict=True)):
            if i in ended or turn >= len(taken):
                continue
            end = ends[i][turn]
            begin = end - taken[turn]
            # Up to the end of the shortest prompt, all tokens are known here; then the call before has chosen them.
            tokens = group["tokens"][:, begin:end] if not turn or end <= group["lengths"].min() else chosen[i]
            carried[i], chosen[i], has_ended = steps[taken[turn]](state, carried[i], tokens)
            under_way.append((i, has_ended))
            if len(under_way) > most_under_way:
                oldest, has_ended = under_way.popleft()
                if bool(np.asarray(has_ended)):
                    ended.add(oldest)
                    carried[oldest] = (None, carried[oldest][1])
            if turn + 1 == len(taken):
                carried[i] = (None, carried[i][1])
    jax.block_until_ready([has_ended for _, has_ended in under_way])
