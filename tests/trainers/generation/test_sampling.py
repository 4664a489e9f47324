"""The distribution of samples, against one that NumPy computes from the definition."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp_flax.trainers.generation.sampling import Sampling

LOGITS = np.array([1.0, 3.0, 2.5, -1.0, 0.0, 2.0], np.float32)
COUNT = 20_000


COMPILED: dict[Any, Any] = {}


def choose(sampling: Sampling, logits: Any, first: int = 0, position: int = 7, sample: int = 0) -> np.ndarray:
    """Choose for `COUNT` sequences with these logits; options with equal compiled parts share one program."""
    chooses = COMPILED.setdefault(sampling.compiled, jax.jit(sampling.choose))
    logits = jnp.broadcast_to(np.float32(logits), (COUNT, len(LOGITS)))
    sequences = {"sequences": first + jnp.arange(COUNT), "samples": jnp.full(COUNT, sample)}
    return np.asarray(chooses(logits, {**sampling.numbers(), **sequences}, jnp.full(COUNT, position)))


def expected(temperature: float, kept: list[int]) -> np.ndarray:
    weights = np.zeros(len(LOGITS))
    weights[kept] = np.exp((LOGITS[kept] - LOGITS.max()).astype(np.float64) / temperature)
    return weights / weights.sum()


CASES = [
    (Sampling(temperature=0.7), [0, 1, 2, 3, 4, 5]),
    (Sampling(temperature=1e60), [0, 1, 2, 3, 4, 5]),  # infinite in float32
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
    for sampling, kept in CASES:
        found = np.bincount(choose(sampling, LOGITS), minlength=len(LOGITS)) / COUNT
        assert not found[[i for i in range(len(LOGITS)) if i not in kept]].any()
        # Five standard deviations of a share among so many samples, at most.
        np.testing.assert_allclose(found, expected(sampling.temperature, kept), atol=5 * 0.5 / np.sqrt(COUNT))


def test_a_sample_depends_on_the_sequence_and_the_position():
    def sample(first: int, position: int, seed: int = 0, number: int = 0) -> list[int]:
        return choose(Sampling(temperature=1.0, seed=seed), np.zeros(len(LOGITS)), first, position, number).tolist()

    assert sample(0, 3) == sample(0, 3)
    assert sample(0, 3)[8:] == sample(8, 3)[:-8]  # the row in the group makes no difference
    assert sample(0, 3) != sample(0, 4)
    assert sample(0, 3) != sample(0, 3, seed=1)
    assert sample(0, 3) != sample(0, 3, number=1)


def test_large_logits_and_small_numbers_give_the_most_likely_token():
    """Float32, in which devices compute, has some of these numbers as 0."""
    for options in ({"temperature": 2e-38}, {"temperature": 1e-60}, {"temperature": 1, "top_p": 1e-60}):
        chosen = choose(Sampling(**options), [500.0, 300.0, 700.0, 600.0, -np.inf, -np.inf])
        assert set(chosen.tolist()) == {2}, options
