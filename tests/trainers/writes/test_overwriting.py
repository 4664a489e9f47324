"""Scales of Flax's fp8 layers, whose gradients are their next values: as in `TrainState` on the whole batch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT, fm32
from flax.training.train_state import TrainState

import jaxpp_flax.api as jaxpp
from jaxpp_flax import PipelineTrainer, WholeBatchLoss, mark_stage_end
from jaxpp_flax.trainers import Checkpoints, DynamicLossScale, Precision, Training
from jaxpp_flax.trainers.errors import ModelError
from jaxpp_flax.verify import verify
from tests.helpers import slow, tree_allclose

pytestmark = pytest.mark.filterwarnings("ignore:The Fp8DotGeneralOp is deprecated:DeprecationWarning")

WIDTH, TX = 8, optax.adamw(0.05, weight_decay=0.1)
RANDOM = np.random.default_rng(0)
BATCHES = [
    {name: RANDOM.normal(size=(16, WIDTH)).astype(np.float32) for name in "xy"}
    | {"weight": RANDOM.integers(0, 3, 16).astype(np.float32)}
    for _ in range(3)
]


class Dense(nn.Module):
    op: Any
    calls: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for name in ("first", "second"):
            layer = nn.Dense(WIDTH, dot_general_cls=self.op, name=name)
            for _ in range(self.calls):
                x = nn.tanh(layer(x))
            x = mark_stage_end(x)
        return x


class Einsum(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for name in ("first", "second"):
            kernel = self.param(name, nn.initializers.lecun_normal(), (WIDTH, WIDTH))
            x = mark_stage_end(nn.tanh(nn.Fp8Einsum(name=f"{name}_einsum")("bi,io->bo", x, kernel)))
        return x


def errors(model: Any, batch: Any) -> jax.Array:
    return jnp.square(model(batch["x"]) - batch["y"]).mean(-1)


def mean(model: Any, batch: Any) -> jax.Array:
    return errors(model, batch).mean()


def pair(model: Any, batch: Any) -> Any:
    return (errors(model, batch) * batch["weight"]).sum(), batch["weight"].sum()


def weighted(model: Any, batch: Any) -> jax.Array:
    return jnp.divide(*pair(model, batch))


IN_TWO_PARTS = WholeBatchLoss(
    lambda model, batch: model(batch["x"]), lambda y, batch: jnp.square(y - batch["y"]).mean()
)
MODULES = {
    "op": Dense(nn.Fp8DotGeneralOp),
    "direct_op": Dense(nn.Fp8DirectDotGeneralOp),
    "einsum": Einsum(),
    "nanoo": Dense(nn.NANOOFp8DotGeneralOp),
}
LOSSES = {"mean": (mean, mean), "pair": (pair, weighted), "whole_batch": (IN_TWO_PARTS, IN_TWO_PARTS)}


def make(module: nn.Module, loss: Any, **options: Any) -> tuple[PipelineTrainer, TrainState]:
    variables = module.init(jax.random.key(0), BATCHES[0]["x"])
    state = TrainState.create(apply_fn=module.apply, params=variables, tx=TX)
    options = {"variables": variables, "num_stages": 2, "num_microbatches": 4, "logging": False} | options
    return PipelineTrainer(module, TX, loss, **options), state


def next_state(state: TrainState, batch: Any, loss: Any) -> TrainState:
    """Return the state of `TrainState` after a step on the whole batch."""

    def step(state: TrainState, batch: Any) -> TrainState:
        loss_of = lambda variables: loss(lambda x: state.apply_fn(variables, x), batch)  # noqa: E731
        return state.apply_gradients(grads=jax.grad(loss_of)(state.params))

    return jax.jit(step)(state, batch)


@pytest.mark.parametrize(
    ("module", "loss", "options"),
    [
        ("direct_op", "mean", {}), ("direct_op", "pair", {"mesh": {"data": 2}}), ("op", "mean", {"num_stages": 1}),
        slow("einsum", "pair", {}), ("direct_op", "whole_batch", {}),
        slow("nanoo", "mean", {}), slow("op", "pair", {}), slow("einsum", "mean", {"mesh": {"data": 2}}),
        slow("direct_op", "mean", {"num_microbatches": 1}), slow("direct_op", "mean", {"schedule": "interleaved_1f1b"}),
    ],
)  # fmt: skip
def test_equal_to_train_state_on_the_whole_batch(module: str, loss: str, options: Any):
    (ours, plain), overwritten = LOSSES[loss], []
    trainer, state = make(MODULES[module], ours, **options)
    for batch in BATCHES:
        state = next_state(state, batch, plain)
        trainer.train_step(batch)
        overwritten.append((trainer.gather_variables()[OVERWRITE_WITH_GRADIENT], state.params[OVERWRITE_WITH_GRADIENT]))
    tree_allclose(*overwritten[0], rtol=0, atol=0)  # from the same weights: the same bits
    tree_allclose(trainer.gather_variables(), state.params, atol=1e-6)
    assert all(jnp.max(leaf) > 0 for leaf in jax.tree.leaves(overwritten[-1][0])), "all scales and histories move"
    assert len(jax.tree.leaves(trainer.state.opt_state)) == 1 + 2 * len(jax.tree.leaves(trainer.state.params))


@pytest.mark.parametrize(
    ("module", "loss", "scale"),
    [slow("direct_op", "mean", 1024.0), ("einsum", "pair", DynamicLossScale()), slow("op", "whole_batch", 1024.0)],
)
def test_a_loss_scale(module: str, loss: str, scale: Any):
    """Histories of gradients hold those of the scaled loss, which is what a layer converts to fp8.

    The scale is taken out of the gradients of parameters alone. Flax's `DynamicScale` also divides the layers' scales:
    at the second step each layer then clips its inputs to a 65,536th of their range.
    """
    ours, plain = LOSSES[loss]
    trainer, state = make(MODULES[module], ours, precision=Precision(loss_scale=scale))
    number = scale.initial if isinstance(scale, DynamicLossScale) else scale

    @jax.jit
    def step(state: TrainState, batch: Any) -> TrainState:
        loss_of = lambda variables: number * plain(lambda x: state.apply_fn(variables, x), batch)  # noqa: E731
        grads = jax.grad(loss_of)(state.params)
        return state.apply_gradients(grads={**grads, "params": jax.tree.map(lambda g: g / number, grads["params"])})

    for i, batch in enumerate(BATCHES):
        state = step(state, batch)
        trainer.train_step(batch)
        found = trainer.gather_variables()
        if i == 0:  # from the same weights: the same bits
            tree_allclose(found[OVERWRITE_WITH_GRADIENT], state.params[OVERWRITE_WITH_GRADIENT], rtol=0, atol=0)
    tree_allclose(found, state.params, rtol=1e-5, atol=1e-6)
    report = verify(trainer, BATCHES[0])
    assert report.agrees, report


class Bridged(nnx.Module):
    """A Linen layer in NNX: its collection is a type of variables."""

    def __init__(self) -> None:
        def layer(seed: int) -> Any:
            dense = nn.Dense(WIDTH, dot_general_cls=nn.Fp8DirectDotGeneralOp)
            return nnx.bridge.ToNNX(dense, rngs=nnx.Rngs(seed)).lazy_init(BATCHES[0]["x"])

        self.first, self.second = layer(0), layer(1)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(self.second(mark_stage_end(jnp.tanh(self.first(x)))))


def test_variables_of_nnx():
    module = Bridged()
    by_name = nnx.variable_type_from_name(OVERWRITE_WITH_GRADIENT)  # registered by the bridge
    graphdef, params, scales, rest = nnx.split(module, nnx.Param, by_name, ...)
    opt_state = TX.init(params)

    @jax.jit
    def step(params: Any, scales: Any, opt_state: Any, batch: Any) -> Any:
        loss_of = lambda *both: mean(nnx.merge(graphdef, *both, rest, copy=True), batch)  # noqa: E731
        gradient, scales = jax.grad(loss_of, argnums=(0, 1))(params, scales)
        updates, opt_state = TX.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), scales, opt_state

    trainer = PipelineTrainer(Bridged(), TX, mean, num_stages=2, num_microbatches=4, logging=False)
    for batch in BATCHES:
        params, scales, opt_state = step(params, scales, opt_state, batch)
        trainer.train_step(batch)
    _, ours, our_scales, _ = nnx.split(trainer.gather_model(), nnx.Param, by_name, ...)
    tree_allclose(ours, params, atol=1e-6)
    tree_allclose(our_scales, scales, atol=1e-6)


def as_fm32(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.lax.convert_element_type(x, fm32), tree)


def test_a_layer_that_is_used_twice():
    """JAX adds the gradients of the two uses: of float32, no maximum of microbatches is that of the whole batch."""
    module = Dense(nn.Fp8DirectDotGeneralOp, calls=2)
    with pytest.raises(ModelError, match=re.escape(f"one call reads {OVERWRITE_WITH_GRADIENT}/first/")):
        make(module, mean)[0].train_step(BATCHES[0])

    def ours(model: Any, batch: Any) -> Any:
        model.variables[OVERWRITE_WITH_GRADIENT] = as_fm32(model.variables[OVERWRITE_WITH_GRADIENT])
        return mean(model, batch)

    trainer, state = make(module, ours)

    @jax.jit
    def step(state: TrainState, batch: Any) -> TrainState:
        def loss_of(variables: Any) -> Any:
            given = {**variables, OVERWRITE_WITH_GRADIENT: as_fm32(variables[OVERWRITE_WITH_GRADIENT])}
            return mean(lambda x: module.apply(given, x), batch)

        return state.apply_gradients(grads=jax.grad(loss_of)(state.params))

    for batch in BATCHES:
        state = step(state, batch)
        trainer.train_step(batch)
    tree_allclose(trainer.gather_variables(), state.params, atol=1e-6)


def test_variables_stored_as_fm32_are_refused():
    variables = MODULES["direct_op"].init(jax.random.key(0), BATCHES[0]["x"])
    variables = {**variables, OVERWRITE_WITH_GRADIENT: jax.jit(as_fm32)(variables[OVERWRITE_WITH_GRADIENT])}
    with pytest.raises(ModelError, match=r"input_amax_history of Dense has dtype fp8_meta32.*Store it in float32"):
        make(MODULES["direct_op"], mean, variables=variables)


def test_a_skipped_step_and_a_resumed_run(tmp_path: Path):
    options = {"training": Training(on_nonfinite="skip"), "checkpoints": Checkpoints(tmp_path, every=2)}

    def trainer() -> PipelineTrainer:
        return make(MODULES["direct_op"], mean, **options)[0]

    first = trainer()
    first.fit(BATCHES[:2])
    before = jax.device_get(first.state.model_state["collections"])
    bad = BATCHES[0] | {"x": np.full_like(BATCHES[0]["x"], np.nan)}
    assert first.train_step(bad)["skipped_step"] == 1
    tree_allclose(first.state.model_state["collections"], before, rtol=0, atol=0)
    second = trainer()
    second.restore(2)
    tree_allclose(second.state.model_state["collections"], before, rtol=0, atol=0)


def test_treduce_takes_the_largest_gradients_by_an_operation():
    """What the reference of `treduce_i` shows."""
    module = MODULES["direct_op"]
    variables = module.init(jax.random.key(0), BATCHES[0]["x"])
    mesh = jaxpp.MpmdMesh(jax.sharding.Mesh(np.array(jax.devices()[:2]), ("stage",)), "stage")
    batch = {name: BATCHES[0][name].reshape(4, 4, WIDTH) for name in "xy"}
    largest = {"params": jaxpp.Add, OVERWRITE_WITH_GRADIENT: jaxpp.Max}

    def step(variables: Any, batch: Any) -> Any:
        def loss_of(variables: Any, microbatch: Any) -> Any:
            return mean(lambda x: module.apply(variables, x), microbatch) / 4

        one = lambda microbatch: jax.value_and_grad(loss_of)(variables, microbatch)  # noqa: E731
        return jaxpp.treduce(one, batch, jaxpp.Std1F1B(2), operation=(jaxpp.Add, largest))

    loss, found = jaxpp.mpmd_jit_with_loop(step, mpmd_mesh=mesh)(variables, batch)
    expected = jax.jit(jax.value_and_grad(lambda of: mean(lambda x: module.apply(of, x), BATCHES[0])))(variables)
    tree_allclose((loss, found), expected, atol=1e-7)
    tree_allclose(found[OVERWRITE_WITH_GRADIENT], expected[1][OVERWRITE_WITH_GRADIENT], rtol=0, atol=0)
