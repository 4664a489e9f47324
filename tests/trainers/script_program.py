"""A model so small that NumPy knows every bit of its training: what the trainer holds tells which examples it has seen.

All values are whole numbers (the average of the weights: whole numbers over powers of two), and every sum and product
below 2**24: float32 is exact, and the order of sums does not matter. Each step hashes the examples of its batch into
parameters, optimizer and mutable state, so two histories of examples give two states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxpp_flax import PipelineStage, PipelineTrainer
from jaxpp_flax.trainers import Checkpoints, Inference, Logging, Tracker, Training

WIDTH, MODULUS, MICROBATCHES = 3, 509.0, 2

# Of one example each; multiples of 8, so that the mean over a batch of 4 or 8 is a whole number.
FEATURES = (8 * np.random.default_rng(7).integers(1, 64, (400, WIDTH))).astype(np.float32)


class Seen(nnx.Variable):
    """Mutable state: hashes the microbatches in their order."""


class Layer(nnx.Module):
    def __init__(self, start: int):
        self.weight = nnx.Param(jnp.arange(start, start + WIDTH, dtype=jnp.float32))
        self.seen = Seen(jnp.zeros(WIDTH))

    def __call__(self, total, x):
        self.seen[...] = jnp.mod(3 * self.seen[...] + x.sum(0), MODULUS)
        return total + (x * self.weight[...]).sum(-1)


class Model(nnx.Module):
    def __init__(self):
        self.layers = nnx.List([PipelineStage(Layer(1 + 10 * i)) for i in range(2)])

    def __call__(self, x):
        total = jnp.zeros(x.shape[0])
        for layer in self.layers:
            total, x = layer(total, x), x[:, ::-1]
        return total


def _hashing() -> optax.GradientTransformation:
    """`anchor` begins as a copy of the parameters, as `z` of schedule-free does; `trace` as zeros."""

    def init(params: Any) -> Any:
        return {"anchor": params, "trace": jax.tree.map(jnp.zeros_like, params)}

    def update(grads: Any, state: Any, params: Any) -> Any:
        trace = jax.tree.map(lambda t, g: jnp.mod(2 * t + g, MODULUS), state["trace"], grads)
        anchor = jax.tree.map(lambda a, g: jnp.mod(5 * a + g, MODULUS), state["anchor"], grads)
        changes = jax.tree.map(lambda p, t, a: jnp.mod(3 * p + t + a, MODULUS) - p, params, trace, anchor)
        return changes, {"anchor": anchor, "trace": trace}

    return optax.GradientTransformation(init, update)


def loss_fn(model, batch):
    return model(batch["x"]).mean()


def make_trainer(
    checkpoints: Path | Checkpoints | None, *, stages: int, tracker: Tracker | None = None, **options: Any
) -> PipelineTrainer:
    return PipelineTrainer(
        Model(), _hashing(), loss_fn, num_stages=stages, checkpoints=checkpoints,
        inference=Inference(predict_fn=lambda model, batch: model(batch["x"])), training=Training(ema_decay=0.5),
        logging=Logging(progress=False, every=1, tracker=tracker), mesh={},
        **{"num_microbatches": MICROBATCHES, **options},
    )  # fmt: skip


def features_of(examples: Sequence[int]) -> dict[str, np.ndarray]:
    return {"x": FEATURES[list(examples)]}


@dataclass(frozen=True)
class State:
    """What a `TrainState` of this model holds: float32 arrays of shape (2, WIDTH), a row for each layer."""

    step: int
    params: np.ndarray
    anchor: np.ndarray
    trace: np.ndarray
    ema: np.ndarray
    seen: np.ndarray

    @staticmethod
    def first() -> State:
        params = np.array([[1, 2, 3], [11, 12, 13]], np.float32)
        zeros = np.zeros_like(params)
        return State(step=0, params=params, anchor=params, trace=zeros, ema=params, seen=zeros)

    @staticmethod
    def of(state: Any) -> State:
        """A trainer's, or what a checkpoint of it gives."""

        def rows(tree: Any) -> np.ndarray:
            return np.stack([np.asarray(leaf) for leaf in jax.tree.leaves(tree)])

        params, opt_state = rows(state.params), state.opt_state
        anchor, trace = rows(opt_state["anchor"]), rows(opt_state["trace"])
        return State(int(state.step), params, anchor, trace, rows(state.ema), rows(state.model_state))

    def predicted(self, examples: Sequence[int]) -> np.ndarray:
        x = FEATURES[list(examples)]
        return (x * self.params[0]).sum(-1) + (x[:, ::-1] * self.params[1]).sum(-1)

    def loss(self, examples: Sequence[int]) -> float:
        return float(self.predicted(examples).astype(np.float64).mean())

    def after(self, *batches: Sequence[int]) -> State:
        """One step later, with a batch, or with so many as a power of two."""
        seen, grads = self.seen, np.zeros_like(self.params)
        for examples in batches:
            x = FEATURES[list(examples)]
            both = np.stack([x, x[:, ::-1]])  # what each layer gets: (2, batch, WIDTH)
            for part in np.split(both, MICROBATCHES, axis=1):
                seen = np.mod(3 * seen + part.sum(1), MODULUS)
            grads = grads + both.mean(1) / np.float32(len(batches))
        trace = np.mod(2 * self.trace + grads, MODULUS)
        anchor = np.mod(5 * self.anchor + grads, MODULUS)
        params = np.mod(3 * self.params + trace + anchor, MODULUS)
        ema = np.float32(0.5) * params + np.float32(0.5) * self.ema
        return replace(self, step=self.step + 1, params=params, anchor=anchor, trace=trace, ema=ema, seen=seen)

    def differences(self, other: State) -> list[str]:
        """The names of the parts that are not equal bit by bit."""
        names = ("step", "params", "anchor", "trace", "ema", "seen")
        return [name for name in names if not np.array_equal(getattr(self, name), getattr(other, name))]
