"""A loop that owns its state, and an evaluation of batches of several sizes, in several processes."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.processes.running import join_run

join_run()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
import pytest  # noqa: E402
from flax import nnx  # noqa: E402

import jaxpp_flax.checkpoint  # noqa: E402
from jaxpp_flax import PipelineStage, PipelineTrainer  # noqa: E402


class Layers(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([PipelineStage(nnx.Linear(8, 8, rngs=rngs)) for _ in range(2)])

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


def loss_fn(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def make_trainer(num_microbatches: int = 4):
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
    return PipelineTrainer(
        Layers(nnx.Rngs(0)), tx, loss_fn, num_stages=2, num_microbatches=num_microbatches, mesh={}, logging=False
    )


rng = np.random.default_rng(0)
batches = [{name: rng.normal(size=(8, 8)).astype(np.float32) for name in "xy"} for _ in range(4)]
reference, trainer = make_trainer(), make_trainer()
losses = [float(metrics["loss"]) for _, metrics in reference.training_steps(batches)]
step, state, own = trainer.compiled_step(batches[0]), trainer.state, []
for batch in batches:
    state, metrics = step(state, batch)
    own.append(float(metrics["loss"]))
assert own == losses, (own, losses)
for call in (lambda: trainer.state, lambda: trainer.evaluate(batches)):
    with pytest.raises(RuntimeError, match="the trainer has no state"):
        call()
path = Path(sys.argv[1]) / "state"
jaxpp_flax.checkpoint.save(path, state)
trainer.set_state(jaxpp_flax.checkpoint.restore(path, state))
assert trainer.step == 4

ragged = [batches[0], {name: leaf[:5] for name, leaf in batches[1].items()}]
found = trainer.evaluate({"ragged": ragged, "whole": batches}, steps=2)
whole = {name: np.concatenate([batch[name] for batch in ragged]) for name in "xy"}
expected = nnx.jit(loss_fn)(reference.gather_model(), whole)
np.testing.assert_allclose(found["ragged/loss"], expected, rtol=1e-5)
assert found["whole/loss"] == reference.evaluate(batches[:2])["loss"]
assert len(trainer.steps.compiled) == 2, "a training step, and one evaluation"
rows = trainer.rows_read(batches[0], "evaluate")
shares = [jax.tree.map(lambda leaf, own: leaf[own], batch, rows) for batch in batches[:2]]
assert trainer.evaluate(shares, global_batch_size=8)["loss"] == found["whole/loss"]
trainer.fit(batches, steps=1)
reference.train_step(batches[0])
for one, other in zip(jax.tree.leaves(trainer.state), jax.tree.leaves(reference.state), strict=True):
    if one.is_partially_addressable:
        np.testing.assert_array_equal(one, other)

halves, joined = make_trainer(), make_trainer(8)
for _ in range(2):
    halves.accumulate(batches[0])
    halves.accumulate(shares[1], global_batch_size=8)
    metrics = halves.update()
    expected = joined.train_step({name: np.concatenate([batch[name] for batch in batches[:2]]) for name in "xy"})
    np.testing.assert_allclose(float(metrics["loss"]), float(expected["loss"]), rtol=1e-5)
for one, other in zip(jax.tree.leaves(halves.state), jax.tree.leaves(joined.state), strict=True):
    if one.is_partially_addressable:
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)  # Adam divides by small second moments
print("all done", flush=True)
