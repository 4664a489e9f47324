"""`Training(after_update=)` changes variables once a step, as the same function after the optimizer in plain Flax."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jaxpp_flax.linen as pipeline
from jaxpp_flax import PipelineStage, PipelineTrainer
from jaxpp_flax.trainers import Training
from jaxpp_flax.trainers.errors import ModelError
from tests.helpers import slow, tree_allclose
from tests.trainers.writes.plain_linen import plain_linen_step

WIDTH, EXPERTS, SIZE = 4, 3, 16
BATCHES = list(np.random.default_rng(0).normal(size=(3, SIZE, WIDTH)).astype(np.float32))
STUDENT = nnx.All(nnx.Param, nnx.PathContains("student"))
TX = optax.adamw(0.05)


class Dino(nnx.Module):
    """A student and its teacher, with a centre of the teacher's outputs."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.student = nnx.Sequential(*[PipelineStage(nnx.Linear(WIDTH, WIDTH, rngs=rngs)) for _ in range(2)])
        self.teacher = nnx.Sequential(*[PipelineStage(nnx.Linear(WIDTH, WIDTH, rngs=rngs)) for _ in range(2)])
        self.centre, self.outputs = nnx.Variable(jnp.zeros(WIDTH)), nnx.Variable(jnp.zeros(WIDTH))


def dino_loss(model: Dino, x: jax.Array) -> Any:
    taught = jax.lax.stop_gradient(model.teacher(x))
    target = jax.nn.softmax((taught - model.centre[...]) / 0.1)
    model.outputs[...] += taught.sum(0)
    return -(target * jax.nn.log_softmax(model.student(x))).sum(-1).mean(), {"outputs": taught.mean(0)}


def follow(model: Dino, metrics: dict[str, jax.Array], centre_of: str = "variable") -> None:
    of = metrics["outputs"] if centre_of == "metric" else model.outputs[...] / SIZE
    model.centre[...] = 0.5 * model.centre[...] + 0.5 * of
    model.outputs[...] = jnp.zeros(WIDTH)
    teacher, student = nnx.state(model.teacher, nnx.Param), nnx.state(model.student, nnx.Param)
    nnx.update(model.teacher, jax.tree.map(lambda t, s: 0.9 * t + 0.1 * s, teacher, student))


class Balanced(nnx.Module):
    """Experts of which the bias chooses one for each example; the load counts these choices."""

    def __init__(self, rngs: nnx.Rngs):
        self.router = nnx.Linear(WIDTH, EXPERTS, rngs=rngs)
        self.experts = nnx.Param(rngs.normal((EXPERTS, WIDTH, WIDTH)))
        self.bias, self.load = nnx.Variable(jnp.zeros(EXPERTS)), nnx.Variable(jnp.zeros(EXPERTS))

    def __call__(self, x: jax.Array) -> jax.Array:
        scores = self.router(x)
        chosen = jax.nn.one_hot(jnp.argmax(scores + self.bias[...], -1), EXPERTS, dtype=x.dtype)
        self.load[...] += chosen.sum(0)
        return x + jnp.einsum("be,eio,bi->bo", chosen * jax.nn.softmax(scores), self.experts[...], x)


def squared(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((model(x) - 1) ** 2)


def even(bias: jax.Array, load: jax.Array) -> jax.Array:
    return bias + 0.3 * jnp.sign(load.mean() - load)


def balance(model: nnx.Sequential, metrics: dict[str, jax.Array]) -> None:
    for block in model.layers:
        block.bias[...] = even(block.bias[...], block.load[...])
        block.load[...] = jnp.zeros(EXPERTS)


def balanced() -> nnx.Module:
    return nnx.Sequential(*[PipelineStage(Balanced(nnx.Rngs(i))) for i in range(2)])


def plain(model: Any, loss_fn: Callable[..., Any], hook: Callable[..., Any], wrt: Any) -> Any:
    """Train with `nnx.jit` on whole batches; the hook comes after the optimizer."""
    optimizer = nnx.Optimizer(model, TX, wrt=wrt)

    @nnx.jit
    def step(model: Any, optimizer: Any, x: jax.Array) -> None:
        gradient = nnx.grad(loss_fn, argnums=nnx.DiffState(0, wrt), has_aux=loss_fn is dino_loss)(model, x)
        gradient, metrics = gradient if loss_fn is dino_loss else (gradient, {})
        optimizer.update(model, gradient)
        hook(model, metrics)

    for x in BATCHES:
        step(model, optimizer, x)
    return model


def make_trainer(model: Any, loss_fn: Callable[..., Any], num_stages: int = 2, **options: Any) -> PipelineTrainer:
    training = options.pop("training")
    return PipelineTrainer(
        model, TX, loss_fn, num_stages=num_stages, num_microbatches=4, training=training, logging=False, **options
    )


CASES = {
    "dino": (Dino, dino_loss, follow, STUDENT),
    "centre_of_a_metric": (Dino, dino_loss, partial(follow, centre_of="metric"), STUDENT),
    "experts": (balanced, squared, balance, nnx.Param),
}
PLACES = {"two_stages": {}, "one_stage": {"num_stages": 1}, "data": {"mesh": {"data": 2}}}


@pytest.mark.parametrize(
    ("case", "place"),
    [
        ("dino", "two_stages"), ("dino", "data"), ("experts", "two_stages"), ("experts", "one_stage"),
        ("centre_of_a_metric", "two_stages"),
        slow("dino", "one_stage"), slow("experts", "data"), slow("centre_of_a_metric", "data"),
    ],
)  # fmt: skip
def test_equal_to_plain_flax(case: str, place: str):
    make, loss_fn, hook, wrt = CASES[case]
    trainer = make_trainer(make(), loss_fn, training=Training(wrt=wrt, after_update=hook), **PLACES[place])
    for x in BATCHES:
        trainer.train_step(x)
    expected = plain(make(), loss_fn, hook, wrt)
    if case == "experts":
        assert jnp.abs(expected.layers[1].bias[...]).max() > 0.2, "the hook has something to do"
    tree_allclose(nnx.state(trainer.gather_model()), nnx.state(expected), atol=1e-6)


def test_each_variable_stays_on_its_stage():
    def ranks(**options: Any) -> dict[str, Any]:
        trainer = make_trainer(balanced(), squared, training=Training(**options))
        trainer.train_step(BATCHES[0])
        leaves = jax.tree_util.tree_leaves_with_path(trainer.state)
        return {jax.tree_util.keystr(path): leaf.mpmd_idxs for path, leaf in leaves}

    assert ranks(after_update=balance) == ranks()


class LinenBalanced(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scores = nn.Dense(EXPERTS, name="router")(x)
        experts = self.param("experts", nn.initializers.normal(1.0), (EXPERTS, WIDTH, WIDTH))
        bias, load = (self.variable("balance", name, jnp.zeros, EXPERTS) for name in ("bias", "load"))
        chosen = jax.nn.one_hot(jnp.argmax(scores + bias.value, -1), EXPERTS)
        load.value += chosen.sum(0)
        return x + jnp.einsum("be,eio,bi->bo", chosen * jax.nn.softmax(scores), experts, x)


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for i in range(2):
            x = pipeline.PipelineStage(LinenBalanced(name=f"block_{i}"))(x)
        return x


def linen_balance(variables: dict[str, Any], metrics: dict[str, jax.Array]) -> dict[str, Any]:
    """Move the biases, and keep the experts small: a function may write parameters too."""
    blocks = variables["balance"].items()
    moved = {name: {"bias": even(of["bias"], of["load"]), "load": jnp.zeros(EXPERTS)} for name, of in blocks}
    for block in variables["params"].values():
        block["experts"] = jnp.clip(block["experts"], -1, 1)
    return {**variables, "balance": moved}


def linen_variables() -> Any:
    variables = LinenModel().init(jax.random.key(0), BATCHES[0])
    return {**variables, "balance": jax.tree.map(jnp.zeros_like, variables["balance"])}


@pytest.mark.parametrize("frozen", [None, "*/router/kernel"])
def test_linen_equal_to_plain_flax(frozen: str | None):
    module, variables = LinenModel(), linen_variables()

    def label(path: Any, _: Any) -> str:
        return "frozen" if frozen and "router/kernel" in jax.tree_util.keystr(path, simple=True, separator="/") else ""

    tx = optax.multi_transform({"": TX, "frozen": optax.set_to_zero()}, partial(jax.tree.map_with_path, label))
    step = plain_linen_step(module, tx, "balance")
    training = Training(after_update=linen_balance, frozen=frozen)
    trainer = make_trainer(module, squared, training=training, variables=variables)
    opt_state, given = tx.init(variables["params"]), jax.tree.map(np.array, variables)
    for x in BATCHES:
        after, opt_state = step(variables, opt_state, x)
        variables = jax.jit(linen_balance)(after, {})
        trainer.train_step(x)
    tree_allclose(trainer.gather_variables(), variables, atol=1e-6)
    tree_allclose(linen_variables(), given, rtol=0, atol=0)


def test_a_resumed_run_has_the_same_bits(tmp_path: Path):
    def trained(*, resumed: bool) -> Any:
        directory = tmp_path / str(resumed)
        for steps in (2, 3) if resumed else (3,):
            training = Training(wrt=STUDENT, after_update=follow)
            trainer = make_trainer(Dino(), dino_loss, num_stages=1, training=training, checkpoints=str(directory))
            trainer.fit(BATCHES, steps=steps, resume=True)
        return jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(trainer.gather_model())))

    tree_allclose(trained(resumed=True), trained(resumed=False), rtol=0, atol=0)


def test_a_skipped_step_skips_it():
    training = Training(after_update=balance, on_nonfinite="skip")
    trainer = make_trainer(balanced(), squared, training=training)
    trainer.train_step(BATCHES[0])
    before = jax.device_get(trainer.state.model_state)
    assert trainer.train_step(np.full_like(BATCHES[0], np.nan))["skipped_step"] == 1
    tree_allclose(trainer.state.model_state, before, rtol=0, atol=0)


def test_it_sees_stored_weights_and_the_average_gets_what_it_writes():
    seen: list[Any] = []

    def hook(model: Any, metrics: dict[str, jax.Array]) -> None:
        seen.append((model.layers[0].experts.dtype, sorted(metrics)))
        model.layers[0].experts[...] = jnp.full((EXPERTS, WIDTH, WIDTH), 2.0)

    training = Training(after_update=hook, ema_decay=0.5)
    trainer = make_trainer(balanced(), squared, num_stages=1, training=training, precision="bfloat16")
    trainer.train_step(BATCHES[0])
    assert seen[0] == (jnp.float32, ["loss"])
    first = balanced().layers[0].experts[...]
    np.testing.assert_allclose(trainer.state.ema["layers"][0]["experts"][...], (first + 2) / 2, rtol=1e-6)


def writes_another_shape(model: Any, metrics: Any) -> None:
    model.layers[1].bias.set_value(jnp.zeros(7))


def writes_another_dtype(model: Any, metrics: Any) -> None:
    model.layers[1].experts.set_value(model.layers[1].experts[...].astype(jnp.bfloat16))


def makes_a_variable(model: Any, metrics: Any) -> None:
    model.layers[1].total = nnx.Variable(jnp.zeros(3))


def removes_a_variable(model: Any, metrics: Any) -> None:
    del model.layers[1].load


def returns_a_model(model: Any, metrics: Any) -> Any:
    return model


@pytest.mark.parametrize(
    ("hook", "kind", "text"),
    [
        (writes_another_shape, ModelError, "writes float32[7] into layers/1/bias, which is float32[3]"),
        (writes_another_dtype, ModelError, "writes bfloat16[3, 4, 4] into layers/1/experts, which is float32[3, 4, 4]"),
        (makes_a_variable, ModelError, "the function after_update makes layers/1/total"),
        (removes_a_variable, ModelError, "the function after_update removes layers/1/load"),
        (returns_a_model, TypeError, "after_update returned a Sequential"),
    ],
)
def test_other_changes_are_refused_by_path_before_the_first_step(hook: Any, kind: type[Exception], text: str):
    trainer = make_trainer(balanced(), squared, num_stages=1, training=Training(after_update=hook))
    with pytest.raises(kind, match=re.escape(text)):
        trainer.train_step(BATCHES[0])
    assert trainer.step == 0


@pytest.mark.parametrize(
    ("returned", "kind", "text"),
    [
        (lambda variables: None, TypeError, "after_update returned None. For a Linen model, return all variables"),
        (
            lambda variables: {"params": variables["params"]},
            ModelError,
            "without balance/block_0/bias, ",
        ),
        (lambda variables: {**variables, "new": {"x": 1.0}}, ModelError, "with new/x"),
    ],
)
def test_a_linen_function_returns_all_variables(returned: Any, kind: type[Exception], text: str):
    training = Training(after_update=lambda variables, metrics: returned(variables))
    trainer = make_trainer(LinenModel(), squared, num_stages=1, training=training, variables=linen_variables())
    with pytest.raises(kind, match=re.escape(text)):
        trainer.train_step(BATCHES[0])


@pytest.mark.parametrize("given", ["balance", lambda model: None, lambda model, metrics, more: None])
def test_what_is_no_function_of_two_arguments_is_refused_at_once(given: Any):
    with pytest.raises(TypeError, match=r"after_update (must be a function of|is called as after_update)\(?"):
        Training(after_update=given)
