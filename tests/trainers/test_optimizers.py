"""Optax's optimizers through the trainer: two stages train as one stage under plain `jax.jit` does."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineStage, PipelineTrainer
from tests.helpers import slow_but, tree_allclose

WIDTH = 4


class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([PipelineStage(nnx.Linear(WIDTH, WIDTH, rngs=rngs)) for _ in range(2)])

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


def loss_fn(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def batch(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=(4, WIDTH)).astype(np.float32) for name in "xy"}


def by_kind(params):
    return jax.tree.map(lambda p: "matrix" if p.ndim == 2 else "vector", params)


SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 0.1, warmup_steps=1, decay_steps=3)
OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-2, weight_decay=0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "lion": lambda: optax.lion(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=2, multiply_by_parameter_scale=False),
    "muon": lambda: optax.contrib.muon(1e-2),
    "clipping": lambda: optax.chain(optax.clip_by_global_norm(1e-2), optax.sgd(1.0)),
    "multi_steps": lambda: optax.MultiSteps(optax.sgd(0.1), every_k_schedule=2),
    "multi_transform": lambda: optax.multi_transform({"matrix": optax.adam(1e-2), "vector": optax.sgd(0.1)}, by_kind),
    "schedule": lambda: optax.sgd(SCHEDULE),
}


@pytest.mark.parametrize("name", slow_but(OPTIMIZERS, "adamw", "multi_transform"))
def test_equals_plain(name):
    if name == "muon" and not hasattr(optax.contrib, "muon"):
        pytest.skip("this Optax has no muon")
    make = lambda stages: PipelineTrainer(  # noqa: E731
        Model(), OPTIMIZERS[name](), loss_fn, num_stages=stages, num_microbatches=2, progress=False
    )
    piped, plain = make(2), make(1)
    start = jax.tree.map(np.asarray, plain.state.params)
    for seed in range(3):
        for made in (piped, plain):
            made.train_step(batch(seed))
    state = [jax.tree.map(np.asarray, (made.state.params, made.state.opt_state)) for made in (piped, plain)]
    # Normalising optimizers divide by the size of a gradient or of a matrix: its own rounding of 1e-7 grows with that.
    tree_allclose(*state, rtol=1e-4)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), state[0][0], start)
    assert min(jax.tree.leaves(moved)) > 1e-4, "every parameter is trained"
