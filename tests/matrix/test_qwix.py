"""Models that qwix quantises: int8, float8, statistics, and adapters over weights of 8 and 4 bits, NNX and Linen.

qwix rounds to the nearest level of a scale that it takes from the largest number. Its default puts this number at the
middle of two levels (-127.5), where the last bit decides between them; "absmax,1.01" leaves no such tie, and results
are equal to 1e-5. With the default, one level is the bound: 1 / 127 of a row's largest number.
"""

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

from jaxpp_flax import PipelineStage, PipelineTrainer
from jaxpp_flax.linen import PipelineStage as LinenStage
from jaxpp_flax.trainers import Training
from jaxpp_flax.trainers.step.optimizer_update import Update
from jaxpp_flax.verify import verify
from tests.helpers import slow, tree_allclose

pytestmark = [
    pytest.mark.extras,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    # The trainer warns of statistics that a later microbatch reads: the reference has them in the same order.
    pytest.mark.filterwarnings("ignore::jaxpp_flax.trainers.MicrobatchStateWarning"),
    pytest.mark.filterwarnings("ignore::jaxpp_flax.trainers.MicrobatchLossWarning"),
]

WIDTH, ROWS, MICROBATCHES, RATE = 16, 32, 4, 0.05
RNG = np.random.default_rng(0)
BATCHES = [{name: RNG.normal(size=(ROWS, WIDTH)).astype(np.float32) for name in "xy"} for _ in range(2)]
FP8 = {"weight_qtype": jnp.float8_e4m3fn, "act_qtype": jnp.float8_e4m3fn, "bwd_qtype": jnp.float8_e5m2}
INT8 = {"weight_qtype": jnp.int8, "act_qtype": jnp.int8}
NO_TIES = {f"{of}_calibration_method": "absmax,1.01" for of in ("weight", "act", "bwd")}
RULES: dict[str, dict[str, Any]] = {
    "int8": {**INT8, **NO_TIES},
    "int8, backward too": {**INT8, **NO_TIES, "bwd_qtype": jnp.int8},
    "fp8": FP8,
    "int8 with statistics": {**INT8, **NO_TIES, "act_static_scale": True},
    "int8 with ties": INT8,
}
ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {},
    "lora over int8": {"weight_qtype": jnp.int8},
    "lora over nf4": {"weight_qtype": "nf4", "tile_size": 8},
}


def quantised(model: Any, name: str) -> Any:
    """Return the model, NNX or Linen, under a provider of qwix."""
    qwix = pytest.importorskip("qwix")
    inputs = (BATCHES[0]["x"],) if isinstance(model, nnx.Module) else ()
    if name in RULES:
        return qwix.quantize_model(model, qwix.QtProvider([qwix.QtRule(**RULES[name])]), *inputs)
    provider = qwix.LoraProvider(module_path=".*", rank=2, alpha=4.0, **ADAPTERS[name])
    return qwix.apply_lora_to_model(model, provider, *inputs, **({"rngs": nnx.Rngs(7)} if inputs else {}))


class Block(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.widen, self.narrow = nnx.Linear(WIDTH, 24, rngs=rngs), nnx.Linear(24, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.narrow(jnp.tanh(self.widen(x)))


class Model(nnx.Module):
    def __init__(self) -> None:
        self.blocks = nnx.List([Block(rngs=nnx.Rngs(i)) for i in range(2)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x

    def mark(self) -> Model:
        self.blocks = nnx.List(map(PipelineStage, self.blocks))
        return self


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + nn.Dense(WIDTH)(jnp.tanh(nn.Dense(24)(x)))


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for i in range(2):
            x = LinenStage(LinenBlock(name=f"block_{i}"))(x)
        return x


def loss_fn(model: Any, batch: Any) -> jax.Array:
    return jnp.square(model(batch["x"]) - batch["y"]).mean()


def trainer_of(model: Any, wrt: Any = nnx.Param, axes: Any = None, **options: Any) -> PipelineTrainer:
    return PipelineTrainer(
        model, optax.sgd(RATE), loss_fn, num_stages=2, num_microbatches=MICROBATCHES, mesh=axes or {}, logging=False,
        **{"training": Training(wrt=wrt)} | options,
    )  # fmt: skip


def accumulated(loss_of: Callable[[Any, Any, Any], Any], trained: Any, rest: Any, batch: Any) -> Any:
    """Return the loss, the trained values and the rest after a step of plain accumulation.

    `loss_of(trained, rest, microbatch)` returns the loss and the next rest.
    """
    one, total, gradients = jax.jit(jax.value_and_grad(loss_of, has_aux=True)), 0.0, None
    for part in range(MICROBATCHES):
        microbatch = jax.tree.map(lambda x, part=part: x.reshape(MICROBATCHES, -1, WIDTH)[part], batch)
        (loss, rest), found = one(trained, rest, microbatch)
        total += float(loss) / MICROBATCHES
        gradients = found if gradients is None else jax.tree.map(jnp.add, gradients, found)
    return total, jax.tree.map(lambda p, g: p - RATE * g / MICROBATCHES, trained, gradients), rest


@pytest.mark.parametrize(
    ("name", "marked", "axes"),
    [
        ("int8", "before", {}), ("int8, backward too", "after", {}), ("fp8", "before", {"data": 2}),
        ("int8 with statistics", "before", {}), ("lora over nf4", "after", {}),
        slow("lora", "before", {"data": 2}), slow("lora over int8", "before", {}), slow("fp8", "after", {}),
        slow("int8", "after", {"data": 2}), slow("lora over nf4", "before", {"data": 2}),
        slow("int8 with statistics", "after", {}), slow("int8 with ties", "before", {"data": 2}),
    ],
)  # fmt: skip
def test_nnx_equals_plain_accumulation(name: str, marked: str, axes: dict[str, int]):
    def made() -> Model:
        return quantised(Model().mark(), name) if marked == "before" else quantised(Model(), name).mark()

    wrt = nnx.LoRAParam if name in ADAPTERS else nnx.Param
    graphdef, trained, rest = nnx.split(made(), wrt, ...)

    def loss_of(trained: Any, rest: Any, microbatch: Any) -> Any:
        model = nnx.merge(graphdef, trained, rest, copy=True)
        return loss_fn(model, microbatch), nnx.split(model, wrt, ...)[2]

    trainer = trainer_of(made(), wrt, axes)
    level = 1 / 127 if name == "int8 with ties" else 1e-5
    for batch in BATCHES:
        loss, expected, expected_rest = accumulated(loss_of, trained, rest, batch)
        np.testing.assert_allclose(trainer.train_step(batch)["loss"], loss, rtol=level)
        _, trained, rest = nnx.split(trainer.gather_model(), wrt, ...)
        tree_allclose(nnx.to_pure_dict(trained), nnx.to_pure_dict(expected), rtol=level)
        # Statistics, frozen weights and their scales: of the same weights the same bits.
        tree_allclose(nnx.to_pure_dict(rest), nnx.to_pure_dict(expected_rest), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["int8 with statistics", "lora over nf4", slow("fp8"), slow("lora over int8")])
def test_linen_equals_plain_accumulation(name: str):
    module = quantised(LinenModel(), name)
    variables = module.init(jax.random.key(0), BATCHES[0]["x"])

    def is_adapter(path: Any) -> bool:
        return "lora" in str(path)

    options = {"training": Training(frozen=lambda path: not is_adapter(path))} if name in ADAPTERS else {}
    trainer = trainer_of(module, variables=variables, **options)
    leaves, tree = jax.tree.flatten(variables["params"])
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(variables["params"])]
    chosen = [i for i, path in enumerate(paths) if name not in ADAPTERS or is_adapter(path)]
    rest = {key: value for key, value in variables.items() if key != "params"}

    def loss_of(trained: Any, rest: Any, microbatch: Any) -> Any:
        params = [dict(zip(chosen, trained, strict=True)).get(i, leaf) for i, leaf in enumerate(leaves)]
        given = {"params": jax.tree.unflatten(tree, params), **rest}
        outputs, written = module.apply(given, microbatch["x"], mutable=[*rest])
        return jnp.square(outputs - microbatch["y"]).mean(), written

    for batch in BATCHES:
        loss, expected, expected_rest = accumulated(loss_of, [leaves[i] for i in chosen], rest, batch)
        np.testing.assert_allclose(trainer.train_step(batch)["loss"], loss, rtol=1e-5)
        after = jax.tree.map(jnp.asarray, trainer.gather_variables())
        leaves = jax.tree.leaves(after["params"])
        tree_allclose([leaves[i] for i in chosen], expected)
        rest = {key: value for key, value in after.items() if key != "params"}
        tree_allclose(rest, expected_rest, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["int8, backward too", slow("fp8"), slow("int8 with ties")])
def test_verify_takes_a_level_for_rounding_and_finds_a_fault(name: str, monkeypatch: pytest.MonkeyPatch):
    report = verify(trainer_of(quantised(Model().mark(), name), axes={"data": 2}), BATCHES[0])
    assert report.agrees, report
    right = Update.summand
    monkeypatch.setattr(Update, "summand", lambda self, grads: jax.tree.map(lambda g: 2 * g, right(self, grads)))
    first = verify(trainer_of(quantised(Model().mark(), name), axes={"data": 2}), BATCHES[0]).first
    assert first is not None
    assert "doubled" in first.likely
