"""Small models, data and the plain reference that the trainer's tests share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

import jaxpp_flax.linen as linen_pipeline
from jaxpp_flax import PipelineStage

WIDTH, VOCABULARY, LENGTH = 8, 11, 5


class Block(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs, dropout: float = 0.0, batch_norm: bool = False):
        self.widen = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.narrow = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs) if dropout else None
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs, momentum=0.9) if batch_norm else None

    def __call__(self, x):
        y = self.narrow(jnp.tanh(self.widen(x)))
        if self.dropout is not None:
            y = self.dropout(y)
        if self.norm is not None:
            y = self.norm(y)
        return x + y


class Model(nnx.Module):
    def __init__(self, num_blocks: int, *, rngs: nnx.Rngs, marked: bool = True, **options: Any):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        blocks = [Block(rngs=rngs, **options) for _ in range(num_blocks)]
        if marked:
            blocks = [PipelineStage(block, name=f"block_{i}") for i, block in enumerate(blocks)]
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Tokens(nnx.Module):
    """Tokens in, logits out: a `Model` with as few operations as a model with an embedding can have."""

    def __init__(self, num_blocks: int = 2, *, rngs: nnx.Rngs, dropout: float = 0.0, batch_norm: bool = False):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        blocks = [nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(num_blocks)]
        self.blocks = nnx.List(PipelineStage(block, name=f"block_{i}") for i, block in enumerate(blocks))
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs, momentum=0.9) if batch_norm else None
        self.dropout = nnx.Dropout(dropout, rngs=rngs) if dropout else None
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = jnp.tanh(block(x))
        x = x if self.norm is None else self.norm(x)
        x = x if self.dropout is None else self.dropout(x)
        return self.head(x)


class Chain(nnx.Module):
    """Blocks of any kind, one after another."""

    def __init__(self, blocks: Iterable[nnx.Module]):
        self.blocks = nnx.List(blocks)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Layers(nnx.Module):
    """Features in, features out: by default as small as a model of two stages can be."""

    WIDTH = 4

    def __init__(
        self,
        num_layers: int = 2,
        width: int = WIDTH,
        *,
        rngs: nnx.Rngs | None = None,
        dropout: float = 0.0,
        **options: Any,
    ):
        rngs = rngs or nnx.Rngs(0)
        layers = [nnx.Linear(width, width, rngs=rngs, **options) for _ in range(num_layers)]
        self.layers = nnx.List(map(PipelineStage, layers))
        self.dropout = nnx.Dropout(dropout, rngs=rngs) if dropout else None

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x if self.dropout is None else self.dropout(x)


class LinenBlock(nn.Module):
    dropout: float = 0.0
    batch_norm: bool = False

    @nn.compact
    def __call__(self, x, training=True):
        y = nn.Dense(WIDTH)(jnp.tanh(nn.Dense(2 * WIDTH)(x)))
        if self.dropout:
            y = nn.Dropout(self.dropout, deterministic=not training)(y)
        if self.batch_norm:
            y = nn.BatchNorm(use_running_average=not training, momentum=0.9)(y)
        return x + y


class LinenModel(nn.Module):
    num_blocks: int
    marked: bool = True
    dropout: float = 0.0
    batch_norm: bool = False

    @nn.compact
    def __call__(self, tokens, training=True):
        x = nn.Embed(VOCABULARY, WIDTH)(tokens)
        for _ in range(self.num_blocks):
            block = LinenBlock(self.dropout, self.batch_norm)
            if self.marked:
                block = linen_pipeline.PipelineStage(block)
            x = block(x, training)
        return nn.Dense(VOCABULARY)(x)


def token_losses(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["tokens"]), batch["targets"])


def mean_loss(model, batch):
    return token_losses(model, batch).mean()


def weighted_loss(model, batch):
    return (token_losses(model, batch) * batch["mask"]).sum(), batch["mask"].sum()


def loss_with_metrics(model, batch):
    logits = model(batch["tokens"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    hits = (logits.argmax(-1) == batch["targets"]).astype(jnp.float32)
    mask = batch["mask"]
    metrics = {"accuracy": hits.mean(), "masked_accuracy": ((hits * mask).sum(), mask.sum())}
    return losses.mean(), metrics


def squared_error(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def make_xy(size: int, width: int = Layers.WIDTH, seed: int = 0) -> dict[str, np.ndarray]:
    """Features and targets for `squared_error`."""
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=(size, width)).astype(np.float32) for name in "xy"}


def make_batch(size: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCABULARY, (size, LENGTH + 1)).astype(np.int32)
    # Unequal weights: later examples have more masked tokens.
    mask = (np.arange(LENGTH) < rng.integers(1, LENGTH + 1, (size, 1))).astype(np.float32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "mask": mask}


def plain_training(model, tx, loss_fn, batches, num_microbatches):
    """Gradient accumulation under plain `jax.jit`, written without any of the package: see `accumulated`."""
    graphdef, params = nnx.split(model)
    loss_of = lambda params, microbatch: loss_fn(nnx.merge(graphdef, params), microbatch)  # noqa: E731
    return accumulated(loss_of, params, tx, batches, num_microbatches)


def accumulated(loss_of, params, tx, batches, num_microbatches):
    """The loss of each step and the parameters after it; one microbatch after another, so that one is compiled."""

    @jax.jit
    def step(params, opt_state, batch):
        def add(sums, microbatch):
            return jax.tree.map(jnp.add, sums, jax.value_and_grad(loss_of)(params, microbatch)), None

        microbatches = jax.tree.map(lambda x: x.reshape(num_microbatches, -1, *x.shape[1:]), batch)
        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        sums, _ = jax.lax.scan(add, zeros, microbatches)
        loss, grads = jax.tree.map(lambda leaf: leaf / num_microbatches, sums)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state, losses, after = tx.init(params), [], []
    for batch in batches:
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(float(loss))
        after.append(params)
    return losses, after
