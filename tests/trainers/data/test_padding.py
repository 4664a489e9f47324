"""Batches in the form of another batch's program: each example counts as often as every other one."""

from __future__ import annotations

import numpy as np
import pytest

from jaxpp_flax.trainers.data.batch import resized
from jaxpp_flax.trainers.data.padding import Form, form_for, padded_parts


@pytest.mark.parametrize("microbatch", [1, 4, 5, 6, 12])
@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_each_example_counts_once(microbatch: int, num_microbatches: int):
    form = Form(num_microbatches, microbatch)
    for size in range(1, 2 * form.size + 2):
        counts, examples = np.zeros(size), 0
        for part in padded_parts({"x": np.arange(size)}, size, form):
            assert part.microbatches["x"].shape == (num_microbatches, microbatch)
            for rows, share in zip(part.microbatches["x"], part.shares, strict=True):
                np.add.at(counts, rows, share)
            examples += part.num_examples
            np.testing.assert_allclose(part.shares.sum() * microbatch, part.num_examples, rtol=1e-6)  # float32
        np.testing.assert_allclose(counts, 1, rtol=1e-6)
        assert examples == size


@pytest.mark.parametrize("shards", [1, 2, 8])
@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_a_form_computes_few_examples_that_are_not_in_the_batch(num_microbatches: int, shards: int):
    for size in [*range(1, 40), 1001, 4096]:
        form = form_for(size, num_microbatches, shards)
        assert form.num_microbatches <= num_microbatches
        assert form.microbatch % shards == 0
        runs = len(list(padded_parts(np.zeros(size), size, form)))
        assert runs * form.size <= 4 * (size + num_microbatches * shards)
        if size % (num_microbatches * shards) == 0:
            assert form == Form(num_microbatches, size // num_microbatches)


def test_scalars_and_shapes():
    batch = {"x": resized(np.zeros((3, 2), np.float32), 3), "rate": 0.5}
    (part,) = padded_parts(batch, 3, Form(2, 2))
    assert part.microbatches["x"].shape == (2, 2, 2)
    np.testing.assert_array_equal(part.microbatches["rate"], np.float32([0.5, 0.5]))
