"""A generation's step, one call of the model for a group of sequences, and the loop in which the groups take turns."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp_flax.engine.tracing.hints import place_with
from jaxpp_flax.engine.tracing.treduce import Last, treduce_i
from jaxpp_flax.schedules import Schedule
from jaxpp_flax.trainers.generation.decoding_form import Decode
from jaxpp_flax.trainers.generation.sampling import Sampling, log_probabilities
from jaxpp_flax.trainers.state.train_state import TrainState

__all__ = ["Turns", "first_progress", "make_step", "take_turns"]


def first_progress(group: Mapping[str, np.ndarray], sampling: Sampling) -> dict[str, Any]:
    """Return the progress of a group before its first call, of NumPy values."""
    ended, slot = np.zeros(len(group["tokens"]), bool), np.int32(0)
    scores = {"logprobs": np.zeros(group["tokens"].shape, np.float32)} if sampling.scores else {}
    return {**group, **sampling.numbers(), **scores, "ended": ended, "slot": slot}


def make_step(decode: Decode, sampling: Sampling, schedule: Schedule | None) -> Callable[..., tuple[Any, Any, Any]]:
    """Return a pure function of `(state, carried, tokens, places)`, which also runs under plain `jax.jit`.

    `carried` is the pair of the cache, on the devices of its stages, and the progress, on those of the last stage. The
    function returns the new `carried`; the next tokens (batch, 1), on the devices that read `tokens`; and a scalar:
    whether all sequences of the group have ended. `places` are for explicit caches, on the devices that read them.

    Args:
      decode: the model in decoding form.
      sampling: chooses the next token; it stands for all with equal compiled parts.
      schedule: of the stages, forward only; None for one stage.
    """

    def step(state: TrainState, carried: Any, tokens: Any, places: Any) -> tuple[Any, Any, Any]:
        def body(carried: Any, _: Any) -> Any:
            cache, progress = carried
            logits, cache = decode(state, cache, tokens, places)
            progress, chosen = _advance(sampling, progress, logits)
            return (cache, progress), (chosen[:, None], progress["ended"].all())

        carried, (chosen, ended) = treduce_i(body, 1, schedule, Last, init=carried)
        return carried, place_with(chosen, tokens), ended

    return step


def _advance(sampling: Sampling, progress: dict[str, Any], logits: Any) -> tuple[dict[str, Any], Any]:
    """Add one token to each sequence: that of its prompt, or the one that is chosen.

    In a call for prompts, the samples of a prompt share its logits. A sequence that has ended goes on until all of its
    group have; what it adds is not returned.
    """
    slot, known = progress["slot"] + logits.shape[1], progress["tokens"]
    samples = len(known) // len(logits)
    last = jnp.repeat(logits[:, -1], samples, axis=0)
    new = sampling.choose(last, progress, slot - progress["padding"])
    in_prompt = slot < progress["lengths"]
    of_prompt = jax.lax.dynamic_index_in_dim(known, slot, axis=1, keepdims=False)
    chosen = jnp.where(in_prompt, of_prompt, new)
    ended = progress["ended"] | (slot + 1 >= progress["limits"])
    for token in sampling.end_tokens:
        ended |= ~in_prompt & (chosen == token)
    known = jax.lax.dynamic_update_index_in_dim(known, chosen, slot, axis=1)
    progress = {**progress, "tokens": known, "ended": ended, "slot": slot}
    if sampling.scores:
        scores = sampling.logprobs_of(chosen, last, progress)
        if sampling.prompt_logprobs and sampling.logprobs == "processed":
            scores = jnp.where(in_prompt, log_probabilities(last, chosen), scores)
        progress["logprobs"] = _add_scores(sampling, progress, logits, scores)
    return progress, chosen


def _add_scores(sampling: Sampling, progress: Mapping[str, Any], logits: Any, scores: Any) -> Any:
    """Write the log-probabilities of the tokens after those of this call; `scores` (rows,) are those of the last."""
    count, known = logits.shape[1], progress["tokens"]
    found, samples = progress["logprobs"], len(known) // len(logits)
    if sampling.prompt_logprobs and count > 1:
        begin = progress["slot"] - (count - 1)
        targets = jax.lax.dynamic_slice_in_dim(known[::samples], begin, count - 1, axis=1)
        of_prompt = jnp.repeat(log_probabilities(logits[:, :-1], targets), samples, axis=0)
        found = jax.lax.dynamic_update_slice_in_dim(found, of_prompt, begin, axis=1)
    return jax.lax.dynamic_update_index_in_dim(found, scores, progress["slot"], axis=1)


@dataclass(frozen=True)
class Turns:
    """The calls of a group.

    Args:
      tokens: of its prompts, (prompts, slots).
      prompt, later: the number of tokens of each call in which all sequences are inside their prompts, and after.
      padding: of the prompts, and of all their samples, on the devices that read it; None if no device does.
    """

    tokens: np.ndarray
    prompt: Sequence[int]
    later: Sequence[int]
    padding: tuple[Any, Any] | None = None

    def calls(self) -> list[tuple[int, int, bool]]:
        """Return the first slot of each call, its number of tokens, and whether it is one of prompts."""
        taken = [*self.prompt, *self.later]
        begins = itertools.accumulate(taken[:-1], initial=0)
        return [(*of, i < len(self.prompt)) for i, of in enumerate(zip(begins, taken, strict=True))]

    def places(self, begin: int, in_prompts: bool) -> dict[str, Any]:
        """Return the places of a call for an explicit cache; none for an implicit one."""
        return {} if self.padding is None else {"padding": self.padding[not in_prompts], "slot": np.int32(begin)}


def take_turns(
    groups: Sequence[Turns],
    steps: Mapping[tuple[int, bool], Callable[..., Any]],
    state: Any,
    carried: list[Any],
    most_under_way: int,
    repeat: Callable[[Any], Any] | None = None,
) -> None:
    """Begin the calls of all groups in turn; of `carried`, the progress is left, and caches are freed.

    Wait only for the oldest of more than `most_under_way` calls. So a group that has ended early is known by a call
    that began some turns ago, and begins no further one.

    Args:
      groups: their calls.
      steps: the compiled step for each number of tokens, of prompts (True) or later (False).
      state, carried: as the steps take them, on their devices; `carried` for each group.
      most_under_way: how many calls may be unfinished.
      repeat: returns the cache of all samples from that of the prompts; None if they are the same.
    """
    chosen: list[Any] = [None] * len(groups)
    ended, under_way = set[int](), deque[tuple[int, Any]]()
    all_calls = [of.calls() for of in groups]
    for turn in range(max(map(len, all_calls))):
        for i, (of, calls) in enumerate(zip(groups, all_calls, strict=True)):
            if i in ended or turn >= len(calls):
                continue
            begin, taken, in_prompts = calls[turn]
            if turn == len(of.prompt) and repeat is not None:
                carried[i] = (repeat(carried[i][0]), carried[i][1])
            # Inside the prompts all tokens are known here; later ones are those of the call before.
            tokens = of.tokens[:, begin : begin + taken] if in_prompts else chosen[i]
            step = steps[taken, in_prompts]
            carried[i], chosen[i], has_ended = step(state, carried[i], tokens, of.places(begin, in_prompts))
            under_way.append((i, has_ended))
            if len(under_way) > most_under_way:
                oldest, has_ended = under_way.popleft()
                if bool(np.asarray(has_ended)):
                    ended.add(oldest)
                    carried[oldest] = (None, carried[oldest][1])
            if turn + 1 == len(calls):
                carried[i] = (None, carried[i][1])
    jax.block_until_ready([has_ended for _, has_ended in under_way])
