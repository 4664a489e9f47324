"""Your own train step with two losses: labelled examples, and unlabelled ones that must agree with noisy copies.

    python examples/own_step.py

`PipelineTrainer` has one loss for each batch. Where a step has several loops, each with its own data, write the step
with `jaxpp_flax.api`: `treduce` runs one loop over microbatches, and the step adds the gradients. The model is ordinary
NNX.

At real size: each loop fills and drains the pipeline once, so two loops of M microbatches on S ranks idle for
2 (S - 1) / (2 M + 2 (S - 1)) of the step: 16 % for S = 4, M = 16.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxpp_flax.api as jaxpp
from jaxpp_flax import PipelineStage

STAGES, MICROBATCHES, FEATURES, WIDTH, CLASSES = 4, 8, 8, 32, 4
Batch = dict[str, Any]  # arrays by name


class Model(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.widen = nnx.Linear(FEATURES, WIDTH, rngs=rngs)
        layers = [nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(STAGES)]
        self.layers = nnx.List([PipelineStage(layer, name=f"layer_{i}") for i, layer in enumerate(layers)])
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.widen(x)
        for layer in self.layers:
            x = x + jnp.tanh(layer(x))
        return self.head(x)


def make_train_step(graphdef: Any, tx: optax.GradientTransformation, mpmd_mesh: jaxpp.MpmdMesh):
    schedule = jaxpp.Std1F1B(STAGES)

    def labelled(params: Any, batch: Batch) -> jax.Array:
        logits = nnx.merge(graphdef, params)(batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean() / MICROBATCHES

    def consistency(params: Any, batch: Batch) -> jax.Array:
        both = nnx.merge(graphdef, params)(jnp.concatenate([batch["x"], batch["x"] + batch["noise"]]))
        clean, noisy = jnp.split(jax.nn.softmax(both), 2)
        return ((jax.lax.stop_gradient(clean) - noisy) ** 2).mean() / MICROBATCHES

    @partial(jaxpp.mpmd_jit_with_loop, mpmd_mesh=mpmd_mesh)
    def train_step(params: Any, opt_state: Any, batch: Batch, more: Batch):  # leaves: (microbatches, examples, ...)
        losses, grads = jaxpp.treduce(partial(jax.value_and_grad(labelled), params), batch, schedule=schedule)
        gaps, others = jaxpp.treduce(partial(jax.value_and_grad(consistency), params), more, schedule=schedule)
        grads = jax.tree.map(lambda a, b: a + 5.0 * b, grads, others)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, losses.sum(), gaps.sum()

    return train_step


def draw(rng: np.random.Generator, size: int) -> Batch:
    x = rng.normal(size=(MICROBATCHES, size, FEATURES)).astype(np.float32)
    label = (np.sin(2 * x[..., :CLASSES]) + x[..., CLASSES:]).argmax(-1).astype(np.int32)
    return {"x": x, "label": label, "noise": 0.3 * rng.normal(size=x.shape).astype(np.float32)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    if not jax.distributed.is_initialized():  # of several processes, the launcher knows the devices
        jax.config.update("jax_num_cpu_devices", STAGES)  # takes effect on CPU alone
    mpmd_mesh = jaxpp.MpmdMesh(jax.make_mesh((STAGES,), ("stage",), devices=jax.devices()[:STAGES]), "stage")
    graphdef, params = nnx.split(Model(rngs=nnx.Rngs(0)))
    tx = optax.adam(3e-3)
    opt_state, rng = tx.init(params), np.random.default_rng(0)
    train_step = make_train_step(graphdef, tx, mpmd_mesh)
    for step in range(1, steps + 1):
        params, opt_state, loss, gap = train_step(params, opt_state, draw(rng, 8), draw(rng, 32))
        if step % 50 == 0 or step == steps:
            print(f"step {step:4d}  loss {float(loss):.4f}  gap {float(gap):.4f}", flush=True)


if __name__ == "__main__":
    main()
