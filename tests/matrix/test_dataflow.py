"""How values may flow between stages: past them, side by side, as trees, as integers and masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp_flax.engine.program.program import Transfer
from jaxpp_flax.engine.tracing.markers import mark_stage_end
from jaxpp_flax.engine.tracing.treduce import Add, Concat, treduce
from jaxpp_flax.schedules import Interleaved1F1B, Schedule, ZeroBubble
from tests.helpers import batch_of, slow_but
from tests.matrix.harness import check, mesh_of

MICROBATCHES, ROWS, DIM = 4, 16, 16
BATCH = batch_of(MICROBATCHES, ROWS, DIM, host=True, labels=True)


def weights(number: int, rows: int = DIM, columns: int = DIM, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [(rng.normal(size=(rows, columns)) / rows**0.5).astype(np.float32) for _ in range(number)]


def train_step(loss: Callable[..., jax.Array]) -> Any:
    def step(params: Any, batch: Any, schedule: Schedule | None) -> Any:
        losses, grads = treduce(lambda mb: jax.value_and_grad(loss)(params, mb), batch, schedule)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), (losses, grads)

    return step


def u_net(p: Any, b: Any) -> jax.Array:
    """Skip connections over one and over three stages, one joined by concatenation."""
    first = jnp.tanh(b["x"] @ p[0])
    x = mark_stage_end(first)
    second = jnp.tanh(x @ p[1])
    x = mark_stage_end(second)
    x = jnp.tanh(x @ p[2]) + second
    x = mark_stage_end(x)
    x = jnp.concatenate([x @ p[3], first], -1) @ p[4]
    return jnp.mean((x - b["y"]) ** 2)


def early_values(p: Any, b: Any) -> jax.Array:
    """A mask, positions and rotary tables made before the first mark and used by every stage."""
    position = jnp.arange(ROWS)
    angle = position[:, None] * jnp.exp(-jnp.arange(DIM // 2) / 4.0)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    mask = jnp.where(b["mask"], 1.0, 0.1) * jnp.exp(-position / ROWS)
    causal = jnp.tril(jnp.ones((ROWS, ROWS)))

    def rotate(x: jax.Array) -> jax.Array:
        left, right = jnp.split(x, 2, -1)
        return jnp.concatenate([left * cos - right * sin, left * sin + right * cos], -1)

    x = b["x"]
    for i, w in enumerate(p):
        q = rotate(x @ w)
        x = x + (jnp.where(causal > 0, q @ q.T, 0.0) @ x) * mask[:, None] / ROWS
        if i < len(p) - 1:
            x = mark_stage_end(x)
    return jnp.mean((x - b["y"]) ** 2)


def encoder_decoder(p: Any, b: Any) -> jax.Array:
    """The encoder's output is read by every stage of the decoder; the decoder's input skips the encoder."""
    memory = jnp.tanh(b["x"] @ p[0])
    memory = mark_stage_end(memory)
    memory = jnp.tanh(memory @ p[1])
    memory = mark_stage_end(memory)
    x = b["y"]
    for w in p[2:4]:
        x = jnp.tanh(x @ w + jax.nn.softmax(x @ memory.T) @ memory)
        x = mark_stage_end(x)
    return jnp.mean((x @ p[4] - b["y"]) ** 2)


def branches(p: Any, b: Any) -> jax.Array:
    """Two towers that never meet before the end, each with a mark of its own: stages in program order."""
    left = mark_stage_end(jnp.tanh(b["x"] @ p[0]), "left")
    right = mark_stage_end(jnp.tanh(b["y"] @ p[1]), "right")
    both = mark_stage_end(jnp.tanh(left @ p[2]) * jnp.tanh(right @ p[3]))
    return jnp.mean((both @ p[4] - b["y"]) ** 2)


def trees(p: Any, b: Any) -> jax.Array:
    """Several arrays in a nested structure, some of them untouched, cross each cut."""
    state = {"x": b["x"] @ p[0], "pair": (b["y"], jnp.tanh(b["y"] @ p[1])), "scale": jnp.mean(b["x"])}
    state = mark_stage_end(state)
    state = mark_stage_end({**state, "x": jnp.tanh(state["x"] @ p[2]) + state["pair"][1]})
    x, (y, z) = state["x"], state["pair"]
    x, z = mark_stage_end((x @ p[3], z * state["scale"]))
    return jnp.mean((x + z @ p[4] - y) ** 2)


def integers_and_masks(p: Any, b: Any) -> jax.Array:
    """Token ids and boolean activations that depend on earlier stages' results."""
    x = jnp.tanh(b["x"] @ p[0])
    x, chosen, keep = mark_stage_end((x, jnp.argmax(x @ p[1], -1), x > 0))
    x = jnp.where(keep, x, 0.1 * x) @ p[2] + p[3][chosen]
    x, chosen, ids = mark_stage_end((x, chosen, b["ids"]))
    x = x @ p[3] + p[4][(chosen + ids) % DIM]
    x = mark_stage_end(x)
    return jnp.mean((x @ p[4] - b["y"]) ** 2)


CASES = {f.__name__: f for f in (u_net, early_values, encoder_decoder, branches, trees, integers_and_masks)}
STAGES = {"u_net": 4, "early_values": 3, "encoder_decoder": 5, "branches": 4, "trees": 4, "integers_and_masks": 4}


def parameters(case: str) -> list[np.ndarray]:
    if case == "early_values":
        return weights(STAGES[case])
    return weights(4, seed=2) + weights(1, 2 * DIM if case == "u_net" else DIM)


# The other cases run in the tests below, on other schedules.
@pytest.mark.parametrize("case", slow_but(CASES, "encoder_decoder", "trees", "integers_and_masks"))
def test_equals_plain(case: str):
    ranks = STAGES[case]
    check(train_step(CASES[case]), parameters(case), BATCH, mesh_of(ranks), ZeroBubble(ranks))


def test_interleaved():
    check(train_step(branches), parameters("branches"), BATCH, mesh_of(2), Interleaved1F1B(4, 2))


def test_a_skip_goes_straight_to_its_user():
    """No stage in between receives it: between ranks 0 and 3 the only transfers are the skip and its gradient."""
    params = weights(4, seed=2) + weights(1, 2 * DIM)
    compiled, _ = check(train_step(u_net), params, BATCH, mesh_of(4))
    sizes = {
        (i.source, i.target): len(i.sent)
        for i in compiled.program.instructions
        if isinstance(i, Transfer) and {i.source, i.target} == {0, 3}
    }
    assert sizes == {(0, 3): 1, (3, 0): 1}
    between = [i for i in compiled.program.instructions if isinstance(i, Transfer) and (i.source, i.target) == (0, 1)]
    assert all(len(i.sent) == 1 for i in between)


def test_what_anyone_can_compute_is_not_sent():
    """Masks, positions and tables depend on the batch alone: each stage computes its own, and one array crosses."""
    compiled, _ = check(train_step(early_values), weights(3), BATCH, mesh_of(3))
    between = [i for i in compiled.program.instructions if isinstance(i, Transfer)]
    assert {len(i.sent) for i in between} == {1}


def test_several_results_of_several_stages():
    """Aux outputs of every stage, an auxiliary loss of a middle one, and metrics with operations of their own."""

    def loss(p: Any, b: Any) -> Any:
        x = jnp.tanh(b["x"] @ p[0])
        first = {"mean": x.mean(), "activations": x}
        x = jnp.tanh(mark_stage_end(x) @ p[1])
        gate = jax.nn.softmax(x @ p[2])
        balance = DIM * jnp.sum(gate.mean(0) * (gate == gate.max(-1, keepdims=True)).mean(0))  # as MoE layers do
        x = mark_stage_end(x * gate)
        logits = x @ p[3]
        z = jnp.mean(jax.nn.logsumexp(logits, -1) ** 2)
        total = jnp.mean((logits - b["y"]) ** 2) + 0.3 * balance + 0.01 * z
        return total, {"first": first, "balance": balance, "z": z, "count": jnp.int32(1)}

    def step(params: Any, batch: Any, schedule: Schedule | None) -> Any:
        body = lambda mb: jax.value_and_grad(loss, has_aux=True)(params, mb)  # noqa: E731
        (losses, aux), grads = treduce(body, batch, schedule, operation=((Concat(), {**METRICS}), Add))
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), (losses, aux, grads)

    check(step, weights(4), BATCH, mesh_of(3), ZeroBubble(3))


METRICS = {"first": Concat(), "balance": Concat(), "z": Add, "count": Add}


def test_unequal_masks_equal_the_whole_batch():
    """Token-weighted losses: sums and weights are reduced apart, so that it does not matter how a batch is split."""

    def sums(p: Any, b: Any) -> Any:
        x = b["x"]
        for i, w in enumerate(p):
            x = jnp.tanh(x @ w) if i == 0 else jnp.tanh(mark_stage_end(x) @ w)
        weight = b["mask"].astype(jnp.float32)
        return jnp.sum(weight[:, None] * (x - b["y"]) ** 2), weight.sum()

    def step(params: Any, batch: Any, schedule: Schedule | None) -> Any:
        body = lambda mb: jax.value_and_grad(sums, has_aux=True)(params, mb)  # noqa: E731
        (total, weight), grads = treduce(body, batch, schedule, operation=Add)
        grads = jax.tree.map(lambda g: g / weight, grads)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), (total / weight, grads)

    def whole(params: Any, batch: Any, _: Any) -> Any:
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)
        mean = lambda p: (lambda s, w: s / w)(*sums(p, flat))  # noqa: E731
        value, grads = jax.value_and_grad(mean)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), (value, grads)

    check(step, weights(3), BATCH, mesh_of(3), reference=whole)
