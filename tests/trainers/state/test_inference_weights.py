"""Evaluation, prediction, generation and export use the weights that `Inference(params=)` makes of the state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.trainers import Checkpoints, Inference, Logging, Memory, MeshOptions, Training
from tests.helpers import slow_but, tree_allclose
from tests.trainers import models as m
from tests.trainers.generation import models as generation
from tests.trainers.model import test_sharding as sharded
from tests.trainers.sharing import sharing_steps

BATCHES = [m.make_xy(8, seed=seed) for seed in range(3)]
SCHEDULE_FREE = optax.contrib.schedule_free_adamw(0.1)


def evaluated(state: Any) -> Any:
    return optax.contrib.schedule_free_eval_params(state.opt_state, state.params)


def average(state: Any) -> Any:
    return state.ema


def predict(model: Any, batch: Any) -> Any:
    return model(batch["x"])


@sharing_steps("checkpoints", "logging")
def make(tx: Any = SCHEDULE_FREE, stages: int = 2, params: Any = evaluated, model: Any = None, **options: Any) -> Any:
    inference = Inference(predict_fn=predict, params=params)
    options = {"logging": False, "num_microbatches": 2, "inference": inference, **options}
    return PipelineTrainer(model or m.Layers(), tx, m.squared_error, num_stages=stages, **options)


@jax.jit
def squared_error(params: Any, batch: Any) -> Any:
    return m.squared_error(nnx.merge(nnx.split(m.Layers())[0], params), batch)


def plain_loss(params: Any, batch: Any) -> float:
    return float(squared_error(params, batch))


def trained_plainly(steps: int) -> tuple[Any, Any]:
    """The weights to evaluate, and the trained ones, of plain JAX."""
    graph, params = nnx.split(m.Layers())
    state = SCHEDULE_FREE.init(params)

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        grads = jax.grad(lambda params: m.squared_error(nnx.merge(graph, params), batch))(params)
        updates, state = SCHEDULE_FREE.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for batch in BATCHES[:steps]:
        params, state = step(params, state, batch)
    return optax.contrib.schedule_free_eval_params(state, params), params


LAYOUTS: dict[str, Any] = {
    "plain jit": {"stages": 1},
    "2 stages": {},
    "data": {"mesh": {"data": 2}},
    "host": {"memory": Memory(optimizer_state="pinned_host")},
    "plain jit, host": {"stages": 1, "memory": Memory(optimizer_state="pinned_host")},
}


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, "host"))
def test_schedule_free_evaluates_its_own_weights(layout: str, tmp_path: Path):
    trainer, test = make(**LAYOUTS[layout]), m.make_xy(8, seed=9)
    np.testing.assert_allclose(trainer.evaluate([test])["loss"], plain_loss(trained_plainly(0)[0], test), rtol=1e-5)
    for batch in BATCHES:
        trainer.train_step(batch)
    wanted, raw = trained_plainly(3)
    assert abs(plain_loss(wanted, test) / plain_loss(raw, test) - 1) > 1e-3
    for _ in range(2):  # the first call and one with the same programs
        np.testing.assert_allclose(trainer.evaluate([test])["loss"], plain_loss(wanted, test), rtol=1e-5)
    graph = nnx.split(m.Layers())[0]
    np.testing.assert_allclose(trainer.predict(test), nnx.merge(graph, wanted)(test["x"]), rtol=1e-4, atol=1e-5)
    tree_allclose(jax.tree.map(np.asarray, trainer.state.params), jax.tree.map(np.asarray, raw), rtol=1e-4)
    again = make(model=m.Layers(rngs=nnx.Rngs(7)))
    again.load_pretrained(trainer.export_pretrained(tmp_path / "out"))
    tree_allclose(jax.tree.map(np.asarray, again.state.params), jax.tree.map(np.asarray, wanted), rtol=1e-4)


def test_batches_of_several_sizes_before_the_first_step():
    trainer, data = make(**LAYOUTS["host"]), [m.make_xy(size, seed=size) for size in (8, 5, 8)]
    losses = [plain_loss(trained_plainly(0)[0], batch) for batch in data]
    np.testing.assert_allclose(trainer.evaluate(data)["loss"], np.average(losses, weights=[8, 5, 8]), rtol=1e-5)
    assert trainer.held.places is None


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("layout", ["plain jit", "2 stages"])
def test_an_evaluation_makes_the_weights_once(layout: str, steps: int, monkeypatch: pytest.MonkeyPatch):
    """Whatever the programs of its batches; a structure of its own is one that no other batch is filled up to."""
    trainer, batch = make(**LAYOUTS[layout]), m.make_xy(8)
    for _ in range(steps):
        trainer.train_step(batch)
    data = [batch, {**batch, "further": batch["y"]}] * 2
    made, count = trainer.held.with_weights, []
    monkeypatch.setattr(trainer.held, "with_weights", lambda function: count.append(function) or made(function))
    trainer.evaluate(data)
    assert len(count) == 1


def test_the_average_and_parameters_divided_inside_a_stage():
    options = {"training": Training(ema_decay=0.5), "inference": Inference(params=average)}
    trainer, batch = sharded.trainer("nnx", mesh=MeshOptions(axes={"fsdp": 2}), **options), sharded.batch()
    for _ in range(2):
        trainer.train_step(batch)
    plain = nnx.jit(m.squared_error)
    wanted, other = (float(plain(trainer.gather_model(ema=ema), batch)) for ema in (True, False))
    np.testing.assert_allclose(trainer.evaluate([batch])["loss"], wanted, rtol=1e-5)
    assert abs(wanted / other - 1) > 1e-3


def test_linen_with_frozen_parameters():
    module, batch = nn.Sequential([nn.Dense(m.Layers.WIDTH), nn.Dense(m.Layers.WIDTH)]), BATCHES[0]
    variables = jax.jit(module.init)(jax.random.key(0), batch["x"])
    trainer = PipelineTrainer(
        module, optax.sgd(0.1), m.squared_error, variables=variables, num_stages=1, num_microbatches=2, logging=False,
        training=Training(frozen=["layers_0/*"]), inference=Inference(params=lambda s: halved(s.params)),
    )  # fmt: skip
    params = {name: tree if name == "layers_0" else halved(tree) for name, tree in variables["params"].items()}
    expected = jax.jit(lambda params: m.squared_error(lambda x: module.apply({"params": params}, x), batch))(params)
    np.testing.assert_allclose(trainer.evaluate([batch])["loss"], expected, rtol=1e-5)


def halved(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf / 2, tree)


def test_generation():
    model = generation.GPT(nnx.Rngs(0), num_blocks=0)
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    negative = jax.tree.map(lambda leaf: -leaf, params)
    wanted = generation.greedy(nnx.merge(graph, negative, rest), generation.PROMPTS[:2], 2)
    trainer = PipelineTrainer(
        model, optax.sgd(0.1), generation.loss_fn, num_stages=1, num_microbatches=2, logging=False,
        inference=Inference(params=lambda state: jax.tree.map(lambda leaf: -leaf, state.params)),
    )  # fmt: skip
    generation.assert_equal(trainer.generate(generation.PROMPTS[:2], max_new_tokens=2), wanted)


def test_the_best_checkpoint_is_that_of_these_weights(tmp_path: Path):
    checkpoints, test = Checkpoints(tmp_path, every=1, best="eval_loss"), m.make_xy(8, seed=9)
    trainer = make(checkpoints=checkpoints, **LAYOUTS["host"])
    trainer.fit(BATCHES, steps=3, eval_data=[test], eval_every=1)
    trainer.restore("best")
    losses = [plain_loss(trained_plainly(step)[0], test) for step in (1, 2, 3)]
    np.testing.assert_allclose(trainer.evaluate([test])["loss"], min(losses), rtol=1e-5)
    assert trainer.step == 1 + int(np.argmin(losses))


def test_a_line_says_which_weights_are_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with_average, sgd, test = Training(ema_decay=0.5), optax.sgd(0.1), m.make_xy(8, seed=9)
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "use the weights of Inference(params=evaluated)"),
        ({"params": lambda state: state.params}, "use the weights of Inference(params=...)"),
        ({"params": None}, "use the trained weights, not those that schedule_free evaluates: Inference(params=lambda "),
        ({"params": None, "training": with_average, "tx": sgd}, "use the trained weights, not their moving average"),
        ({"params": None, "tx": sgd}, ""),  # there are no others
    ]
    for options, text in cases:
        trainer = make(stages=1, **{**options, "logging": Logging()})
        capsys.readouterr()
        trainer.evaluate([test])
        trainer.evaluate([test])
        assert capsys.readouterr().out.count(f"inference and export {text}" if text else "inference") == bool(text)
    trainer = make(stages=1, training=with_average, logging=Logging())
    trainer.export_pretrained(tmp_path / "average", ema=True)
    assert "export_pretrained writes the moving average" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("params", "error", "text"),
    [
        (lambda state: {"layers": 0}, ValueError, r"a tree like state.params, .* layers, layers/0/bias, .* and 2 more"),
        (lambda state: state.ema, ValueError, r"returned None.* without training=Training\(ema_decay="),
        (lambda state: print(end=""), ValueError, r"returned None\. Return a tree like state\.params"),
        ("ema", TypeError, r"params must be a function of the state, such as .* got str: 'ema'"),
    ],
)
def test_what_is_no_tree_of_weights_is_refused_at_once(params: Any, error: Any, text: str):
    with pytest.raises(error, match=text):
        make(params=params)


def test_weights_of_other_types_get_those_of_the_parameters(tmp_path: Path):
    model = m.Layers(param_dtype=jnp.bfloat16)
    trainer = make(optax.sgd(0.1), params=average, model=model, training=Training(ema_decay=0.999))
    trainer.train_step(BATCHES[0])
    wanted = trainer.gather_model(ema=True)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(wanted))} == {jnp.dtype(jnp.bfloat16)}
    assert {leaf.dtype for leaf in jax.tree.leaves(trainer.state.ema)} == {jnp.dtype(jnp.float32)}
    test = m.make_xy(8, seed=9)
    np.testing.assert_allclose(trainer.evaluate([test])["loss"], float(m.squared_error(wanted, test)), rtol=1e-2)
    for name, options in {"one": {"ema": True}, "two": {}}.items():
        path = trainer.export_pretrained(tmp_path / name, **options)
        again = make(optax.sgd(0.1), params=None, model=m.Layers(rngs=nnx.Rngs(3), param_dtype=jnp.bfloat16))
        again.load_pretrained(path)
        written, expected = (jax.tree.map(np.asarray, of) for of in (again.state.params, nnx.state(wanted, nnx.Param)))
        tree_allclose(written, expected, rtol=0, atol=0)
