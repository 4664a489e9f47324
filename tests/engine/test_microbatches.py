"""`treduce` over `Microbatches` of several shapes: what plain JAX computes, however the shapes follow one another."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpp_flax import Microbatches, mark_stage_end, treduce
from jaxpp_flax.engine import patterns
from jaxpp_flax.engine.jit import mpmd_jit_with_loop
from jaxpp_flax.engine.tracing.bodies.microbatches import StackedMicrobatches
from jaxpp_flax.engine.tracing.treduce import Add, Concat, Last, Max
from jaxpp_flax.schedules import ResidualPlan, StageResiduals, by_name
from tests.engine.toys import mesh_of
from tests.helpers import slow, tree_allclose

pytestmark = pytest.mark.usefixtures("verified")

DIM = 4
# Sums of float32 in another order; a wrong microbatch or a lost one changes a leaf by a tenth and more.
RTOL = 1e-5


def params_of(num_stages, seed=0):
    rng = np.random.default_rng(seed)
    weights = [jnp.asarray(rng.normal(size=(DIM, DIM)) / 2, jnp.float32) for _ in range(num_stages)]
    return {"tied": jnp.asarray(rng.normal(size=(DIM, DIM)) / 2, jnp.float32), "blocks": weights}


def batch_of(pattern, rows=2, seed=1):
    """Microbatches of length 3, 5, 7, ..., by the numbers of the pattern."""
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=(rows, 3 + 2 * number, DIM)), jnp.float32) for number in pattern]


def loss(params, x):
    """Attention over the length, a weight that the first and the last stage share, and a penalty on a weight."""
    h = x @ params["tied"]
    for number, weight in enumerate(params["blocks"]):
        h = mark_stage_end(h) if number else h
        scores = jax.nn.softmax(jnp.einsum("bld,bmd->blm", h @ weight, h), axis=-1)
        h = h + jnp.tanh(scores @ h @ weight)
    return jnp.sum((h @ params["tied"].T) ** 2) / 50 + 0.1 * jnp.sum(params["blocks"][0] ** 2)


STACK_AND_ADD = (Concat(), Add)


def step_of(schedule, fun=loss, operation=STACK_AND_ADD):
    def step(params, items):
        batch = items if isinstance(items, StackedMicrobatches) else Microbatches(items)
        values, grads = treduce(lambda x: jax.value_and_grad(fun)(params, x), batch, schedule, operation=operation)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), values, grads

    return step


@pytest.mark.parametrize(
    ("name", "stages", "ranks", "axes"),
    [
        ("1f1b", 2, 2, {}),
        ("zero_bubble", 3, 3, {"data": 2}),
        slow("gpipe", 3, 3, {}),
        slow("gpipe", 2, 2, {"data": 2}),
        slow("1f1b", 4, 4, {"data": 2}),
        slow("eager_1f1b", 3, 3, {}),
        slow("eager_1f1b", 3, 3, {"data": 2}),
        slow("interleaved_1f1b", 4, 2, {}),
        slow("interleaved_1f1b", 4, 2, {"data": 2}),
        slow("zero_bubble", 4, 4, {}),
        slow("zbv", 4, 2, {}),
        slow("zbv", 4, 2, {"data": 2}),
    ],
)
def test_losses_and_gradients_are_those_of_plain_jax(name, stages, ranks, axes):
    params, items, schedule = params_of(stages), batch_of([0, 2, 0, 1, 2, 0, 0, 1]), by_name(name, stages, ranks)
    step = step_of(schedule)
    in_specs = (None, P("data")) if axes else None
    piped = mpmd_jit_with_loop(step, mesh_of(ranks, **axes), in_specs=in_specs)
    tree_allclose(piped(params, items), jax.jit(step)(params, items), rtol=RTOL, atol=1e-5)


def test_a_tensor_axis_divides_the_weights():
    params, items = params_of(2), batch_of([1, 0, 1, 1])
    specs = {"tied": P("tensor"), "blocks": [P(None, "tensor")] * 2}
    step = step_of(by_name("1f1b", 2, 2))
    piped = mpmd_jit_with_loop(step, mesh_of(2, tensor=2), in_specs=(specs, P()))
    tree_allclose(piped(params, items), jax.jit(step)(params, items), rtol=RTOL, atol=1e-5)


def test_gradients_are_those_of_one_masked_batch_of_the_longest():
    params, items = params_of(3), batch_of([2, 0, 1, 0])
    longest = max(x.shape[1] for x in items)

    def masked(params, batch):
        x, mask = batch
        h = x @ params["tied"]
        for number, weight in enumerate(params["blocks"]):
            h = mark_stage_end(h) if number else h
            scores = jnp.einsum("bld,bmd->blm", h @ weight, h)
            scores = jax.nn.softmax(jnp.where(mask[:, None, :] > 0, scores, -1e9), axis=-1)
            h = h + jnp.tanh(scores @ h @ weight)
        return jnp.sum((h @ params["tied"].T) ** 2 * mask[..., None])

    def lengths(fun_items):
        return [(x, jnp.ones(x.shape[:2])) for x in fun_items]

    whole = [tuple(jnp.pad(a, [(0, 0), (0, longest - a.shape[1])] + [(0, 0)] * (a.ndim - 2)) for a in item)
             for item in lengths(items)]  # fmt: skip
    padded = jax.tree.map(lambda *rows: jnp.concatenate(rows), *whole)
    expected = jax.grad(masked)(params, padded)
    step = step_of(by_name("1f1b", 3, 3), masked)
    _, _, grads = mpmd_jit_with_loop(step, mesh_of(3))(params, lengths(items))
    tree_allclose(grads, expected, rtol=RTOL, atol=1e-4)


@pytest.mark.parametrize("name", ["1f1b", slow("gpipe")])
def test_a_carry_goes_from_shape_to_shape_in_order(name):
    def step(params, state, items):
        def body(carry, x):
            def value(params):
                h = jnp.tanh(x @ params[0])
                mean = 0.9 * carry["mean"] + 0.1 * h.mean((0, 1))
                h = mark_stage_end(h - jax.lax.stop_gradient(mean))
                return jnp.sum((h @ params[1]) ** 2), mean

            (total, mean), grads = jax.value_and_grad(value, has_aux=True)(params)
            return {"mean": mean, "count": carry["count"] + 1}, (total, total, grads, carry["count"])

        batch = Microbatches(items)
        return treduce(body, batch, by_name(name, 2, 2), operation=(Concat(), Max, Add, Last), init=state)

    params, items = params_of(2)["blocks"], batch_of([0, 1, 0, 0, 1])
    state = {"mean": jnp.zeros(DIM), "count": jnp.int32(0)}
    piped = mpmd_jit_with_loop(step, mesh_of(2))
    tree_allclose(piped(params, state, items), jax.jit(step)(params, state, items), rtol=RTOL, atol=1e-5)


@pytest.mark.parametrize("plan", ["recompute", slow("offload")])
def test_a_plan_of_residuals_holds_for_every_shape(plan):
    params, items, schedule = params_of(2), batch_of([0, 1, 0]), by_name("gpipe", 2, 2)
    residuals = ResidualPlan(tuple(StageResiduals(**{plan: True}) for _ in range(2)))
    step = step_of(schedule)
    piped = mpmd_jit_with_loop(step, mesh_of(2), residuals=residuals)
    tree_allclose(piped(params, items), jax.jit(step)(params, items), rtol=RTOL, atol=1e-5)


@pytest.mark.parametrize("name", ["1f1b", slow("zero_bubble"), slow("gpipe")])
def test_a_new_pattern_compiles_nothing(name):
    """Only a new shape is traced and compiled; the tasks of all patterns donate alike."""
    ranks, step = 3, step_of(by_name(name, 3, 3), operation=Add)
    piped = mpmd_jit_with_loop(step, mesh_of(ranks), donate_argnums=0)
    plain, compiled = jax.jit(step), list[int]()
    for pattern in ([0, 1, 0, 1, 0], [1], [1, 1, 0], [0, 0, 0, 0, 0, 1, 1], [2, 0, 1], [0, 2, 2, 2]):
        items = [np.asarray(x)[None] for x in batch_of(pattern, seed=len(pattern))]
        params = params_of(ranks)
        expected = plain(params, StackedMicrobatches(tuple(items)))
        tree_allclose(piped(params, StackedMicrobatches(tuple(items))), expected, rtol=RTOL, atol=1e-5)
        compiled.append(piped.compile(params_of(ranks), StackedMicrobatches(tuple(items))).compiler.compilations)
    assert compiled[0] == compiled[1] == compiled[2] == compiled[3] < compiled[4] == compiled[5]


def test_the_oldest_patterns_are_forgotten(monkeypatch):
    """A long run draws any number of patterns, and each program takes memory."""
    monkeypatch.setattr(patterns, "MOST_PATTERNS", 2)
    piped = mpmd_jit_with_loop(step_of(by_name("1f1b", 2, 2), operation=Add), mesh_of(2))
    drawn = [StackedMicrobatches(tuple(x[None] for x in batch_of(numbers))) for numbers in ([0, 1], [1, 0], [1], [0])]
    first = [piped.place(params_of(2), batch) for batch in drawn]
    again = [piped.place(params_of(2), batch) for batch in reversed(drawn)]
    assert [one is other for one, other in zip(first, reversed(again), strict=True)] == [False, False, True, True]


def test_results_of_other_shapes_are_refused_by_name():
    items = batch_of([0, 1])
    with pytest.raises(TypeError, match=r"result\['h'\].*\[2, 3, 4\].*\[2, 5, 4\]"):
        treduce(lambda x: {"h": x}, Microbatches(items), operation=Concat())
    with pytest.raises(ValueError, match="axis=1"):
        treduce(lambda x: x.sum(), Microbatches(items), axis=1, operation=Add)
