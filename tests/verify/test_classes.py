"""Each class of a difference, from numbers alone."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from jaxpp_flax.verify.classes import Case, classify

PARTS = np.random.default_rng(0).normal(size=(4, 6))
SUM = PARTS.sum(0)
DROPPED = np.where(np.arange(24).reshape(4, 6) % 3 == 0, 0.0, PARTS)

SUMS = {
    "a microbatch dropped: number 2": SUM - PARTS[2],
    "the sum holds number 3 alone": PARTS[3],
    "number 0 is twice in the sum": SUM + PARTS[0],
    "another one is in the sum in place of number 0": SUM - PARTS[0] + PARTS[1],
    "a scale by the number of microbatches": 4 * SUM,
    "a scale by 1 / the number of microbatches": SUM / 4,
    "a scale by the number of shards|number of shards": 3 * SUM,
    "a missing reduction, or a scale by 1 / the number of shards": SUM / 3,
    "the sum is counted twice": 2 * SUM,
    "all zeros": 0 * SUM,
    "a wrong sign": -SUM,
    "a cast to bfloat16": SUM.astype(ml_dtypes.bfloat16).astype(float),
    "another order of sums": SUM + 3e-6,
    "values that are not finite": SUM + np.inf,
    "unknown": SUM + np.arange(6),
}


@pytest.mark.parametrize("words", SUMS)
def test_sums(words: str):
    found = classify(Case(SUM, SUMS[words], allowed=1e-6, num_microbatches=4, num_shards=3, parts=PARTS))
    assert words.split("|")[-1] in found


def test_arrays_stacked_by_microbatch():
    def of(actual: np.ndarray, expected: np.ndarray = PARTS) -> str:
        return classify(Case(expected, actual, allowed=1e-6, num_microbatches=4, stacked=True))

    assert "number 1 is in the place of number 0" in of(PARTS[[1, 0, 2, 3]])
    assert "shards swapped" in of(PARTS[:, ::-1])
    assert "other random bits" in of(np.roll(DROPPED, 1, axis=1), DROPPED)
    stale = PARTS.copy()
    stale[1] += np.arange(6) / 10
    assert "stale" in of(stale)


def test_leaves_of_the_new_state():
    before = np.arange(6.0)

    def of(actual: np.ndarray) -> str:
        return classify(Case(before + SUM, actual, allowed=1e-6, num_microbatches=4, before=before))

    assert "missing update" in of(before)
    assert "number of microbatches (4)" in of(before + 4 * SUM)
