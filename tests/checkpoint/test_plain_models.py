"""Weights for plain models."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.checkpoint import CheckpointMismatchError, load_linen, load_nnx
from tests.helpers import tree_allclose
from tests.trainers.models import LENGTH, LinenModel, Model, make_batch, mean_loss


def test_a_plain_nnx_model(tmp_path: Path):
    trained = Model(2, rngs=nnx.Rngs(0), dropout=0.1, batch_norm=True)
    trainer = PipelineTrainer(trained, optax.sgd(0.1), mean_loss, num_stages=1, num_microbatches=1, logging=False)
    path = trainer.save(tmp_path / "ckpt")
    plain = Model(2, rngs=nnx.Rngs(1), marked=False, dropout=0.1, batch_norm=True)
    load_nnx(plain, path)
    plain.eval(), trained.eval()
    tokens = make_batch(4)["tokens"]
    np.testing.assert_array_equal(plain(tokens), trained(tokens))
    with pytest.raises(CheckpointMismatchError, match=r"blocks/2/widen/kernel: missing"):
        load_nnx(Model(3, rngs=nnx.Rngs(1), marked=False, batch_norm=True), path)


def test_a_plain_linen_model(tmp_path: Path):
    tokens = jnp.zeros((1, LENGTH), jnp.int32)
    module = LinenModel(2, batch_norm=True)
    variables = module.init(jax.random.key(0), tokens)
    trainer = PipelineTrainer(
        module, optax.sgd(0.1), mean_loss, num_stages=1, num_microbatches=1, variables=variables, logging=False
    )
    path = trainer.save(tmp_path / "ckpt")
    plain = LinenModel(2, marked=False, batch_norm=True)
    tree_allclose(load_linen(plain.init(jax.random.key(1), tokens), path), variables, rtol=0, atol=0)
