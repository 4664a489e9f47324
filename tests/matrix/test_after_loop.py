"""What a step does around its loop: optimizers, clipping, conditions, norms, several loops."""

from __future__ import annotations

import functools
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
from tests.engine.toys import built
from tests.helpers import batch_of, slow_but, tree_allclose
from tests.matrix.harness import check, mesh_of

STAGES, MICROBATCHES, ROWS, DIM = 2, 3, 8, 24  # a weight is 2.3 kB: more than what is copied around freely
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


def train(tx: optax.GradientTransformation, *, steps: int = 3) -> Any:
    params = parameters()
    return check(optax_step(tx), (params, tx.init(params)), BATCH, mesh_of(STAGES), steps=steps)


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


# Their updates look at each leaf alone, or at norms over all of them.
SCALARS_CROSS = (
    "adamw", "clip", "apply_if_finite", "multi_steps", "inject_hyperparams", "clip_in_multi_steps",
    "clip_in_apply_if_finite", "apply_if_finite_in_multi_steps",
)  # fmt: skip


@pytest.mark.parametrize(
    "name",
    slow_but(OPTIMIZERS, "adamw", "inject_hyperparams", "apply_if_finite_in_multi_steps"),
)
def test_optimizer(name: str):
    """No parameter, gradient or optimizer state is moved between stages: nothing close to the size of one weight."""
    compiled, history = train(OPTIMIZERS[name])
    if name in SCALARS_CROSS:
        assert moved_bytes(compiled) < 500
    if "multi_steps" in name:  # every second step applies
        before, first, second = (
            jax.tree.map(np.asarray, p) for p in (parameters(), history[0][0][0], history[1][0][0])
        )
        tree_allclose(first, before, rtol=0, atol=0)
        assert all(np.abs(a - b).max() > 1e-4 for a, b in zip(*map(jax.tree.leaves, (first, second)), strict=True))


@pytest.mark.slow
def test_lion_moves_each_weight_by_the_sign():
    """Lion's update is a sign, which the rounding of a gradient close to zero would flip: compared on nonzero ones."""
    train(optax.lion(1e-3, weight_decay=0.1), steps=2)


def moved_bytes(compiled: Any) -> int:
    """Bytes that one step transfers between ranks outside of its loop."""
    spans = [i for i, x in enumerate(compiled.program.instructions) if getattr(x, "microbatch", -1) >= 0]
    return sum(
        sum(compiled.executables.nbytes[value] for value in i.received)
        for number, i in enumerate(compiled.program.instructions)
        if isinstance(i, Transfer) and not spans[0] < number < spans[-1]
    )


def test_a_non_finite_gradient_skips_the_step_on_every_stage():
    """Whichever stage it is made in, and in one microbatch alone."""
    tx, params = optax.apply_if_finite(optax.sgd(0.1, momentum=0.9), 3), parameters()

    def loss(params: Any, b: Any) -> jax.Array:
        x = b["x"]
        for i, p in enumerate(params):
            # The gradient of this stage's bias alone is not finite.
            fixed = jax.lax.stop_gradient(p["b"])
            bias = p["b"] + fixed * 0 + (p["b"] - fixed) * jnp.where(b["bad"][i], jnp.nan, 1.0)
            x = jnp.tanh(x @ p["w"] + jnp.nan_to_num(bias))
            x = mark_stage_end(x) if i < STAGES - 1 else x
        return jnp.mean((x - b["y"]) ** 2)

    def step(state: Any, batch: Any) -> Any:
        params, opt_state = state
        losses, grads = treduce(lambda mb: jax.value_and_grad(loss)(params, mb), batch, Std1F1B(STAGES))
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), losses

    pipelined, state = mpmd_jit_with_loop(step, mesh_of(STAGES)), (params, tx.init(params))
    for bad_stage in [*range(STAGES), None]:
        bad = np.zeros((MICROBATCHES, STAGES), bool)
        if bad_stage is not None:
            bad[1, bad_stage] = True
        (after, opt_state), losses = pipelined(state, {**BATCH, "bad": bad})
        assert int(opt_state.notfinite_count) == (bad_stage is not None)
        assert np.isfinite(np.asarray(losses)).all()
        if bad_stage is not None:
            tree_allclose(jax.tree.map(np.asarray, after), params, rtol=0, atol=0)


def test_frozen_parameters_cost_nothing():
    """No gradient and no accumulator is made for them, and they come out as they went in."""
    params = parameters(3)

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
    compiled, history = check(step, state, BATCH, mesh_of(3))
    tree_allclose(jax.tree.map(np.asarray, history[-1][0][0][1]), params[1], rtol=0, atol=0)
    (loop,) = compiled.placed.loops
    stages = [loop.partition.tasks[a.task].stage for a in loop.partition.accumulators]
    assert stages.count(1) == 0
    assert stages.count(0) == stages.count(2) - 1 == 2  # the losses are stacked by the last stage


TX = optax.sgd(0.1, momentum=0.9)


def test_multi_transform_with_set_to_zero():
    """Frozen by the optimizer: gradients that it throws away are not accumulated either."""
    tx = optax.multi_transform({"train": optax.sgd(0.1), "freeze": optax.set_to_zero()}, ["train", "freeze", "train"])
    params = parameters(3)
    step = functools.partial(optax_step(tx), schedule=Std1F1B(3))
    (loop,) = built(step, 3, (params, tx.init(params)), BATCH).loops
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


def test_the_norm_does_not_depend_on_schedule_or_stages():
    """Bit for bit: every layer's sum is its own, and these scalars are added in the program's order.

    Between numbers of stages XLA fuses a layer's own sums differently, so there a last bit may differ.
    """

    def step(state: Any, batch: Any, schedule: Schedule) -> Any:
        losses, grads = gradients(state, batch, schedule)
        return optax.tree.norm(grads), losses

    def norm_on(num_ranks: int, cuts: list[int], schedule: Schedule) -> Any:
        pipelined = mpmd_jit_with_loop(step, mesh_of(num_ranks), static_argnums=2, cut_policy=lambda marks, n: cuts)
        return jax.tree.map(np.asarray, pipelined(parameters(4), BATCH, schedule))

    four = norm_on(4, [0, 1, 2], Std1F1B(4))
    tree_allclose(norm_on(2, [0, 1, 2], Interleaved1F1B(4, 2)), four, rtol=0, atol=0)
    tree_allclose(norm_on(2, [1], GPipe(2)), four, rtol=3e-7)


def test_flatten_runs_on_one_rank_with_one_warning():
    tx = optax.flatten(optax.sgd(0.1, momentum=0.9))
    params = parameters()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check(optax_step(tx), (params, tx.init(params)), BATCH, mesh_of(STAGES), steps=1)
    messages = [str(w.message) for w in caught if issubclass(w.category, PlacementWarning)]
    assert len(messages) == 1
    one_stage = (DIM * DIM + DIM) * 4
    assert "`concatenate` at " in messages[0]
    assert f"mixes ranks [0, 1] on rank 0 ({one_stage:,} bytes)" in messages[0]
    assert "These 4,704 bytes are transferred in every step" in messages[0]  # and each weight's part of the result back


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
