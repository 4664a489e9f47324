"""Weights for plain models and safetensors files."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.checkpoint import (
    CheckpointMismatchError,
    CheckpointSaveError,
    export_safetensors,
    load_linen,
    load_nnx,
    save,
)
from jaxpp_flax.checkpoint.export import read_arrays
from tests.checkpoint.layouts import LAYOUTS, make_state
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


def test_arrays_of_a_checkpoint(tmp_path: Path):
    state = make_state()
    path = save(tmp_path / "ckpt", LAYOUTS["4 stages"].put(state))
    arrays = read_arrays(path, only="params/*")
    np.testing.assert_array_equal(arrays["params"]["blocks"]["3"]["kernel"], state["params"]["blocks"][3]["kernel"])
    assert list(arrays) == ["params"]
    with pytest.raises(CheckpointMismatchError, match="no leaf matches only='x'"):
        read_arrays(path, only="x")


@pytest.mark.extras
def test_a_safetensors_file(tmp_path: Path):
    safetensors = pytest.importorskip("safetensors.numpy")
    state = make_state()
    path = save(tmp_path / "ckpt", LAYOUTS["4 stages"].put(state))
    file = export_safetensors(path, tmp_path / "w.safetensors", only="params/*", rename={"params": "model"})
    loaded = safetensors.load_file(file)
    np.testing.assert_array_equal(loaded["model.blocks.3.kernel"], state["params"]["blocks"][3]["kernel"])
    assert loaded["model.blocks.3.bias"].dtype == jnp.bfloat16
    assert len(loaded) == len(jax.tree.leaves(state["params"]))
    with pytest.raises(CheckpointSaveError, match="it exists"):
        export_safetensors(state, file)
    with pytest.raises(ValueError, match="no leaf of the tree matches"):
        export_safetensors(state, tmp_path / "x", only="typo")
    # a layer stored transposed is written as it is indexed
    weights = {"t": np.arange(6.0, dtype=np.float32).reshape(2, 3).T}
    transposed = safetensors.load_file(export_safetensors(weights, tmp_path / "t.safetensors"))
    np.testing.assert_array_equal(transposed["t"], weights["t"])
