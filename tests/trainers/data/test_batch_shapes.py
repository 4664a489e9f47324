"""Batches of several shapes, such as texts padded to a few lengths: one compilation each, told and limited."""

from __future__ import annotations

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
    rng = np.random.default_rng(0)
    return [
        {name: rng.normal(size=(8, length, m.Layers.WIDTH)).astype(np.float32) for name in "xy"} for length in LENGTHS
    ]


def trainer(**options):
    return PipelineTrainer(m.Layers(), optax.sgd(0.1), m.squared_error, num_stages=2, num_microbatches=2, **options)


def test_each_shape_is_compiled_once_and_told(capsys: pytest.CaptureFixture[str]):
    trained = trainer()
    trained.fit(batches(), steps=len(LENGTHS))
    told = [line for line in capsys.readouterr().out.splitlines() if "another shape" in line]
    assert [line.partition(":")[0] for line in told] == [
        "compiling for another shape of batches (2 of at most 32)",
        "compiling for another shape of batches (3 of at most 32)",
    ]
    assert "['x'] float32[8, 5, 4]" in told[0]
    _, params = m.plain_training(m.Layers(), optax.sgd(0.1), m.squared_error, batches(), 1)
    tree_allclose(nnx.state(trained.gather_model(), nnx.Param), params[-1])


def test_one_shape_too_many():
    limited = trainer(training=Training(max_batch_shapes=2), logging=False)
    with pytest.raises(BatchError, match=r"another shape, after 2: .*float32\[8, 4, 4\].*max_batch_shapes=4"):
        limited.fit(batches(), steps=len(LENGTHS))
    assert int(limited.state.step) == 3
    limited.use_schedule("gpipe")  # its steps are compiled anew
    limited.train_step(batches()[3])
