"""The training of the page on quotes."""

import jax, jax.numpy as jnp, optax
from flax import nnx
from jaxpp_flax import PipelineStage, PipelineTrainer

VOCABULARY, WIDTH, LENGTH = 50_304, 6144, 2048


class Block(nnx.Module):
    def __init__(self, *, rngs):
        init = nnx.initializers.lecun_normal()
        columns = nnx.with_partitioning(init, (None, "tensor"))
        rows = nnx.with_partitioning(init, ("tensor", None))
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 6 * WIDTH, kernel_init=columns, rngs=rngs)
        self.down = nnx.Linear(6 * WIDTH, WIDTH, kernel_init=rows, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Model(nnx.Module):
    def __init__(self, layers, *, rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        blocks = [PipelineStage(Block(rngs=rngs)) for _ in range(layers)]
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_fn(model, tokens):
    logits = model(tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean()


def make(layers=32, **options):
    trainer = PipelineTrainer(
        lambda rngs: Model(layers, rngs=rngs), optax.adamw(1e-4), loss_fn,
        precision="bfloat16", **options,
    )  # fmt: skip
    return trainer, jax.ShapeDtypeStruct((512, LENGTH + 1), jnp.int32)
