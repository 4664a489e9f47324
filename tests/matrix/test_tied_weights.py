"""Tied weights: one parameter used by several stages. Raw gradients are compared, since Adam would hide a factor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from jaxpp_flax import linen
from jaxpp_flax.engine.jit import mpmd_jit_with_loop
from jaxpp_flax.engine.tracing.markers import mark_stage_end
from jaxpp_flax.engine.tracing.treduce import treduce
from jaxpp_flax.layers import PipelineStage
from jaxpp_flax.schedules import Interleaved1F1B, Schedule, Std1F1B, ZeroBubble
from tests.helpers import slow_but
from tests.matrix.harness import assert_replicas_agree, check, mesh_of, replicated

STAGES, MICROBATCHES, ROWS, DIM, VOCAB = 4, 4, 8, 16, 32

Loss = Callable[[Any, Any], jax.Array]
ADAMW = optax.adamw(1e-2, weight_decay=0.1)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=shape) / shape[-1] ** 0.5).astype(np.float32)


def layers(number: int = STAGES) -> list[np.ndarray]:
    return [normal(DIM, DIM, seed=10 + i) for i in range(number)]


def norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    return (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + 1e-3) * scale + bias


def embedding(p: Any, tokens: jax.Array) -> jax.Array:
    x = p["embed"][tokens]
    for i, w in enumerate(p["layers"]):
        x = mark_stage_end(jnp.tanh(x @ w)) if i < STAGES - 1 else jnp.tanh(x @ w)
    return x @ p["embed"].T


def same_shapes(p: Any, tokens: jax.Array) -> jax.Array:
    x = norm(p["embed"][tokens], p["scale"], p["bias"])
    for i, w in enumerate(p["layers"]):
        x = mark_stage_end(jnp.tanh(x @ w)) if i < STAGES - 1 else jnp.tanh(x @ w)
    return norm(x, p["scale"], p["bias"]) @ p["head"]


def different_shapes(p: Any, tokens: jax.Array) -> jax.Array:
    x = p["embed"][tokens] @ p["shared"]["kernel"] + p["shared"]["bias"]
    for i, w in enumerate(p["layers"]):
        x = mark_stage_end(jnp.tanh(x @ w)) if i < STAGES - 1 else jnp.tanh(x @ w)
    return (x @ p["shared"]["kernel"] + p["shared"]["bias"]) @ p["head"]


def three_stages(p: Any, tokens: jax.Array) -> jax.Array:
    x = p["embed"][tokens]
    for i, w in enumerate(p["layers"]):
        x = jnp.tanh(x @ w)
        if i != 1:
            x = jnp.sin(x @ p["shared"]["kernel"])
        if i < STAGES - 1:
            x = mark_stage_end(x)
    return x @ p["head"]


def every_stage(p: Any, tokens: jax.Array) -> jax.Array:
    """ALBERT: one block, and nothing else, in each stage."""
    x = p["embed"][tokens]
    for i in range(STAGES):
        x = x + jnp.tanh(x @ p["shared"]["kernel"] + p["shared"]["bias"])
        if i < STAGES - 1:
            x = mark_stage_end(x)
    return x @ p["head"]


def stacked(p: Any, tokens: jax.Array) -> jax.Array:
    """One leaf holds all layers; each stage slices its own."""
    x = p["embed"][tokens]
    for i in range(STAGES):
        x = jnp.tanh(x @ p["stack"][i])
        if i < STAGES - 1:
            x = mark_stage_end(x)
    return x @ p["head"]


PARAMETERS = {
    "embed": normal(VOCAB, DIM, seed=1),
    "head": normal(DIM, VOCAB, seed=2),
    "scale": 1 + normal(DIM, seed=3),
    "bias": normal(DIM, seed=4),
    "shared": {"kernel": normal(DIM, DIM, seed=5), "bias": normal(DIM, seed=6)},
    "stack": normal(STAGES, DIM, DIM, seed=7),
    "layers": layers(),
}
CASES: dict[str, tuple[Callable[..., jax.Array], list[str], list[str]]] = {
    # model, the parameters it has, and those of them that are tied
    "embedding": (embedding, ["embed", "layers"], ["['embed']"]),
    "same_shapes": (same_shapes, ["embed", "scale", "bias", "layers", "head"], ["['bias']", "['scale']"]),
    "different_shapes": (
        different_shapes,
        ["embed", "shared", "layers", "head"],
        ["['shared']['bias']", "['shared']['kernel']"],
    ),
    "three_stages": (three_stages, ["embed", "shared", "layers", "head"], ["['shared']['kernel']"]),
    "every_stage": (every_stage, ["embed", "shared", "head"], ["['shared']['bias']", "['shared']['kernel']"]),
    "stacked": (stacked, ["embed", "stack", "head"], ["['stack']"]),
}


def tokens(seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, VOCAB, (MICROBATCHES, ROWS, 2)), jnp.int32)


def train_step(model: Callable[..., jax.Array], tx: Any) -> Any:
    """Raw gradients beside the updated state."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(params, x), (x + 1) % VOCAB).mean()

    def step(state: Any, batch: Any, schedule: Schedule | None) -> Any:
        params, opt_state = state
        losses, grads = treduce(lambda x: jax.value_and_grad(loss)(params, x), batch, schedule)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), (losses, grads)

    return step


def parameters(case: str) -> Any:
    params = {k: v for k, v in PARAMETERS.items() if k in CASES[case][1]}
    return {**params, "shared": {"kernel": PARAMETERS["shared"]["kernel"]}} if case == "three_stages" else params


@pytest.mark.parametrize("case", slow_but(CASES, "embedding", "stacked"))
def test_gradients_and_updates(case: str):
    # SGD: Adam's division by the root of v would amplify the rounding of the smallest gradients.
    params, tx = parameters(case), optax.sgd(0.1, momentum=0.9)
    step = train_step(CASES[case][0], tx)
    check(step, (params, tx.init(params)), tokens(), mesh_of(STAGES), ZeroBubble(STAGES))


def test_tied_within_and_across_ranks():
    """Stages 0 and 2 are on one rank, 1 and 3 on the other."""
    params, tx = parameters("every_stage"), optax.sgd(0.1)
    check(train_step(every_stage, tx), (params, tx.init(params)), tokens(), mesh_of(2), Interleaved1F1B(STAGES, 2))


@pytest.mark.parametrize("case", slow_but(CASES, "embedding"))
def test_copies_stay_identical_for_50_steps(case: str):
    """Adam with weight decay, whose updates feed on every earlier rounding; a new batch in every step."""
    model, _, tied = CASES[case]
    params = parameters(case)
    step = mpmd_jit_with_loop(train_step(model, ADAMW), mesh_of(STAGES), donate_argnums=0, static_argnums=2)
    state = (params, ADAMW.init(params))
    first = None
    for number in range(50):
        state, (losses, _) = step(state, tokens(number), Std1F1B(STAGES))
        first = np.mean(losses) if first is None else first
    assert replicated(state[0]) == tied, "the tied parameters, and no others, live on several ranks"
    assert_replicas_agree(state)
    assert np.mean(losses) < 0.5 * first, "the model learned"
    for before, after in zip(jax.tree.leaves(params), jax.tree.leaves(state[0]), strict=True):
        assert np.abs(np.asarray(after) - before).max() > 1e-2


class NnxTied(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCAB, DIM, rngs=rngs)
        self.blocks = nnx.List([PipelineStage(nnx.Linear(DIM, DIM, rngs=rngs)) for _ in range(2)])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = jnp.tanh(block(x))
        return self.embed.attend(x)


class LinenTied(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed, norm = nn.Embed(VOCAB, DIM), nn.LayerNorm()
        x = norm(embed(tokens))
        for _ in range(2):
            x = jnp.tanh(linen.PipelineStage(nn.Dense(DIM))(x))
        return embed.attend(norm(x))


def test_nnx():
    graphdef, params = nnx.split(NnxTied(nnx.Rngs(0)))
    step = train_step(lambda p, x: nnx.merge(graphdef, p, copy=True)(x), optax.sgd(0.1))
    check(step, (params, optax.sgd(0.1).init(params)), tokens(), mesh_of(2))


@pytest.mark.slow
def test_linen():
    model = LinenTied()
    params = model.init(jax.random.key(0), tokens()[0])
    check(train_step(model.apply, optax.sgd(0.1)), (params, optax.sgd(0.1).init(params)), tokens(), mesh_of(2))
