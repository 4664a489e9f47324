"""Two towers with a learned temperature, their contrastive loss, and its plain reference for the whole batch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

import jaxpp_flax.linen as linen_pipeline
from jaxpp_flax import PipelineStage, PipelineTrainer, WholeBatchLoss
from jaxpp_flax.trainers.model.calling import call_function

WIDTH, IMAGE, TEXT, MICROBATCHES = 8, 6, 3, 4


class Counted(nnx.Module):
    """Reads what it wrote in the microbatch before."""

    def __init__(self) -> None:
        self.count = nnx.Variable(jnp.float32(0.0))

    def __call__(self, x: Any) -> Any:
        self.count[...] += 1.0
        return x * (1.0 + 0.3 * self.count[...])


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, dropout: float, batch_norm: bool, counted: bool) -> None:
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs) if dropout else None
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs, momentum=0.9) if batch_norm else None
        self.counted = Counted() if counted else None

    def __call__(self, x: Any) -> Any:
        y = jnp.tanh(self.linear(x))
        for layer in (self.dropout, self.norm, self.counted):
            y = y if layer is None else layer(y)
        return x + y


class Tower(nnx.Module):
    def __init__(self, features: int, name: str, rngs: nnx.Rngs, depth: int, options: dict[str, Any]) -> None:
        self.first = nnx.Linear(features, WIDTH, rngs=rngs)
        self.blocks = nnx.List([PipelineStage(Block(rngs, **options), name=f"{name}_{i}") for i in range(depth)])

    def __call__(self, x: Any) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return normalized(x)


class TwoTowers(nnx.Module):
    def __init__(
        self, *, dropout: float = 0.0, batch_norm: bool = False, counted: bool = False, depth: int = 2
    ) -> None:
        options = {"dropout": dropout, "batch_norm": batch_norm, "counted": counted}
        rngs = nnx.Rngs(0)
        self.image, self.text = (
            Tower(features, name, rngs, depth, options) for name, features in (("image", IMAGE), ("text", TEXT))
        )
        self.log_scale = nnx.Param(jnp.float32(0.7))


class LinenTower(nn.Module):
    """One tower in Linen, as small as a model of two stages can be."""

    @nn.compact
    def __call__(self, batch: Any, training: bool = True) -> Any:
        x = jnp.tanh(linen_pipeline.PipelineStage(nn.Dense(WIDTH), name="image_0")(batch["image"]))
        x = nn.Dropout(0.5, deterministic=not training)(x)
        return linen_pipeline.PipelineStage(nn.Dense(WIDTH), name="image_1")(x)


def normalized(x: Any) -> Any:
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def embed(model: Any, batch: Any) -> Any:
    return model.image(batch["image"]), model.text(batch["text"]), model.log_scale[...]


def info_nce(embeddings: Any, batch: Any) -> Any:
    """The symmetric contrastive loss, with the share of texts that find their image."""
    image, text, log_scale = embeddings
    logits = jnp.exp(log_scale) * image @ text.T
    labels = jnp.arange(len(logits))
    losses = [optax.softmax_cross_entropy_with_integer_labels(x, labels) for x in (logits, logits.T)]
    return (losses[0].mean() + losses[1].mean()) / 2, {"found": (logits.argmax(0) == labels).mean()}


def weighted_info_nce(embeddings: Any, batch: Any) -> Any:
    """The same with weights that differ between the microbatches."""
    image, text, log_scale = embeddings
    logits = jnp.exp(log_scale) * image @ text.T
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.arange(len(logits)))
    return (losses * batch["weight"]).sum(), batch["weight"].sum()


CONTRASTIVE = WholeBatchLoss(embed, info_nce)


def pairs(examples: int = 16, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {"image": (examples, IMAGE), "text": (examples, TEXT)}
    batch = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return batch | {"weight": rng.integers(0, 4, examples).astype(np.float32)}


def trainer_of(loss: Any = CONTRASTIVE, model: Any = None, tx: Any = None, **options: Any) -> PipelineTrainer:
    options = {"num_stages": 1, "num_microbatches": MICROBATCHES, "logging": False} | options
    return PipelineTrainer(TwoTowers() if model is None else model, tx or optax.sgd(1.0), loss, **options)


def whole_batch_step(loss: WholeBatchLoss, batch: Any, model: Any = None, **options: Any) -> tuple[Any, Any, Any]:
    """The loss, its gradients and the model's new state of a first step, under one `jax.jit` of the whole batch.

    The embeddings of each part of the batch have the random keys and the state that the trainer documents.
    """
    trainer = trainer_of(loss, model, **{"mesh": {}, **options})  # its state lies in this process alone
    adapter, state, count = trainer.model.adapter, trainer.state, trainer.num_microbatches

    def total(params: Any) -> tuple[Any, Any]:
        def embed_part(rest: Any, index: Any) -> tuple[Any, Any]:
            part = jax.tree.map(lambda x: jnp.stack(jnp.split(x, count))[index] if np.shape(x) else x, batch)
            embeddings, bound = call_function(
                loss.embed_fn, adapter, params, rest, part, step=state.step, microbatch=index, training=True
            )
            return adapter.rest_of(bound, rest), embeddings

        rest, parts = jax.lax.scan(embed_part, state.model_state, jnp.arange(count))
        whole = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]) if x.ndim > 1 else x[0], parts)
        value, second = loss.loss_fn(whole, batch)
        return value if isinstance(second, dict) else value / second, rest

    (value, rest), gradients = jax.jit(jax.value_and_grad(total, has_aux=True))(state.params)
    return value, gradients, rest
