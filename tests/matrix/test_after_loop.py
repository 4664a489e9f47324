"""What a step does around its loop: optimizers, clipping, conditions, norms, several loops."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpp_flax.engine.jit import mpmd_jit_with_loop
from jaxpp_flax.engine.passes.place import PlacementWarning
from jaxpp_flax.engine.program.program import Transfer
from jaxpp_flax.engine.tracing.markers import mark_stage_end
from jaxpp_flax.engine.tracing.treduce import Add, treduce
from jaxpp_flax.schedules import GPipe, Interleaved1F1B, Schedule, Std1F1B
from tests.helpers import batch_of, slow_but, tree_allclose
from tests.matrix.harness import check, mesh_of, run

STAGES, MICROBATCHES, ROWS, DIM = 3, 3, 8, 24  # a weight is 2.3 kB: more than what is copied around freely
BATCH = batch_of(MICROBATCHES, ROWS, DIM, host=True)


def parameters(layers: int = STAGES) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [
        {"w": (rng.normal(size=(DIM, DIM)) / DIM**0.5).astype(np.float32), "b": np.full(DIM, 0.1, np.float32)}
        for _ in range(layers)
    ]


def model(params: Any, x: jax.Array) -> jax.Array:
    for i, p in enumerate(params):
        x = jnp.tanh(x @ p["w"] + p["b"])
        x = mark_stage_end(x) if i < len(params) - 1 else x
    return x


def loss_fn(params: Any, b: Any) -> jax.Array:
    return jnp.mean((model(params, b["x"]) - b["y"]) ** 2)


def gradients(params: Any, batch: Any, schedule: Schedule | None) -> Any:
    losses, grads = treduce(lambda mb: jax.value_and_grad(loss_fn)(params, mb), batch, schedule)
    return losses, jax.tree.map(lambda g: g / losses.size, grads)


def optax_step(tx: optax.GradientTransformation) -> Any:
    def step(state: Any, batch: Any, schedule: Schedule | None) -> Any:
        params, opt_state = state
        losses, grads = gradients(params, batch, schedule)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), losses

    return step


def train(tx: optax.GradientTransformation, *, steps: int = 3, rtol: float = 1e-5, layers: int = STAGES) -> Any:
    params = parameters(layers)
    return check(optax_step(tx), (params, tx.init(params)), BATCH, mesh_of(STAGES), steps=steps, rtol=rtol)


SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 10)
CLIP = optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(0.1, momentum=0.9))
OPTIMIZERS = {
    # Adam's epsilon is large here: by default it amplifies the rounding of gradients close to zero.
    "adamw": optax.adamw(1e-2, eps=1e-3, weight_decay=0.1),
    "sgd_momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "lamb": optax.lamb(1e-2, eps=1e-3),
    "muon": optax.contrib.muon(1e-2, eps=1e-3) if hasattr(optax.contrib, "muon") else optax.sgd(0.1),
    "learning_rate_schedule": optax.sgd(SCHEDULE),
    "inject_hyperparams": optax.inject_hyperparams(optax.sgd)(learning_rate=SCHEDULE, momentum=0.9),
    "ema_of_updates": optax.chain(optax.ema(0.9), optax.scale(-0.1)),
    "clip": CLIP,
    "per_layer_ratios": optax.chain(optax.scale_by_trust_ratio(), optax.scale(-0.01)),
    "apply_if_finite": optax.apply_if_finite(optax.sgd(0.1, momentum=0.9), 3),
    "multi_steps": optax.MultiSteps(optax.sgd(0.1, momentum=0.9), 2).gradient_transformation(),
    # Conditions whose branches mix ranks: the norm of all gradients is taken inside.
    "clip_in_multi_steps": optax.MultiSteps(CLIP, 2).gradient_transformation(),
    "clip_in_apply_if_finite": optax.apply_if_finite(CLIP, 3),
    "apply_if_finite_in_multi_steps": optax.MultiSteps(optax.apply_if_finite(CLIP, 3), 2).gradient_transformation(),
}


@pytest.mark.parametrize(
    "name", slow_but(OPTIMIZERS, "adamw", "adafactor", "inject_hyperparams", "clip", "apply_if_finite", "multi_steps")
)
def test_optimizer(name: str):
    train(OPTIMIZERS[name])


def test_lion_moves_each_weight_by_the_sign():
    """Lion's update is a sign, which the rounding of a gradient close to zero would flip: compared on nonzero ones."""
    train(optax.lion(1e-3, weight_decay=0.1), steps=2)


def test_multi_steps_applies_every_second_step():
    tx = optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation()
    params = parameters()
    step = mpmd_jit_with_loop(optax_step(tx), mesh_of(STAGES), static_argnums=2)
    history = run(step, (params, tx.init(params)), BATCH, Std1F1B(STAGES), 2)
    first, second = (jax.tree.map(np.asarray, state[0]) for state, _ in history)
    tree_allclose(first, params, rtol=0, atol=0)
    for before, after in zip(jax.tree.leaves(params), jax.tree.leaves(second), strict=True):
        assert np.abs(after - before).max() > 1e-4


def moved_bytes(compiled: Any) -> int:
    """Bytes that one step transfers between ranks outside of its loop."""
    spans = [i for i, x in enumerate(compiled.program.instructions) if getattr(x, "microbatch", -1) >= 0]
    return sum(
        sum(compiled._executables.nbytes[value] for value in i.received)
        for number, i in enumerate(compiled.program.instructions)
        if isinstance(i, Transfer) and not spans[0] < number < spans[-1]
    )


@pytest.mark.parametrize(
    "name",
    [
        "adamw",
        "clip",
        "apply_if_finite",
        "multi_steps",
        "inject_hyperparams",
        "clip_in_multi_steps",
        "clip_in_apply_if_finite",
        "apply_if_finite_in_multi_steps",
    ],
)
def test_only_scalars_cross_between_stages(name: str):
    """No parameter, gradient or optimizer state is moved: nothing close to the size of one weight."""
    tx = OPTIMIZERS[name]
    params = parameters()
    step = mpmd_jit_with_loop(optax_step(tx), mesh_of(STAGES), static_argnums=2)
    assert moved_bytes(step.compile((params, tx.init(params)), BATCH, Std1F1B(STAGES))) < 500


@pytest.mark.parametrize("bad_stage", range(STAGES))
def test_a_non_finite_gradient_skips_the_step_on_every_stage(bad_stage: int):
    tx = optax.apply_if_finite(optax.sgd(0.1, momentum=0.9), 3)
    params = parameters()

    def loss(params: Any, b: Any) -> jax.Array:
        poison = jnp.where(b["bad"], jnp.nan, 1.0)
        x = b["x"]
        for i, p in enumerate(params):
            # The gradient of this stage's bias alone is not finite.
            bias = p["b"] + (jax.lax.stop_gradient(p["b"]) * 0 + (p["b"] - jax.lax.stop_gradient(p["b"])) * poison) * (
                i == bad_stage
            )
            x = jnp.tanh(x @ p["w"] + jnp.nan_to_num(bias))
            x = mark_stage_end(x) if i < STAGES - 1 else x
        return jnp.mean((x - b["y"]) ** 2)

    def step(state: Any, batch: Any, schedule: Schedule | None) -> Any:
        params, opt_state = state
        losses, grads = treduce(lambda mb: jax.value_and_grad(loss)(params, mb), batch, schedule)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), losses

    bad = {**BATCH, "bad": np.array([False, True, False])}
    ((after, opt_state), _), *_ = check(step, (params, tx.init(params)), bad, mesh_of(STAGES), steps=1).history
    tree_allclose(jax.tree.map(np.asarray, after), params, rtol=0, atol=0)
    assert int(opt_state.notfinite_count) == 1


def test_frozen_parameters_cost_nothing():
    """No gradient and no accumulator is made for them, and they come out as they went in."""
    params = parameters()

    def step(state: Any, batch: Any, schedule: Schedule | None) -> Any:
        params, opt_state = state
        frozen, free = params[1], [params[0], params[2]]

        def loss(free: Any, b: Any) -> jax.Array:
            return loss_fn([free[0], frozen, free[1]], b)

        losses, grads = treduce(lambda mb: jax.value_and_grad(loss)(free, mb), batch, schedule)
        updates, opt_state = TX.update(grads, opt_state, free)
        free = optax.apply_updates(free, updates)
        return ([free[0], frozen, free[1]], opt_state), losses

    state = (params, TX.init([params[0], params[2]]))
    compiled, history = check(step, state, BATCH, mesh_of(STAGES))
    tree_allclose(jax.tree.map(np.asarray, history[-1][0][0][1]), params[1], rtol=0, atol=0)
    (loop,) = compiled._built.loops
    stages = [loop.partition.tasks[a.task].stage for a in loop.partition.accumulators]
    assert stages.count(1) == 0
    assert stages.count(0) == stages.count(2) - 1 == 2  # the losses are stacked by the last stage


TX = optax.sgd(0.1, momentum=0.9)


def test_multi_transform_with_set_to_zero():
    """Frozen by the optimizer: gradients that it throws away are not accumulated either."""
    tx = optax.multi_transform({"train": optax.sgd(0.1), "freeze": optax.set_to_zero()}, ["train", "freeze", "train"])
    compiled, history = train(tx)
    tree_allclose(jax.tree.map(np.asarray, history[-1][0][0][1]), parameters()[1], rtol=0, atol=0)
    (loop,) = compiled._built.loops
    assert 1 not in {loop.partition.tasks[a.task].stage for a in loop.partition.accumulators}


def test_ema_of_weights_and_metrics():
    """An average of the weights, global norms as metrics, and a ratio of norms for each layer."""

    def step(state: Any, batch: Any, schedule: Schedule | None) -> Any:
        params, ema, count = state
        losses, grads = gradients(params, batch, schedule)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        ema = optax.incremental_update(new, ema, 0.1)
        metrics = {
            "loss": losses.mean(),
            "norm": optax.tree.norm(grads),
            "ratios": jax.tree.map(lambda p, g: jnp.linalg.norm(g) / jnp.linalg.norm(p), params, grads),
            "largest": jnp.stack([jnp.max(jnp.abs(g)) for g in jax.tree.leaves(grads)]).max(),
            "finite": jnp.all(jnp.array([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)])),
        }
        return (new, ema, count + 1), metrics

    check(step, (parameters(), parameters(), np.int32(0)), BATCH, mesh_of(STAGES))


def norm_of(num_stages: int, num_ranks: int, schedule: Schedule) -> Any:
    """The norm of all gradients of a model of 4 layers, and its losses."""

    def step(state: Any, batch: Any, schedule: Schedule) -> Any:
        losses, grads = gradients(state, batch, schedule)
        return state, (optax.tree.norm(grads), losses)

    cuts = {4: [0, 1, 2], 2: [1], 1: []}[num_stages]
    pipelined = mpmd_jit_with_loop(step, mesh_of(num_ranks), static_argnums=2, cut_policy=lambda marks, n: cuts)
    return jax.tree.map(np.asarray, pipelined(parameters(4), BATCH, schedule)[1])


def test_the_norm_does_not_depend_on_schedule_or_stages():
    """Bit for bit: every layer's sum is its own, and these scalars are added in the program's order.

    Between numbers of stages XLA fuses a layer's own sums differently, so there a last bit may differ.
    """
    four = norm_of(4, 4, Std1F1B(4))
    tree_allclose(norm_of(4, 4, GPipe(4)), four, rtol=0, atol=0)
    tree_allclose(norm_of(4, 2, Interleaved1F1B(4, 2)), four, rtol=0, atol=0)
    tree_allclose(norm_of(2, 2, Std1F1B(2)), four, rtol=3e-7)
    tree_allclose(norm_of(1, 1, Std1F1B(1)), four, rtol=3e-7)


def test_flatten_runs_on_one_rank_with_one_warning():
    tx = optax.flatten(optax.sgd(0.1, momentum=0.9))
    params = parameters()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check(optax_step(tx), (params, tx.init(params)), BATCH, mesh_of(STAGES))
    messages = [str(w.message) for w in caught if issubclass(w.category, PlacementWarning)]
    assert len(messages) == 1
    one_stage = (DIM * DIM + DIM) * 4
    assert "`concatenate` at " in messages[0]
    assert f"mixes ranks [0, 1, 2] on rank 0 ({2 * one_stage:,} bytes)" in messages[0]
    assert "These 9,408 bytes are transferred in every step" in messages[0]  # and each weight's part of the result back


def test_train_then_evaluate_in_one_step():
    """Two loops, the second forward-only and on another number of microbatches, with the updated weights."""

    def step(state: Any, batch: Any, schedule: Schedule | None) -> Any:
        losses, grads = gradients(state, batch, schedule)
        state = jax.tree.map(lambda p, g: p - 0.1 * g, state, grads)
        both = jax.tree.map(lambda x: jnp.concatenate([x, x[:1] * 0.5]), batch)
        evaluate = None if schedule is None else GPipe(STAGES)
        total = treduce(lambda mb: loss_fn(state, mb), both, evaluate, operation=Add)
        return state, (losses, total / 4)

    check(step, parameters(), BATCH, mesh_of(STAGES))


def test_a_condition_on_a_metric():
    """A user's own `lax.cond` over all parameters: each rank runs its part of it."""

    def step(state: Any, batch: Any, schedule: Schedule | None) -> Any:
        losses, grads = gradients(state, batch, schedule)
        keep = losses.mean() < 1.2
        state = jax.lax.cond(keep, lambda: jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), lambda: state)
        return state, (losses, keep)

    check(step, parameters(), BATCH, mesh_of(STAGES))
