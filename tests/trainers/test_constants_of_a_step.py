"""Scalars in a batch: constants of a step, the same in every microbatch."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.trainers import BatchError, Inference
from jaxpp_flax.trainers.data.batch_sharding import own_rows
from tests.helpers import tree_allclose
from tests.trainers.models import Layers

WIDTH = Layers.WIDTH


def outputs(model, batch):
    noise = jax.random.normal(batch["key"], (WIDTH,))
    return model(batch["x"] * batch["gain"] + noise)


def loss_fn(model, batch):
    return jnp.mean((outputs(model, batch) - batch["y"]) ** 2) * batch["weight"], {"gain": batch["gain"]}


def batch():
    rng = np.random.default_rng(0)
    arrays = {name: rng.normal(size=(8, WIDTH)).astype(np.float32) for name in "xy"}
    return {**arrays, "gain": 0.5, "weight": np.float32(3), "key": jax.random.key(1)}


def test_equal_to_plain():
    made = PipelineTrainer(
        Layers(), optax.sgd(0.1), loss_fn, num_stages=2, num_microbatches=2, mesh={"data": 2}, logging=False,
        inference=Inference(predict_fn=outputs),
    )  # fmt: skip
    graph, params = nnx.split(Layers())

    @jax.jit
    def plain(params, batch):
        loss, grads = jax.value_and_grad(lambda p: loss_fn(nnx.merge(graph, p), batch)[0])(params)
        return outputs(nnx.merge(graph, params), batch), loss, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    expected, loss, after = plain(params, batch())
    np.testing.assert_allclose(made.predict(batch()), expected, rtol=1e-5)
    np.testing.assert_allclose(made.evaluate([batch()])["loss"], loss, rtol=1e-5)
    metrics = made.train_step(batch(), global_batch_size=8)
    np.testing.assert_allclose([float(metrics["loss"]), float(metrics["gain"])], [float(loss), 0.5], rtol=1e-5)
    # An average of two microbatches in place of a mean over eight examples: a few units in the last place.
    tree_allclose(jax.tree.map(np.asarray, (made.state.params,)), jax.tree.map(np.asarray, (after,)), rtol=1e-5)


def test_a_scalar_beside_the_rows_of_a_process():
    """As with `global_batch_size` in several processes; `tests/processes/run_rows.py` trains so."""
    compiled = SimpleNamespace(in_shardings=((None, {"gain": None}),), read_here=((None, {"gain": True}),))
    shape = {"gain": jax.ShapeDtypeStruct((3,), jnp.float32)}
    taken = own_rows(compiled, {"gain": 0.5}, shape)["gain"]
    assert taken.tolist() == [0.5] * 3
    assert taken.dtype == np.float32
    with pytest.raises(BatchError, match=r"batch\['gain'\] is a shape without a value, .* Pass the scalar"):
        own_rows(compiled, {"gain": jax.ShapeDtypeStruct((), jnp.float32)}, shape)


def test_other_values_compile_nothing_and_rows_are_read_of_arrays_alone():
    made = PipelineTrainer(Layers(), optax.sgd(0.1), loss_fn, num_stages=1, num_microbatches=2, logging=False)
    losses = [float(made.evaluate([{**batch(), "weight": weight}])["loss"]) for weight in (3.0, jnp.float32(6))]
    np.testing.assert_allclose(losses[1], 2 * losses[0], rtol=1e-6)
    assert len(made.steps.compiled) == 1
    rows = made.rows_read(batch())
    own = {name: leaf if name == "gain" else leaf[rows[name]] for name, leaf in batch().items()}
    assert rows["gain"] is rows["weight"] is ...
    np.testing.assert_array_equal(own["x"], batch()["x"])
    assert own["weight"] == 3
    assert np.isfinite(made.fit([batch()], steps=2)["loss"])
