"""The products of matrices in the optimizer's update are a part of its seconds."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineStage, PipelineTrainer
from jaxpp_flax.planning import device_named, quote
from jaxpp_flax.planning.quoting.traced import Axes, trace_model
from tests.helpers import slow

WIDTH, LAYERS, DEVICE = 1024, 6, "h100-sxm"


def factory(tx: Any, cut: Any = None, layers: int = LAYERS) -> Any:
    def make(layers: int = layers, **options: Any) -> tuple[PipelineTrainer, Any]:
        init = nnx.initializers.normal()
        init = nnx.with_partitioning(init, cut) if cut else init

        def model(rngs: nnx.Rngs) -> nnx.Module:
            made = [nnx.Linear(WIDTH, WIDTH, kernel_init=init, rngs=rngs) for _ in range(layers)]
            return nnx.Sequential(*map(PipelineStage, made))

        loss = lambda model, x: jnp.mean(model(x) ** 2)  # noqa: E731
        trainer = PipelineTrainer(model, tx, loss, logging=False, **options)
        return trainer, jax.ShapeDtypeStruct((64, WIDTH), jnp.float32)

    return make


def shampoo(scanned: bool) -> optax.GradientTransformation:
    """Both sides of a gradient times an approximate root of its second moments."""

    def root(moments: jax.Array) -> jax.Array:
        def better(y: jax.Array) -> jax.Array:
            return y @ (1.5 * jnp.eye(WIDTH) - 0.5 * moments @ y @ y)

        if scanned:
            return jax.lax.scan(lambda y, _: (better(y), None), jnp.eye(WIDTH), None, 3)[0]
        return better(better(better(jnp.eye(WIDTH))))

    def init(params: Any) -> Any:
        return jax.tree.map(lambda p: jnp.zeros((p.shape[0], p.shape[0]) if p.ndim == 2 else ()), params)

    def update(grads: Any, moments: Any, params: Any = None) -> tuple[Any, Any]:
        new = jax.tree.map(lambda m, g: m + g @ g.T if g.ndim == 2 else m, moments, grads)
        return jax.tree.map(lambda g, m: root(m) @ g if g.ndim == 2 else g, grads, new), new

    return optax.GradientTransformation(init, update)


OPTIMIZERS = {
    "muon": optax.contrib.muon(1e-3),
    "muon in a chain": optax.chain(optax.clip_by_global_norm(1.0), optax.contrib.muon(1e-3), optax.ema(0.9)),
    "muon with two kinds of steps": optax.contrib.muon(1e-3, preconditioning="aol"),
    "shampoo": shampoo(scanned=False),
}


def operations(tx: Any) -> float:
    """Those that XLA counts in the update of one layer."""
    layer = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in
             {"kernel": (WIDTH, WIDTH), "bias": (WIDTH,)}.items()}  # fmt: skip
    state = jax.eval_shape(tx.init, layer)
    cost = jax.jit(tx.update).lower(layer, state, layer).cost_analysis()
    return (cost if isinstance(cost, dict) else cost[0])["flops"]


CASES = [("muon in a chain", "layers"), ("shampoo", "layers"), ("muon", None)]
CASES += [slow("muon", "layers"), slow("muon with two kinds of steps", "layers")]


@pytest.mark.parametrize(("name", "depth"), CASES, ids=str)
def test_the_products_are_counted(name: str, depth: str | None):
    tx = OPTIMIZERS[name]
    found = quote(factory(tx), hardware=DEVICE, devices=1, depth=depth, wanted={"microbatch": 64})
    facts = [of for _, of in found.quoter.model.updates(Axes())]
    counted = sum(p.times * p.flops for of in facts for p in of.products)
    # Some versions of XLA count both branches of a condition, of which one runs.
    assert 0.5 * LAYERS * operations(tx) < counted < 1.05 * LAYERS * operations(tx)
    at_peak = LAYERS * operations(tx) / device_named(DEVICE).peak["float32"]
    assert 0.5 * at_peak < found.best.parts["update"] < 10 * at_peak


def test_a_loop_in_an_update_is_counted_by_its_turns():
    once, looped = (trace_model(factory(shampoo(scanned), layers=1)).updates(Axes()) for scanned in (False, True))
    flops = [sum(p.times * p.flops for _, of in each for p in of.products) for each in (once, looped)]
    assert flops[0] == flops[1]


@pytest.mark.parametrize(
    ("cut", "axis"), [((None, "tensor"), "tensor"), (("fsdp", None), "fsdp"), (None, "pipeline")], ids=str
)
def test_devices_share_an_update(cut: Any, axis: str):
    tx = optax.contrib.muon(1e-3)
    alone = quote(factory(tx, cut), hardware=DEVICE, devices=1, depth="layers", wanted={"microbatch": 8})
    shared = quote(factory(tx, cut), hardware=DEVICE, devices=2, depth="layers", wanted={axis: 2, "microbatch": 8})
    ratio = shared.best.parts["update"] / alone.best.parts["update"]
    assert 0.4 < ratio < (0.8 if axis == "pipeline" else 0.95)


def test_an_update_by_element_has_no_products():
    model = quote(factory(optax.adamw(1e-3)), hardware=DEVICE, devices=1, depth="layers").quoter.model
    assert not model.updates(Axes())
