"""Some leaves out of a checkpoint, before anything is placed: the others get the values that they would have had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.checkpoint import CheckpointMismatchError
from jaxpp_flax.checkpoint.format.paths import flatten
from jaxpp_flax.trainers import Training
from jaxpp_flax.trainers.state.sources import Factory
from tests.helpers import slow
from tests.trainers import models as m
from tests.trainers.sharing import sharing_steps

BATCH = m.make_xy(8)


@sharing_steps("seed", "model")
def make_trainer(seed: int, model: str = "factory", stages: int = 2, tx: Any = None) -> PipelineTrainer:
    factory = lambda rngs: m.Layers(rngs=rngs, dropout=0.1)  # noqa: E731
    made = factory if model == "factory" else factory(nnx.Rngs(seed))
    return PipelineTrainer(
        made, tx or optax.adam(0.1), m.squared_error, num_stages=stages, num_microbatches=2, logging=False,
        assignment="even", training=Training(ema_decay=0.5, seed=seed),
    )  # fmt: skip


def values(trainer: PipelineTrainer) -> dict[str, np.ndarray]:
    leaves = flatten(trainer.state)[0]
    return {path: np.asarray(leaf) for path, leaf in leaves.items() if "key" not in path.rpartition("/")[2]}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    trainer = make_trainer(3)
    trainer.train_step(BATCH)
    path = trainer.save(tmp_path_factory.mktemp("saved") / "run")
    return path, values(trainer)


CHOSEN: dict[str, Any] = {
    "some weights": lambda path: path.startswith("params/layers/1/"),
    "weights": lambda path: path.startswith("params/"),
    "half of the optimizer": lambda path: path.startswith("opt_state/0/mu/"),
    "streams": lambda path: path.startswith("model_state/") or path == "step",
}


@pytest.mark.parametrize(
    ("case", "model"),
    [
        *((case, "factory") for case in CHOSEN),
        ("weights", "module"),
        *(slow(case, "module") for case in CHOSEN if case != "weights"),
    ],
)
def test_chosen_leaves_are_read_and_the_others_are_first_values(case: str, model: str, saved: Any):
    path, stored = saved
    first = values(make_trainer(0, model))
    trainer = make_trainer(0, model)
    trainer.restore(path, only=CHOSEN[case])
    source = {name: name for name in stored if CHOSEN[case](name)}
    # The average follows the weights that were restored.
    source |= {f"ema/{name[7:]}": name for name in source if name.startswith("params/")}
    found = values(trainer)
    assert source
    assert found.keys() == stored.keys()
    for name, value in found.items():
        expected = stored[source[name]] if name in source else first[name]
        np.testing.assert_array_equal(value, expected, err_msg=name)
    assert np.isfinite(float(trainer.train_step(BATCH)["loss"]))


def test_nothing_is_made_that_is_read(saved: Any, monkeypatch: pytest.MonkeyPatch):
    trainer = make_trainer(0)
    made: list[str] = []
    make = Factory.read
    monkeypatch.setattr(Factory, "read", lambda self, places: made.extend(places) or make(self, places))
    trainer.restore(saved[0], only="params/*")
    assert made == []
    assert trainer.evaluate([BATCH])["loss"] > 0
    assert made
    assert all(path.startswith("model_state/") for path in made)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(trainer.held.memory.opt_state))


def test_a_checkpoint_that_does_not_fit_makes_nothing(saved: Any):
    trainer = make_trainer(0, tx=optax.sgd(0.1, momentum=0.9))
    with pytest.raises(CheckpointMismatchError, match="opt_state/0/trace/layers/0/bias: missing in the check"):
        trainer.restore(saved[0], only=["params", "opt_state"])
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(trainer.held.memory.params))


def test_a_wide_average_follows_narrow_weights(tmp_path: Path):
    def make(seed: int) -> PipelineTrainer:
        model = m.Layers(rngs=nnx.Rngs(seed), param_dtype=jnp.bfloat16)
        return PipelineTrainer(
            model, optax.sgd(0.1), m.squared_error, num_stages=2, num_microbatches=2, logging=False,
            training=Training(ema_decay=0.5, seed=seed),
        )  # fmt: skip

    first, trainer, data = make(0), make(1), m.make_xy(4)
    path = first.save(tmp_path / "run")
    for trained in (False, True):
        if trained:
            trainer.train_step(data)
        trainer.restore(path, only="params/*")
        params, average = (flatten(tree)[0] for tree in (first.state.params, trainer.state.ema))
        for name, leaf in average.items():
            assert leaf.dtype == jnp.float32
            np.testing.assert_array_equal(np.asarray(leaf), np.asarray(params[name]).astype(np.float32))
