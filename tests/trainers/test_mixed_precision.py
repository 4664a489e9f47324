"""`precision=`: what is computed in a narrow type, what stays float32, and the same casts under plain `jax.jit`."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from jaxpp_flax import PipelineStage, PipelineTrainer
from jaxpp_flax import linen as stages
from jaxpp_flax.trainers import DynamicLossScale, ModelError, Precision, PrecisionWarning, Training
from tests.helpers import tree_allclose
from tests.trainers import models as m
from tests.trainers.sharing import sharing_steps

WIDTH, MICROBATCHES = 16, 2
FLOAT32, BFLOAT16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.linear(self.norm(x)))


class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([PipelineStage(Block(rngs)) for _ in range(2)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(2):
            x = x + jnp.tanh(stages.PipelineStage(nn.Dense(WIDTH), name=f"block_{i}")(nn.LayerNorm()(x)))
        return x


def loss_fn(model, batch):
    outputs = model(batch["x"])
    assert outputs.dtype == FLOAT32, "the loss is computed in float32"
    return jnp.mean((outputs - batch["y"]) ** 2)


def batch_of(seed=0):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=(2 * MICROBATCHES, WIDTH)).astype(np.float32) for name in "xy"}


def trainer(model=None, *, num_stages=2, precision="bfloat16", **options):
    return PipelineTrainer(
        model or Model(), optax.sgd(1.0), loss_fn, num_stages=num_stages, num_microbatches=MICROBATCHES,
        precision=precision, logging=False, **options,
    )  # fmt: skip


@sharing_steps()
def shared(**options):
    """A trainer of `Model`."""
    return trainer(**options)


def expected_step(apply, params, batch, dtype=jnp.bfloat16):
    """One step of plain JAX with the same casts: `apply(params, x)`; gradients summed in float32."""

    def loss(params, microbatch):
        narrow = jax.tree.map(lambda p: p.astype(dtype), params)
        outputs = apply(narrow, microbatch["x"].astype(dtype))
        return jnp.mean((outputs.astype(jnp.float32) - microbatch["y"]) ** 2)

    losses, after = m.accumulated(loss, params, optax.sgd(1.0), [batch], MICROBATCHES)
    return losses[0], after[0]


def nnx_step(batch):
    graphdef, params, rest = nnx.split(Model(), nnx.Param, ...)
    return expected_step(lambda p, x: nnx.merge(graphdef, p, rest, copy=True)(x), params, batch)


def linen_variables(batch):
    return jax.jit(LinenModel().init)(jax.random.key(0), batch["x"])


def linen_step(batch):
    return expected_step(lambda p, x: LinenModel().apply({"params": p}, x), linen_variables(batch)["params"], batch)


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_a_step_equals_the_same_casts_under_plain_jit(kind):
    batch = batch_of()
    if kind == "nnx":
        made, (loss, params) = shared(), nnx_step(batch)
    else:
        variables = linen_variables(batch)
        made, (loss, params) = trainer(LinenModel(), variables=variables), linen_step(batch)
    metrics = made.train_step(batch)
    assert {leaf.dtype for leaf in jax.tree.leaves(made.state.params)} == {FLOAT32}
    # The same narrow operations, fused in another way: two layers, forward and backward, each with a rounding or two.
    np.testing.assert_allclose(float(metrics["loss"]), float(loss), rtol=4 * 2.0**-8)
    tree_allclose(jax.tree.map(np.asarray, made.state.params), jax.tree.map(np.asarray, params), rtol=8 * 2.0**-8)


def outputs_of_forward(compiled):
    """The types of all that the first stage's forward keeps and sends, without scalars."""
    program = compiled.program
    return {
        output.aval.dtype
        for task in program.tasks if task.name.startswith("fwd_0")
        for output in task.graph.outputs if output.aval.shape
    }  # fmt: skip


def test_what_is_kept_and_sent_is_narrow_and_parameters_are_converted_outside_the_loop():
    compiled = shared().compile(batch_of())
    assert outputs_of_forward(compiled) == {BFLOAT16}
    assert outputs_of_forward(shared(precision=None).compile(batch_of())) == {FLOAT32}
    kernels = {v.aval.dtype for task in compiled.program.tasks if task.name.startswith(("fwd", "bwd"))
               for v in task.graph.inputs if v.aval.shape == (WIDTH, WIDTH)}  # fmt: skip
    assert kernels == {BFLOAT16, FLOAT32}, "the kernel, and the sum of its gradients"


def test_a_layer_that_names_a_type_keeps_it():
    types = []

    class Mixed(nnx.Module):
        def __init__(self):
            self.narrow = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
            self.wide = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0), dtype=jnp.float32)

        def __call__(self, x):
            narrow, wide = self.narrow(x), self.wide(x)
            types.append((narrow.dtype, wide.dtype))
            return narrow + wide

    trainer(Mixed(), num_stages=1).compile(batch_of())
    assert {*types} == {(BFLOAT16, FLOAT32)}


def test_an_embedding_without_a_type_of_its_own_is_narrow(recwarn: pytest.WarningsRecorder):
    """Flax gives it that of its parameters, float32, to which all that follows would be promoted."""
    types = []

    class Tokens(nnx.Module):
        def __init__(self):
            self.embed = nnx.Embed(8, WIDTH, rngs=nnx.Rngs(0))
            self.wide = nnx.Embed(8, WIDTH, rngs=nnx.Rngs(0), param_dtype=BFLOAT16, dtype=FLOAT32)
            self.linear = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))

        def __call__(self, x):
            tokens = x.astype(jnp.int32).clip(0, 7)
            x = self.linear(self.embed(tokens))
            types.append((x.dtype, self.embed.attend(x).dtype, self.wide(tokens).dtype))
            return x.mean(-2)

    model = Tokens()
    trainer(model, num_stages=1, precision=Precision(compute=BFLOAT16, params=None), training=Training(frozen="wide/*")
    ).compile(batch_of())  # fmt: skip
    assert {*types} == {(BFLOAT16, BFLOAT16, FLOAT32)}
    assert not [warning for warning in recwarn if warning.category is PrecisionWarning]
    assert model.embed.dtype == FLOAT32, "the user's module does not change"


@pytest.mark.parametrize("wide", [1, 2])
def test_a_model_that_computes_mostly_in_a_wider_type_is_told(wide: int, recwarn: pytest.WarningsRecorder):
    class Mixed(nnx.Module):
        def __init__(self):
            types = [FLOAT32] * wide + [None]
            self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0), dtype=of) for of in types])

        def __call__(self, x):
            return sum(layer(x) for layer in self.layers)

    told = trainer(Mixed(), num_stages=1)
    for _ in range(2):  # it says so once
        told.step_function(batch_of())
    found = [str(warning.message) for warning in recwarn if warning.category is PrecisionWarning]
    # Half may be meant: a head, a router.
    assert len(found) == (wide > 1)
    for text in found:
        assert re.match(r"precision='bfloat16', but 67% of .* wider type \(the first float32: \S*\.py", text), text


def test_evaluate_and_predict_compute_in_the_same_type():
    made, batch = shared(), batch_of()
    graphdef, params, rest = nnx.split(Model(), nnx.Param, ...)
    narrow = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    plain = jax.jit(lambda params, x: nnx.merge(graphdef, params, rest)(x).astype(jnp.float32))
    outputs = plain(narrow, batch["x"].astype(jnp.bfloat16))
    found = made.predict(batch["x"])
    assert found.dtype == FLOAT32
    # Outputs are about one: a unit of rounding or two.
    np.testing.assert_allclose(np.asarray(found), np.asarray(outputs), rtol=0, atol=2 * 2.0**-8)
    loss = float(np.mean((np.asarray(outputs) - batch["y"]) ** 2))
    np.testing.assert_allclose(float(made.evaluate([batch])["loss"]), loss, rtol=2 * 2.0**-8)


def test_frozen_parameters_are_narrow_too_and_do_not_change():
    made = trainer(training=Training(frozen=["blocks/0/*"]))
    before = jax.tree.map(np.asarray, made.state.model_state)
    compiled = made.compile(batch_of())
    assert outputs_of_forward(compiled) == {BFLOAT16}, "a float32 parameter would make the activation float32"
    made.train_step(batch_of())
    tree_allclose(jax.tree.map(np.asarray, made.state.model_state), before, rtol=0, atol=0)


def test_float16_has_a_dynamic_loss_scale():
    made = shared(precision="float16")
    metrics = made.train_step(batch_of())
    assert float(metrics["loss_scale"]) == DynamicLossScale().initial
    assert float(metrics["skipped_step"]) == 0
    plain = shared(precision=None)
    expected = plain.train_step(batch_of())
    # Two layers, each with a few roundings.
    np.testing.assert_allclose(float(metrics["loss"]), float(expected["loss"]), rtol=8 * 2.0**-11)


def test_a_parameter_of_another_type_is_refused():
    class Narrow(nnx.Module):
        def __init__(self):
            self.layer = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)

        def __call__(self, x):
            return self.layer(x)

    make = partial(trainer, Narrow(), num_stages=1)
    message = r"\['layer'\]\['(kernel|bias)'\].* has dtype bfloat16, but precision= stores parameters in float32"
    with pytest.raises(ModelError, match=message):
        make()
    make(precision=Precision(compute="bfloat16", params="bfloat16"))
    make(precision=Precision(gradients="float32"))


def test_a_frozen_parameter_that_the_call_writes_is_refused():
    class Writing(Model):
        def __call__(self, x):
            self.count[...] += 1
            return super().__call__(x)

    model = Writing()
    model.count = nnx.Param(jnp.zeros(()))
    made = trainer(model, num_stages=1, training=Training(frozen=["count"]))
    with pytest.raises(ModelError, match="writes the frozen parameter count, but with precision="):
        made.compile(batch_of())


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Precision(compute="int8"), ValueError, r"compute='int8'\) is not a floating point type"),
        (lambda: Precision(gradients=jnp.int32), ValueError, "is not a floating point type"),
        (lambda: Precision(loss_scale="auto"), ValueError, "loss_scale='auto': use None, 'dynamic'"),
        (lambda: Precision(loss_scale=-1), ValueError, "loss_scale=-1: use None"),
        (lambda: Precision.of("bf16"), TypeError, 'precision must be a floating point type such as "bfloat16"'),
    ],
)
def test_what_does_not_fit_is_refused_by_name(make, error, message):
    with pytest.raises(error, match=message):
        make()
