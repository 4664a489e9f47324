"""Losses of which each example surely counts for itself, and losses of which it does not, or nobody knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from jaxpp_flax.trainers.data.batch import resized
from jaxpp_flax.trainers.loss.loss_trace import is_separable
from jaxpp_flax.trainers.model.chosen_model import choose_model
from jaxpp_flax.trainers.state.train_state import TrainState, shapes_of
from tests.trainers import models as m


class Mixed(nnx.Module):
    """Attention, a norm of each kind, and layers in a scan."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(m.VOCABULARY, m.WIDTH, rngs=rngs)
        make = nnx.split_rngs(splits=2)(nnx.vmap(lambda rngs: nnx.Linear(m.WIDTH, m.WIDTH, rngs=rngs)))
        self.layers = make(rngs)
        self.attention = nnx.MultiHeadAttention(2, m.WIDTH, decode=False, rngs=rngs)
        self.norm, self.batch_norm = nnx.LayerNorm(m.WIDTH, rngs=rngs), nnx.BatchNorm(m.WIDTH, rngs=rngs)
        self.head = nnx.Linear(m.WIDTH, m.VOCABULARY, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        x = x + self.attention(self.norm(x), mask=nnx.make_causal_mask(tokens))
        x = nnx.scan(lambda x, layer: jnp.tanh(layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)
        return self.head(self.batch_norm(x))


def entropies(model: Any, batch: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["tokens"]), batch["targets"])


def masked(model: Any, batch: Any) -> tuple[Any, Any]:
    return (entropies(model, batch) * batch["mask"]).sum(), batch["mask"].sum()


def flat(model: Any, batch: Any) -> jax.Array:
    logits, targets = model(batch["tokens"]).reshape(-1, m.VOCABULARY), batch["targets"].reshape(-1)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def penalty(model: Any) -> jax.Array:
    return sum((leaf**2).sum() for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


def contrastive(model: Any, batch: Any) -> jax.Array:
    logits = model(batch["tokens"])
    scores = jnp.einsum("itv,jtv->ij", logits, logits)
    return optax.softmax_cross_entropy_with_integer_labels(scores, jnp.arange(len(scores))).mean()


def carried(model: Any, batch: Any) -> jax.Array:
    """Each round reads the sum of all examples of the rounds before."""
    return jax.lax.scan(lambda c, x: (c + (x * (1 + c)).mean(), c), 0.0, entropies(model, batch).T)[1].mean()


def conditional(model: Any, batch: Any) -> jax.Array:
    losses = entropies(model, batch)
    return jax.lax.cond(losses.mean() > 1, lambda: losses.mean(), lambda: 2 * losses.mean())


APART: dict[str, Callable[[Any, Any], Any]] = {
    "mean": lambda model, b: entropies(model, b).mean(),
    "pair": masked,
    "pair with a size": lambda model, b: (entropies(model, b).sum(), entropies(model, b).size),
    "flat": flat,
    "metrics": lambda model, b: (
        entropies(model, b).mean(),
        {"accuracy": (model(b["tokens"]).argmax(-1) == b["targets"]).mean(), "masked": masked(model, b)},
    ),
    "mean and a penalty": lambda model, b: entropies(model, b).mean() + 1e-3 * penalty(model),
    "means of examples": lambda model, b: (
        (entropies(model, b) * b["mask"]).sum(-1) / jnp.maximum(b["mask"].sum(-1), 1)
    ).mean(),
    "vmap": lambda model, b: jax.vmap(jnp.mean)(entropies(model, b)).mean(),
}
NOT_APART: dict[str, Callable[[Any, Any], Any]] = {
    "masked mean": lambda model, b: jnp.divide(*masked(model, b)),
    "sum": lambda model, b: entropies(model, b).sum(),
    "perplexity": lambda model, b: (entropies(model, b).mean(), {"perplexity": jnp.exp(entropies(model, b).mean())}),
    "mean with a weight": lambda model, b: (entropies(model, b).mean(), 1.0),
    "mean with a size": lambda model, b: (entropies(model, b).mean(), len(b["tokens"])),
    "count": lambda model, b: (entropies(model, b).mean(), {"tokens": b["mask"].sum()}),
    "largest": lambda model, b: (entropies(model, b).mean(), {"worst": entropies(model, b).max()}),
    "contrastive": contrastive,
    "neighbours": lambda model, b: (entropies(model, b) * jnp.roll(entropies(model, b), 1, 0)).mean(),
    "pairs": lambda model, b: jax.nn.softplus(entropies(model, b)[::2] - entropies(model, b)[1::2]).mean(),
    "pairs by a reshape": lambda model, b: jax.nn.softplus(
        jnp.diff(entropies(model, b).reshape(-1, 2, m.LENGTH), axis=1)
    ).mean(),
    "variance": lambda model, b: ((entropies(model, b) - entropies(model, b).mean()) ** 2).mean(),
    "sum and a penalty": lambda model, b: (masked(model, b)[0] + penalty(model), b["mask"].sum()),
    "carried": carried,
    "conditional": conditional,
    "permuted": lambda model, b: (entropies(model, b) * entropies(model, b)[jnp.arange(len(b["mask"]))[::-1]]).mean(),
}


@pytest.mark.parametrize("model", [m.Tokens, Mixed])
@pytest.mark.parametrize("name", [*APART, *NOT_APART])
def test_only_what_is_proved_counts_apart(name: str, model: Any):
    chosen = choose_model(model(rngs=nnx.Rngs(0)), None, nnx.Param, None, 0)
    shapes = shapes_of((chosen.params, chosen.rest))
    state = TrainState(step=jax.ShapeDtypeStruct((), jnp.int32), params=shapes[0], opt_state=(), model_state=shapes[1])
    loss_fn, batch = (APART | NOT_APART)[name], m.make_batch(6)
    assert is_separable(chosen.adapter, loss_fn, state, resized(batch, 6)) == (name in APART)


def test_a_single_example_is_looked_at_as_two():
    chosen = choose_model(m.Tokens(rngs=nnx.Rngs(0)), None, nnx.Param, None, 0)
    shapes = shapes_of((chosen.params, chosen.rest))
    state = TrainState(step=jax.ShapeDtypeStruct((), jnp.int32), params=shapes[0], opt_state=(), model_state=shapes[1])
    one = resized(m.make_batch(1), 1)
    assert is_separable(chosen.adapter, masked, state, one)
    assert not is_separable(chosen.adapter, NOT_APART["masked mean"], state, one)
