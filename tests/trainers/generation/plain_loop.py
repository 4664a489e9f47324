"""The reference of sampling: a loop of the plain model, which computes the whole sequence again for each token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.trainers.model.linen_model import LinenModel


def plain_model(trainer: PipelineTrainer) -> Callable[[Any], Any]:
    """The trainer's model alone, without a cache: a function from tokens (1, length) to logits."""
    if isinstance(trainer.model.adapter, LinenModel):
        module, variables = trainer.model.adapter.module, trainer.gather_variables()
        return lambda tokens: module.apply(variables, tokens)
    model = trainer.gather_model()
    model.eval()
    graphdef, state = nnx.split(model)
    return lambda tokens: nnx.merge(graphdef, state)(tokens)


def processed(logits: Any, temperature: float, top_k: int | None, top_p: float | None) -> np.ndarray:
    """The logits that a token is sampled from, by the definitions, in NumPy and float64."""
    logits = np.asarray(logits, np.float64)
    if temperature == 0:
        return logits
    logits = logits / temperature
    if top_k is not None:
        logits = np.where(logits < np.sort(logits)[-top_k], -np.inf, logits)
    if top_p is not None:
        order = np.argsort(-logits, kind="stable")
        shares = np.exp(logits[order] - logits.max())
        shares /= shares.sum()
        dropped = order[np.cumsum(shares) - shares >= top_p]
        logits = logits.copy()
        logits[dropped] = -np.inf
    return logits


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def generate_plainly(
    function: Callable[[Any], Any],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    length: int,
    num_samples: int = 1,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    eos_token_id: int | None = None,
    logprobs: str | None = "raw",
) -> tuple[list[list[int]], list[list[float]], list[list[float]]]:
    """Return new tokens, their log-probabilities, and those of the prompts, as `Generated` has them.

    Sequences are padded on the right to `length`, so that one program serves all: the model is causal.
    """
    compiled = jax.jit(function)
    tokens, scores, of_prompts = list[list[int]](), list[list[float]](), list[list[float]]()
    for i, prompt in enumerate(prompts):
        row = np.zeros((1, length), np.int32)
        row[0, : len(prompt)] = prompt
        logits = np.asarray(compiled(row)[0], np.float64)
        of_prompts.append([log_softmax(logits[j])[prompt[j + 1]] for j in range(len(prompt) - 1)])
        for sample in range(num_samples):
            own, new, found = row.copy(), list[int](), list[float]()
            for position in range(len(prompt), len(prompt) + max_new_tokens):
                logits = np.asarray(compiled(own)[0, position - 1])
                drawn = processed(logits, temperature, top_k, top_p)
                if temperature == 0:
                    token = int(np.argmax(logits))
                else:
                    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), i), position)
                    key = key if sample == 0 else jax.random.fold_in(key, sample)
                    token = int(jax.random.categorical(key, jnp.asarray(drawn, jnp.float32)))
                found.append(log_softmax(drawn if logprobs == "processed" else np.float64(logits))[token])
                own[0, position] = token
                new.append(token)
                if token == eos_token_id:
                    break
            tokens.append(new)
            scores.append(found)
    return tokens, scores, of_prompts
