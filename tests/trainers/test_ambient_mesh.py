"""A mesh of `jax.set_mesh` around the trainer changes nothing; what it does to a step is in tests/engine."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.trainers import Inference
from tests.helpers import tree_allclose
from tests.matrix.harness import mesh_of
from tests.trainers.models import Model, make_batch, mean_loss


@pytest.mark.slow
def test_training_evaluating_and_predicting():
    mesh = mesh_of(2)
    found = []
    for ambient in (None, Mesh(np.array(jax.devices()[1:4]), ("other",))):
        model = Model(2, rngs=nnx.Rngs(0))
        with jax.set_mesh(ambient):
            trainer = PipelineTrainer(
                model, optax.adam(0.01), mean_loss, num_stages=2, num_microbatches=2, mesh=mesh.jax_mesh,
                inference=Inference(predict_fn=lambda model, batch: model(batch["tokens"])), logging=False,
            )  # fmt: skip
            trained = trainer.train_step(make_batch(8))
            rest = trainer.evaluate([make_batch(8, seed=1)]), trainer.predict(make_batch(8, seed=2))
        found.append(jax.tree.map(np.asarray, (trained["loss"], rest, trainer.state.params)))
    tree_allclose(found[1], found[0], rtol=0, atol=0)
