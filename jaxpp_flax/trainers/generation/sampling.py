"""The choice of the next token from logits: greedy, or sampled with a temperature, `top_k` and `top_p`; its logprob."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp_flax.counts import check_count, is_whole

__all__ = ["Sampling", "log_probabilities"]

_SMALLEST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The checked options of sampling. `temperature` 0 is greedy: the token with the largest logit, the first of equal.

    Raises:
      ValueError, TypeError: if an option has a value that does not fit; the message names the option.

    Example:
      >>> sampling = Sampling(temperature=0.7, top_k=2)
      >>> logits = jnp.asarray([[0.0, 3.0, 2.9, -1.0]])
      >>> numbers = {**sampling.numbers(), "sequences": jnp.arange(1), "samples": jnp.zeros(1, jnp.int32)}
      >>> int(sampling.choose(logits, numbers, jnp.array([4]))[0]) in (1, 2)
      True
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    eos_token_id: int | Sequence[int] | None = None
    samples: int = 1
    logprobs: Literal["raw", "processed"] | None = None
    prompt_logprobs: bool = False

    def __post_init__(self) -> None:
        if not _is_number(self.temperature) or not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature!r}: it must be 0 (greedy) or a positive number.")
        if self.top_k is not None:
            check_count("top_k", self.top_k)
        if self.top_p is not None and not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise ValueError(f"top_p={self.top_p!r}: it must be a number above 0, at most 1, or None.")
        if not is_whole(self.seed) or not 0 <= self.seed < 1 << 32:
            raise ValueError(f"seed={self.seed!r}: it must be a whole number from 0 to 2**32 - 1.")
        for name, value in (("top_k", self.top_k), ("top_p", self.top_p)):
            if value is not None and self.is_greedy:
                raise ValueError(
                    f"{name}={value!r} and temperature=0.0: greedy decoding takes the most likely token, so {name} "
                    "would have no effect. Pass a temperature above 0, such as 1.0, or leave it out."
                )
        if check_count("num_samples", self.samples) > 1 and self.is_greedy:
            raise ValueError(
                f"num_samples={self.samples} and temperature=0.0: greedy decoding gives a prompt's samples the same "
                "tokens. Pass a temperature above 0, such as 1.0, or num_samples=1."
            )
        if self.logprobs not in (None, "raw", "processed"):
            raise ValueError(
                f'logprobs={self.logprobs!r}: it must be "raw" (of the model), "processed" (after temperature, top_k '
                "and top_p) or None."
            )
        if not all(map(is_whole, self.end_tokens)):
            raise TypeError(
                f"eos_token_id={self.eos_token_id!r}: it must be a token (a whole number), several tokens, or None."
            )

    @property
    def is_greedy(self) -> bool:
        """True if no random number is drawn."""
        return self.temperature == 0

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """The tokens that end a sequence."""
        given = () if self.eos_token_id is None else self.eos_token_id
        return tuple(given) if isinstance(given, (list, tuple, np.ndarray)) else (given,)  # type: ignore[return-value]

    @property
    def compiled(self) -> tuple[Any, ...]:
        """The part that is compiled into a step; the numbers may change without a new compilation."""
        ends, logprobs = tuple(map(int, self.end_tokens)), (self.logprobs, bool(self.prompt_logprobs))
        return (self.is_greedy, self.top_k, self.top_p is not None, ends, *logprobs)

    @property
    def scores(self) -> bool:
        """True if any log-probability is asked for."""
        return self.logprobs is not None or bool(self.prompt_logprobs)

    def check_vocabulary(self, size: int) -> None:
        """Refuse what a vocabulary of this size does not have.

        Raises:
          ValueError: naming the option.
        """
        if self.top_k is not None and self.top_k > size:
            raise ValueError(f"top_k={self.top_k}: the model has {size} tokens. Leave it out to sample among all.")
        for token in self.end_tokens:
            if not 0 <= token < size:
                raise ValueError(f"eos_token_id has the token {token}, but the model has tokens from 0 to {size - 1}.")

    def numbers(self) -> dict[str, Any]:
        """Return the part that a step takes as arguments: scalars.

        Devices compute in float32, where a smaller number would be 0 and a larger one infinite.
        """
        return {
            "temperature": np.float32(min(max(self.temperature, _SMALLEST), _LARGEST)),
            "top_p": np.float32(1.0 if self.top_p is None else max(self.top_p, _SMALLEST)),
            "seed": np.uint32(self.seed),
        }

    def choose(self, logits: Any, progress: Mapping[str, Any], positions: Any) -> Any:
        """Return the next token of each sequence, int32.

        The random numbers depend only on the seed, the number of the prompt and of its sample, and the position of the
        token in its sequence.

        Args:
          logits: (batch, vocabulary).
          progress: the result of `numbers()`, and `sequences` and `samples` (batch,), the numbers of the prompts among
            all, and of their samples.
          positions: (batch,), of the tokens to choose.
        """
        if self.is_greedy:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        seed = jax.random.key(progress["seed"])

        def draw(number: Any, sample: Any, position: Any, logits: Any) -> Any:
            key = jax.random.fold_in(jax.random.fold_in(seed, number), position)
            key = jnp.where(sample == 0, key, jax.random.fold_in(key, sample))
            return jax.random.categorical(key, logits)

        numbers = (progress["sequences"], progress["samples"], positions)
        return jax.vmap(draw)(*numbers, self._processed(logits, progress)).astype(jnp.int32)

    def logprobs_of(self, chosen: Any, logits: Any, numbers: Mapping[str, Any]) -> Any:
        """Return the log-probabilities of chosen tokens (batch,) under logits (batch, vocabulary), float32 (batch,)."""
        if self.logprobs == "processed" and not self.is_greedy:
            logits = self._processed(logits, numbers)
        return log_probabilities(logits, chosen)

    def _processed(self, logits: Any, numbers: Mapping[str, Any]) -> Any:
        """Return the logits to sample from, float32: after temperature, `top_k` and `top_p`."""
        logits = logits.astype(jnp.float32)
        # The largest logit becomes 0: divided by a small number, several could become infinite.
        logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / numbers["temperature"]
        if self.top_k is not None:
            logits = _at_least(logits, jax.lax.top_k(logits, self.top_k)[0][:, -1:])
        if self.top_p is not None:
            logits = _at_least(logits, _least_of_nucleus(logits, numbers["top_p"]))
        return logits


def log_probabilities(logits: Any, tokens: Any) -> Any:
    """Return the log-probability of each token (...) under its logits (..., vocabulary), in float32.

    Example:
      >>> bool(jnp.isclose(log_probabilities(jnp.zeros((1, 4)), jnp.asarray([2]))[0], -jnp.log(4.0)))
      True
    """
    logits = logits.astype(jnp.float32)
    own = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return own - jax.nn.logsumexp(logits, axis=-1)


def _at_least(logits: Any, least: Any) -> Any:
    return jnp.where(logits < least, -jnp.inf, logits)


def _least_of_nucleus(logits: Any, top_p: Any) -> Any:
    """Return the least logit of the most likely tokens that together have the probability `top_p`, (batch, 1)."""
    ordered = jnp.sort(logits, axis=-1, descending=True)
    shares = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(shares, axis=-1) - shares  # the first token always belongs to them
    return jnp.min(jnp.where(before < top_p, ordered, jnp.inf), axis=-1, keepdims=True)


def _is_number(value: Any) -> bool:
    return is_whole(value) or isinstance(value, (float, np.floating))
