"""A trainer's first weights out of files, and its current weights into files."""

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
from jaxpp_flax.checkpoint.format.leaves import is_key
from jaxpp_flax.pretrained import NameMap, Rule, export_pretrained, load_pretrained
from jaxpp_flax.pretrained.loading import LoadPlan
from jaxpp_flax.trainers import ModelError, Training
from tests.helpers import tree_allclose
from tests.trainers.models import LENGTH, LinenModel, Model, make_batch, mean_loss

NAMES = NameMap(
    (
        Rule("embed/*", "wte.*"),
        Rule("blocks/*/kernel", "h.*.weight", transpose=(1, 0)),
        Rule("blocks/*/bias", "h.*.bias"),
        Rule("blocks/*/scale", "h.*.scale"),
        Rule("blocks/*/mean", "h.*.mean"),
        Rule("blocks/*/var", "h.*.var"),
        Rule("head/kernel", "head.weight", transpose=(1, 0)),
        Rule("head/bias", "head.bias"),
    )
)
BATCH = make_batch(8)


def make_trainer(seed: int, stages: int = 2, tx: Any = None, model: Any = None, **options: Any) -> PipelineTrainer:
    return PipelineTrainer(
        model or Model(4, rngs=nnx.Rngs(seed)), tx or optax.adam(0.1), mean_loss, num_stages=stages,
        num_microbatches=2, logging=False, **options,
    )  # fmt: skip


def weights(trainer: PipelineTrainer) -> Any:
    return nnx.to_pure_dict(jax.tree.map(np.asarray, trainer.state.params))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    params = nnx.state(Model(4, rngs=nnx.Rngs(3)), nnx.Param)
    return export_pretrained(params, tmp_path_factory.mktemp("weights") / "w", map=NAMES, max_shard_bytes=1000)


@pytest.fixture(scope="module")
def trained() -> Any:
    """The state after a step of a trainer that began with the weights of the files."""
    trainer = make_trainer(3, training=Training(ema_decay=0.5))
    trainer.train_step(BATCH)
    return jax.tree.map(np.asarray, trainer.state)


@pytest.mark.parametrize("when", ["before compile", "after compile"])
def test_a_run_goes_as_if_the_model_had_been_made_with_the_weights(files: Path, trained: Any, when: str):
    trainer = make_trainer(0, training=Training(ema_decay=0.5))
    if when == "after compile":
        trainer.compile(BATCH)
    trainer.load_pretrained(files, map=NAMES)
    trainer.train_step(BATCH)
    tree_allclose(jax.tree.map(np.asarray, trainer.state), trained, rtol=0, atol=0)


def test_the_weights_go_directly_to_their_ranks(files: Path, monkeypatch: pytest.MonkeyPatch):
    places: list[Any] = []
    arrays = LoadPlan.arrays
    monkeypatch.setattr(LoadPlan, "arrays", lambda self, to=None: places.append(to) or arrays(self, to))
    trainer = make_trainer(0, 4)
    trainer.load_pretrained(files, map=NAMES)
    assert not places  # nothing is read before the ranks are known
    trainer.compile(BATCH)
    (to,) = places
    assert {rank for sharding in to.values() for rank in sharding.ranks} == {0, 1, 2, 3}


def test_every_number_of_stages_reads_and_writes_the_same_bits(files: Path, tmp_path: Path):
    expected = {file.name: file.read_bytes() for file in files.iterdir()}
    for stages in (1, 2, 4):
        trainer = make_trainer(0, stages)
        if stages == 1:
            trainer.compile(BATCH)
        trainer.load_pretrained(files, map=NAMES)
        trainer.compile(BATCH)
        out = trainer.export_pretrained(tmp_path / str(stages), map=NAMES, max_shard_bytes=1000)
        assert {file.name: file.read_bytes() for file in out.iterdir()} == expected


def test_the_model_and_inference_before_the_first_step_have_the_weights(files: Path):
    trainer = make_trainer(0)
    trainer.load_pretrained(files, map=NAMES)
    trained, tokens = Model(4, rngs=nnx.Rngs(3)), BATCH["tokens"]
    np.testing.assert_array_equal(trainer.gather_model()(tokens), trained(tokens))


@pytest.mark.filterwarnings("ignore::jaxpp_flax.trainers.BatchStatisticsWarning")
def test_running_statistics_and_frozen_parameters_too(tmp_path: Path):
    source = Model(4, rngs=nnx.Rngs(3), batch_norm=True, dropout=0.1)
    for block in source.blocks:
        block.norm.mean[...] = jnp.full(8, 5.0)
    path = export_pretrained(nnx.state(source, (nnx.Param, nnx.BatchStat)), tmp_path / "w", map=NAMES)
    model = Model(4, rngs=nnx.Rngs(0), batch_norm=True, dropout=0.1)
    trainer = make_trainer(0, model=model, training=Training(frozen="embed"))
    trainer.load_pretrained(path, map=NAMES)
    trainer.compile(BATCH)
    loaded = nnx.state(trainer.gather_model(), (nnx.Param, nnx.BatchStat))
    tree_allclose(loaded, nnx.state(source, (nnx.Param, nnx.BatchStat)), rtol=0, atol=0)
    out = trainer.export_pretrained(tmp_path / "out", map=NAMES)
    assert (out / "model.safetensors").read_bytes() == (path / "model.safetensors").read_bytes()


def make_on_ranks(kind: str, **options: Any) -> PipelineTrainer:
    """A trainer whose model is not there yet."""
    if kind == "factory":
        return make_trainer(0, 4, model=lambda rngs: Model(4, rngs=rngs, **options))
    return make_trainer(0, 4, model=nnx.eval_shape(lambda: Model(4, rngs=nnx.Rngs(0), **options)))


@pytest.mark.parametrize("kind", ["factory", "abstract"])
@pytest.mark.parametrize("first", ["compile", "predict", "save"])
def test_a_model_that_is_not_there_yet(kind: str, first: str, files: Path, tmp_path: Path):
    """The first call that needs the weights places them on their ranks; a step moves on from the same values."""
    trainer = make_on_ranks(kind)
    trainer.load_pretrained(files, map=NAMES)
    if first == "predict":
        trained = Model(4, rngs=nnx.Rngs(3))
        # A program for each stage, where the model alone runs operation by operation.
        tree_allclose(trainer.predict(BATCH["tokens"]), trained(BATCH["tokens"]), rtol=1e-5, atol=1e-6)
    elif first == "save":
        trainer.save(tmp_path / "run")
    trainer.compile(BATCH)
    tree_allclose(weights(trainer), weights(make_trainer(3)), rtol=0, atol=0)
    ranks = {rank for leaf in jax.tree.leaves(trainer.state.params) for rank in leaf.sharding.ranks}
    assert ranks == {0, 1, 2, 3}
    eager = make_trainer(0, 4)
    eager.load_pretrained(files, map=NAMES)
    for each in (eager, trainer):
        each.train_step(BATCH)
    tree_allclose(weights(trainer), weights(eager), rtol=0, atol=0)


def test_leaves_that_no_file_has_are_made_by_the_factory(files: Path):
    trainer = make_on_ranks("factory", dropout=0.1)
    trainer.load_pretrained(files, map=NAMES)
    trainer.compile(BATCH)
    eager = make_trainer(0, 4, model=Model(4, rngs=nnx.Rngs(0), dropout=0.1))
    eager.load_pretrained(files, map=NAMES)
    eager.compile(BATCH)
    streams = [jax.tree.leaves(each.state.model_state) for each in (trainer, eager)]
    numbers = [[np.asarray(jax.random.key_data(x.as_jax_array()) if is_key(x) else x) for x in of] for of in streams]
    assert len(numbers[0]) > 0
    tree_allclose(*numbers, rtol=0, atol=0)


def test_an_abstract_model_has_no_values_for_leaves_that_no_file_has(files: Path):
    trainer = make_on_ranks("abstract", dropout=0.1)
    trainer.load_pretrained(files, map=NAMES)
    with pytest.raises(ModelError, match="the model is abstract"):
        trainer.compile(BATCH)


def test_a_trainers_checkpoint_of_another_number_of_stages(tmp_path: Path):
    """Adapters that the checkpoint lacks keep their values."""
    trainer = make_trainer(3)
    trainer.train_step(BATCH)
    path = trainer.save(tmp_path / "run")
    model = Model(4, rngs=nnx.Rngs(0))
    model.blocks[2].adapter = nnx.Param(jnp.full(3, 7.0))
    other = make_trainer(0, 4, model=model)
    other.load_pretrained(path, keep="*/adapter")
    loaded = nnx.to_pure_dict(nnx.state(other.gather_model(), nnx.Param))
    np.testing.assert_array_equal(loaded["blocks"][2].pop("adapter"), np.full(3, 7.0))
    tree_allclose(loaded, nnx.to_pure_dict(nnx.state(trainer.gather_model(), nnx.Param)), rtol=0, atol=0)


def test_a_linen_model(tmp_path: Path):
    module, tokens = LinenModel(2, batch_norm=True), jnp.zeros((1, LENGTH), jnp.int32)
    source, variables = (module.init(jax.random.key(seed), tokens) for seed in (1, 0))
    names = NameMap((Rule("*", "*"),))
    path = export_pretrained({**source["params"], "batch_stats": source["batch_stats"]}, tmp_path / "w", map=names)
    trainer = make_trainer(0, model=module, variables=variables)
    trainer.load_pretrained(path)
    tree_allclose(trainer.gather_variables(), source, rtol=0, atol=0)


def test_the_average_is_written(tmp_path: Path):
    trainer = make_trainer(0, 1, training=Training(ema_decay=0.5))
    trainer.train_step(BATCH)
    path = trainer.export_pretrained(tmp_path / "w", map=NAMES, ema=True)
    loaded = load_pretrained(path, trainer.state.ema, map=NAMES)
    tree_allclose(loaded, trainer.state.ema, rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"export_pretrained\(ema=True\) needs an average"):
        make_trainer(0).export_pretrained(tmp_path / "x", map=NAMES, ema=True)


def test_files_that_do_not_fit_change_nothing_and_a_trained_model_takes_none(files: Path):
    trainer = make_trainer(0, 1)
    before = weights(trainer)
    with pytest.raises(CheckpointMismatchError, match=r"head/bias: no rule of the map fills it"):
        trainer.load_pretrained(files, map=NameMap(NAMES.rules[:-1]))
    tree_allclose(weights(trainer), before, rtol=0, atol=0)
    trainer.train_step(BATCH)
    with pytest.raises(ValueError, match="gives the first weights, but this trainer has done 1 steps"):
        trainer.load_pretrained(files, map=NAMES)
