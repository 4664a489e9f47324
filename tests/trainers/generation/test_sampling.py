"""The distribution of samples, against one that NumPy computes from the definition."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp_flax.trainers.generation.sampling import Sampling

LOGITS = np.array([1.0, 3.0, 2.5, -1.0, 0.0, 2.0], np.float32)
COUNT = 20_000


def shares(sampling: Sampling, programs: dict[Any, Any]) -> np.ndarray:
    """The share of each token among many samples, one for each sequence."""
    logits = jnp.broadcast_to(LOGITS, (COUNT, len(LOGITS)))
    choose = programs.setdefault(sampling.compiled, jax.jit(sampling.choose))
    chosen = choose(logits, sampling.numbers(), jnp.arange(COUNT), jnp.int32(7))
    return np.bincount(np.asarray(chosen), minlength=len(LOGITS)) / COUNT


def expected(temperature: float, kept: list[int]) -> np.ndarray:
    weights = np.zeros(len(LOGITS))
    weights[kept] = np.exp((LOGITS[kept] - LOGITS.max()) / temperature)
    return weights / weights.sum()


CASES = [
    (Sampling(temperature=0.7), [0, 1, 2, 3, 4, 5]),
    (Sampling(temperature=1e38), [0, 1, 2, 3, 4, 5]),
    (Sampling(temperature=2.0, top_k=3), [1, 2, 5]),
    (Sampling(temperature=1.0, top_k=1), [1]),
    # The three most likely tokens have 0.47, 0.75 and 0.92 of the probability.
    (Sampling(temperature=1.0, top_p=0.8), [1, 2, 5]),
    (Sampling(temperature=1.0, top_p=0.7), [1, 2]),
    (Sampling(temperature=1.0, top_p=0.01), [1]),
    # Among the first four, the first two have 0.78: top_p is applied after top_k.
    (Sampling(temperature=1.0, top_k=4, top_p=0.76), [1, 2]),
]


def test_samples_have_the_shares_of_their_probabilities():
    programs: dict[Any, Any] = {}  # as in a trainer, options that are compiled alike share one
    for sampling, kept in CASES:
        found = shares(sampling, programs)
        assert not found[[i for i in range(len(LOGITS)) if i not in kept]].any()
        # Five standard deviations of a share among so many samples, at most.
        np.testing.assert_allclose(found, expected(sampling.temperature, kept), atol=5 * 0.5 / np.sqrt(COUNT))


def test_a_sample_depends_on_the_sequence_and_the_position():
    choose = jax.jit(Sampling(temperature=1.0).choose)
    logits = jnp.zeros((64, 97))

    def sample(first: int, position: int, seed: int = 0) -> list[int]:
        numbers = Sampling(temperature=1.0, seed=seed).numbers()
        return choose(logits, numbers, first + np.arange(64), jnp.int32(position)).tolist()

    assert sample(0, 3) == sample(0, 3)
    assert sample(0, 3)[8:] == sample(8, 3)[:-8]  # the row in the group makes no difference
    assert sample(0, 3) != sample(0, 4)
    assert sample(0, 3) != sample(0, 3, seed=1)


def test_large_logits_and_a_small_temperature_give_the_most_likely_token():
    sampling = Sampling(temperature=2e-38)
    logits = jnp.asarray([[500.0, 300.0, 700.0, 600.0, -jnp.inf]])
    assert jax.jit(sampling.choose)(logits, sampling.numbers(), jnp.arange(1), jnp.int32(0)).tolist() == [2]


def test_numbers_that_float32_has_as_zero_or_as_infinite_are_refused():
    for value in (1e-45, 1e-38, 3.5e38, float("inf")):
        with pytest.raises(
            ValueError, match=r"must be 0 \(greedy\) or a number from 1.2e-38 to 3.4e\+38, as float32 has"
        ):
            Sampling(temperature=value)
        with pytest.raises(ValueError, match=r"it must be a number from 1.2e-38 to 1, or None"):
            Sampling(temperature=1.0, top_p=value)
