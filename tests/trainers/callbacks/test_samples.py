"""`SamplePredictions` logs what the current weights predict for fixed inputs."""

from __future__ import annotations

import numpy as np
import optax

from jaxpp_flax import DictTracker, PipelineTrainer
from jaxpp_flax.trainers import Logging
from jaxpp_flax.trainers.callbacks import Callback, SamplePredictions
from tests.trainers import models as m


def test_predictions_are_those_of_the_step(tmp_path):
    tracker, batch, expected = DictTracker(), m.make_xy(8), {}

    class Predict(Callback):
        def on_step(self, trainer, record):
            expected[record.step] = np.asarray(trainer.predict(batch["x"]))

    t = PipelineTrainer(
        m.Layers(), optax.sgd(0.1), m.squared_error, num_stages=2, num_microbatches=2,
        logging=Logging(tracker=tracker, progress=False),
    )  # fmt: skip
    describe = lambda trainer, inputs: {"texts": ["step", str(trainer.step)], "size": len(inputs)}  # noqa: E731
    callbacks = [
        Predict(),
        SamplePredictions(batch["x"], every=2),
        SamplePredictions([1, 2], every=3, function=describe, name="more"),
    ]
    losses = t.fit([batch], steps=4, callbacks=callbacks)
    assert sorted(tracker["samples"]) == [2, 4]
    for step, found in tracker["samples"].items():
        assert np.array_equal(found, expected[step])
    assert not np.array_equal(expected[2], expected[4])
    assert tracker["more/texts"] == {3: "step\n3"}
    assert tracker["more/size"] == {3: 2}
    assert np.isfinite(losses["loss"])
