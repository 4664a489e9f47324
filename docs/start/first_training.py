"""The program of the page "First training"."""

import tempfile

import jax.numpy as jnp, numpy as np, optax
from flax import nnx
from jaxpp_flax import PipelineStage, PipelineTrainer, schedules
from jaxpp_flax.trainers import Logging

WIDTH = 64


class Block(nnx.Module):
    def __init__(self, *, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.linear(x))


class Model(nnx.Module):
    def __init__(self, *, rngs):
        self.embed = nnx.Linear(2, WIDTH, rngs=rngs)
        blocks = [Block(rngs=rngs) for _ in range(8)]
        self.blocks = nnx.List(
            [PipelineStage(block, name=f"block_{i}") for i, block in enumerate(blocks)]
        )
        self.head = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_fn(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def make_batch(seed):
    x = np.random.default_rng(seed).uniform(-1, 1, (64, 2)).astype(np.float32)
    return {"x": x, "y": np.sin(3 * x[:, :1]) * x[:, 1:]}

batches = [make_batch(seed) for seed in range(60)]
directory = tempfile.mkdtemp()
trainer = PipelineTrainer(
    Model(rngs=nnx.Rngs(0)), optax.adam(3e-3), loss_fn,
    num_stages=4, num_microbatches=8, schedule="1f1b",
    checkpoints=directory, logging=Logging(every=20),
)
metrics = trainer.fit(batches, steps=60)

plain = PipelineTrainer(
    Model(rngs=nnx.Rngs(0)), optax.adam(3e-3), loss_fn,
    num_stages=1, num_microbatches=8, mesh={}, logging=False,
)
expected = plain.fit(batches, steps=60)
print("pipeline", float(metrics["loss"]), "plain", float(expected["loss"]))
np.testing.assert_allclose(expected["loss"], metrics["loss"], rtol=1e-3)

for name in ("1f1b", "zero_bubble"):
    step = schedules.simulate(schedules.by_name(name, num_stages=4), num_microbatches=5)
    print(schedules.draw(step, title=name))

trainer.use_schedule("zero_bubble")
print("loss", float(trainer.train_step(make_batch(60))["loss"]))

trainer.save()

other = PipelineTrainer(
    Model(rngs=nnx.Rngs(1)), optax.adam(3e-3), loss_fn,
    num_stages=2, num_microbatches=4, mesh={"data": 2},
    checkpoints=directory, logging=False,
)
other.restore()
held_out = other.evaluate([make_batch(61)])
print("step", int(other.state.step), "loss", float(held_out["loss"]))
model = other.gather_model()  # the ordinary module
