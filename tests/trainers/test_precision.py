"""Loss scaling, the dtype in which gradients are summed, and compute in bfloat16 and float16 over float32 weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineStage, PipelineTrainer
from jaxpp_flax.trainers import DynamicLossScale, Precision, Training
from tests.helpers import slow, tree_allclose

pytestmark = pytest.mark.filterwarnings("ignore::jaxpp_flax.trainers.MicrobatchStateWarning")  # for counts of calls
OPTIMIZED = pytest.mark.full_compilation  # where results differ by the rounding of narrow types alone
STAGES, MICROBATCHES, WIDTH = 2, 4, 16


class Block(nnx.Module):
    def __init__(self, dtype, rngs, param_dtype):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs, dtype=dtype, param_dtype=param_dtype)
        self.calls = nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        self.calls[...] += 1
        return x + jnp.tanh(self.linear(x))


class Model(nnx.Module):
    def __init__(self, dtype=None, param_dtype=jnp.float32):
        rngs = nnx.Rngs(0)
        self.dtype = dtype
        self.blocks = nnx.List([PipelineStage(Block(dtype, rngs, param_dtype)) for _ in range(STAGES)])

    def __call__(self, x):
        x = x if self.dtype is None else x.astype(self.dtype)
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i == 0:
                x = x * x.dtype.type(1)
        return x.astype(jnp.float32)


def loss_fn(model, batch):
    """`poison` goes into the first stage, where the gradient then overflows, and the loss stays finite."""
    x = model(batch["x"])
    weight = model.blocks[0].linear.kernel[...]
    return jnp.mean((x - batch["y"]) ** 2) + jnp.mean(_poison(weight, batch["poison"].max()))


@jax.custom_vjp
def _poison(x, flag):
    return x * 0.0


_poison.defvjp(lambda x, flag: (x * 0.0, flag), lambda flag, g: (g * jnp.where(flag > 0, jnp.inf, 0.0), None))


def batch(seed, poisoned=False):
    rng = np.random.default_rng(seed)
    x, y = (rng.normal(size=(8, WIDTH)).astype(np.float32) for _ in range(2))
    poison = np.zeros(8, np.float32)
    poison[5] = poisoned  # one microbatch's
    return {"x": x, "y": y, "poison": poison}


def trainer(stages=STAGES, dtype=None, tx=None, param_dtype=jnp.float32, **options):
    tx = tx or optax.sgd(1e-2, momentum=0.9)
    return PipelineTrainer(
        Model(dtype, param_dtype), tx, loss_fn,
        num_stages=stages, num_microbatches=MICROBATCHES, logging=False, **options,
    )  # fmt: skip


def snapshot(made):
    state = made.state
    return jax.tree.map(np.asarray, (state.params, state.opt_state, state.model_state, state.ema))


def test_dynamic_scale_skips_on_all_stages_halves_and_grows():
    made = trainer(
        training=Training(ema_decay=0.5),
        precision=Precision(loss_scale=DynamicLossScale(initial=64.0, growth_interval=2)),
    )
    plain = trainer(stages=1, training=Training(ema_decay=0.5))
    scales = []
    for seed, poisoned in enumerate([False, True, False, False, False]):
        before = snapshot(made)
        metrics = made.train_step(batch(seed, poisoned))
        assert float(metrics["skipped_step"]) == poisoned
        assert np.isfinite(float(metrics["loss"]))
        scales.append(float(metrics["loss_scale"]))
        if poisoned:  # nothing changes, on any stage: bit for bit
            tree_allclose(snapshot(made), before, rtol=0, atol=0)
        else:
            plain.train_step(batch(seed))
            # Powers of two cancel exactly; what is left is XLA's order of sums.
            tree_allclose(snapshot(made), snapshot(plain))
    assert scales == [64.0, 64.0, 32.0, 32.0, 64.0]
    assert int(made.state.step) == made.step == 5
    assert made.state.params["blocks"][1]["linear"]["kernel"].get_value().mpmd_idxs == (1,), "there were two stages"


def one_step(precision=None, dtype=None, stages=STAGES, **options):
    """What SGD with rate 1 takes off the weights: the gradients."""
    made = trainer(stages, dtype, optax.sgd(1.0), precision=precision, **options)
    before = jax.tree.map(np.asarray, made.state.params)
    metrics = made.train_step(batch(0))
    return jax.tree.map(lambda a, b: np.asarray(a - np.asarray(b)), before, made.state.params), metrics, made


@OPTIMIZED
@pytest.mark.slow
def test_gradients_summed_in_bfloat16_by_choice():
    (exact, _, _), (rounded, _, made) = one_step(), one_step(Precision(gradients=jnp.bfloat16))
    compiled = made.compile(batch(0))
    dtypes = {str(r.aval.dtype) for r in compiled.placed.loops[0].results if r.aval.shape}
    assert dtypes == {"bfloat16"}
    # Each summand and each of four sums is rounded by at most 2**-9 of the largest partial sum.
    tree_allclose(rounded, exact, rtol=2 * MICROBATCHES * 2.0**-9)
    with pytest.raises(AssertionError):
        tree_allclose(rounded, exact, rtol=2.0**-16)


@OPTIMIZED
@pytest.mark.parametrize("stages", [slow(1), STAGES])
def test_gradients_of_bfloat16_weights_summed_in_float32(stages):
    """Equal to a loop in plain JAX that casts each microbatch's gradients and adds these up."""
    wide = Precision(gradients=jnp.float32)
    made = trainer(stages, jnp.bfloat16, keep_gradients(), precision=wide, param_dtype=jnp.bfloat16)
    graphdef, params, rest = nnx.split(Model(jnp.bfloat16, jnp.bfloat16), nnx.Param, ...)

    @jax.jit
    def expected(params, data):
        def loss(params, microbatch):
            return loss_fn(nnx.merge(graphdef, params, rest, copy=True), microbatch)

        def add(total, microbatch):
            grads = jax.grad(loss)(params, microbatch)
            return jax.tree.map(lambda t, g: t + g.astype(jnp.float32), total, grads), None

        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        microbatches = jax.tree.map(lambda x: x.reshape(MICROBATCHES, -1, *x.shape[1:]), data)
        total, _ = jax.lax.scan(add, zeros, microbatches)
        return jax.tree.map(lambda t: (t / MICROBATCHES).astype(jnp.bfloat16), total)

    made.train_step(batch(0))
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(made.state.params)} == {"bfloat16"}
    if stages > 1:
        sums = made.compile(batch(0)).placed.loops[0].results
        assert {str(r.aval.dtype) for r in sums if r.aval.shape} == {"float32"}
    found, wanted = (jax.tree.map(np.asarray, tree) for tree in (made.state.opt_state, expected(params, batch(0))))
    # Backward in bfloat16 through two layers, fused in another way: a rounding of 2**-8 or two in each, as below.
    tree_allclose(found, wanted, rtol=8 * 2.0**-8)


def keep_gradients():
    """Changes no weight; its state is the last gradients."""

    def update(grads, state, params=None):
        return jax.tree.map(lambda g: 0 * g, grads), grads

    return optax.GradientTransformation(lambda params: jax.tree.map(lambda p: 0 * p, params), update)


@OPTIMIZED
@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "epsilon"), [(jnp.bfloat16, 2.0**-8), (jnp.float16, 2.0**-11)])
def test_narrow_compute_over_float32_weights_equals_plain(dtype, epsilon):
    scale = Precision(loss_scale=2.0**8 if dtype == jnp.float16 else None)
    found, metrics, made = one_step(scale, dtype)
    expected, reference, _ = one_step(dtype=dtype, stages=1)
    assert {leaf.dtype for leaf in jax.tree.leaves(made.state.params)} == {jnp.dtype(jnp.float32)}
    # The same narrow operations, fused in another way: two layers, forward and backward, each with a rounding or two.
    np.testing.assert_allclose(float(metrics["loss"]), float(reference["loss"]), rtol=4 * epsilon)
    tree_allclose(found, expected, rtol=8 * epsilon)


@pytest.mark.parametrize("wrong", [{"initial": 0.0}, {"initial": np.inf}, {"growth_interval": 0}, {"factor": 1.0}])
def test_a_scale_that_cannot_grow_is_refused(wrong):
    (name, value), message = *wrong.items(), "initial must be above 0, growth_interval at least 1 and factor above 1"
    with pytest.raises(ValueError, match=rf"{name}={value}.*: {message}"):
        DynamicLossScale(**wrong)


@pytest.mark.parametrize("stages", [slow(1), 2])
def test_the_average_of_narrow_weights_is_wide(stages):
    """In bfloat16, a thousandth of a small change is rounded away, and the average stands still."""
    made = trainer(stages, jnp.bfloat16, optax.sgd(1e-2), jnp.bfloat16, training=Training(ema_decay=0.999))
    wide = lambda params: jax.tree.map(lambda leaf: np.asarray(leaf).astype(np.float32), params)  # noqa: E731
    expected = first = wide(made.state.params)
    for seed in range(3):
        made.train_step(batch(seed))
        params = wide(made.state.params)
        expected = jax.tree.map(lambda a, p: np.float32(0.999) * a + np.float32(0.001) * p, expected, params)
    found = jax.tree.map(np.asarray, made.state.ema)
    # XLA may average a new weight before it rounds it: a thousandth of 2**-9 of the weight in each step.
    tree_allclose(found, expected, rtol=3 * 0.001 * 2.0**-9, atol=1e-7)
    moved = jax.tree.map(lambda a, b, p: np.mean((a != b)[p != b]), found, first, params)
    assert min(jax.tree.leaves(moved)) > 0.9, "where a weight has moved, its average has"
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(made.gather_model(ema=True), nnx.Param))} == {
        jnp.dtype(jnp.bfloat16)
    }
