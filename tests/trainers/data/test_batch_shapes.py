"""Batches of several shapes, such as texts padded to a few lengths: one compilation each, told and limited."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.trainers import BatchError, Training
from tests.helpers import tree_allclose
from tests.trainers import models as m

LENGTHS = (3, 5, 3, 4, 5)


def batches():
    whole = [m.make_batch(8, seed) for seed in range(len(LENGTHS))]
    return [{k: v[:, :length] for k, v in batch.items()} for batch, length in zip(whole, LENGTHS, strict=True)]


def trainer(**options):
    return PipelineTrainer(
        m.Model(2, rngs=nnx.Rngs(0)), optax.sgd(0.1), m.weighted_loss, num_stages=2, num_microbatches=2, **options
    )


def test_each_shape_is_compiled_once_and_told(capsys: pytest.CaptureFixture[str]):
    trained = trainer()
    trained.fit(batches(), steps=len(LENGTHS))
    told = [line for line in capsys.readouterr().out.splitlines() if "another shape" in line]
    assert [line.partition(":")[0] for line in told] == [
        "compiling for another shape of batches (2 of at most 32)",
        "compiling for another shape of batches (3 of at most 32)",
    ]
    assert "['tokens'] int32[8, 5]" in told[0]
    expected = PipelineTrainer(
        m.Model(2, rngs=nnx.Rngs(0)), optax.sgd(0.1), m.weighted_loss, num_stages=1, num_microbatches=1, logging=False
    )
    for batch in batches():
        expected.train_step(batch)
    tree_allclose(trained.state.params, jax.tree.map(np.asarray, expected.state.params))


def test_one_shape_too_many():
    limited = trainer(training=Training(max_batch_shapes=2), logging=False)
    with pytest.raises(BatchError, match=r"another shape, after 2: .*int32\[8, 4\].*max_batch_shapes=4"):
        limited.fit(batches(), steps=len(LENGTHS))
    assert int(limited.state.step) == 3
    limited.use_schedule("gpipe")  # its steps are compiled anew
    limited.train_step(batches()[3])
