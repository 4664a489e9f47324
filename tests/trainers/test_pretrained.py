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
from jaxpp_flax.checkpoint.format.paths import flatten
from jaxpp_flax.pretrained import NameMap, Rule, export_pretrained, load_pretrained
from jaxpp_flax.pretrained.loading import LoadPlan
from jaxpp_flax.trainers import ModelError, Training
from jaxpp_flax.trainers.state.placement import to_ordinary
from tests.helpers import slow, tree_allclose
from tests.trainers.models import LENGTH, LinenModel, Tokens, make_batch, mean_loss
from tests.trainers.sharing import assign_stages, sharing_steps

NAMES = NameMap(
    (
        Rule("embed/*", "wte.*"),
        Rule("blocks/*/kernel", "h.*.weight", transpose=(1, 0)),
        Rule("blocks/*/bias", "h.*.bias"),
        Rule("norm/*", "norm.*"),
        Rule("head/kernel", "head.weight", transpose=(1, 0)),
        Rule("head/bias", "head.bias"),
    )
)
BATCH = make_batch(8)


@sharing_steps("seed")
def make_trainer(seed: int, stages: int = 2, tx: Any = None, model: Any = None, **options: Any) -> PipelineTrainer:
    return PipelineTrainer(
        model or Tokens(rngs=nnx.Rngs(seed)), tx or optax.sgd(0.1, momentum=0.9), mean_loss, num_stages=stages,
        num_microbatches=2, logging=False, **options,
    )  # fmt: skip


def values(tree: Any) -> Any:
    """NumPy's arrays by path; of keys their numbers."""
    leaves = flatten(to_ordinary(tree))[0]
    return {path: np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf) for path, leaf in leaves.items()}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    params = nnx.state(Tokens(rngs=nnx.Rngs(3)), nnx.Param)
    return export_pretrained(params, tmp_path_factory.mktemp("weights") / "w", map=NAMES, max_shard_bytes=1000)


@pytest.fixture(scope="module")
def trained() -> Any:
    """The state after a step of a trainer that began with the weights of the files."""
    trainer = make_trainer(3, training=Training(ema_decay=0.5))
    trainer.train_step(BATCH)
    return values(trainer.state)


@sharing_steps("kind")
def make(kind: str, **options: Any) -> PipelineTrainer:
    """A trainer with other weights, or one whose model is not there yet."""
    model = lambda rngs: Tokens(rngs=rngs, **options)  # noqa: E731
    made = {
        "module": lambda: model(nnx.Rngs(0)),
        "factory": lambda: model,
        "abstract": lambda: nnx.eval_shape(lambda: model(nnx.Rngs(0))),
    }
    return make_trainer(0, model=made[kind](), training=Training(ema_decay=0.5))


@pytest.mark.parametrize(
    ("kind", "first"),
    [
        ("module", "compile, load"),
        ("factory", "load, predict"),
        ("abstract", "load, save"),
        *(slow(kind, "load, compile") for kind in ("module", "factory", "abstract")),
        slow("factory", "load, save"),
        slow("abstract", "load, predict"),
    ],
)
def test_a_run_goes_as_if_the_model_had_been_made_with_the_weights(
    kind: str, first: str, files: Path, trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The first call that needs the weights places them on their ranks; a step moves on from the same values."""
    places: list[Any] = []
    arrays = LoadPlan.arrays
    monkeypatch.setattr(LoadPlan, "arrays", lambda self, to=None: places.append(to) or arrays(self, to))
    trainer = make(kind)
    for call in first.split(", "):
        if call == "load":
            trainer.load_pretrained(files, map=NAMES)
            assert bool(places) == first.startswith("compile"), "nothing is read before the ranks are known"
        elif call == "compile":
            trainer.compile(BATCH)
        elif call == "save":
            trainer.save(tmp_path / "run")
        else:  # a program for each stage, where the model alone runs operation by operation
            expected = Tokens(rngs=nnx.Rngs(3))(BATCH["tokens"])
            tree_allclose(trainer.predict(BATCH["tokens"]), expected, rtol=1e-5, atol=1e-6)
    trainer.train_step(BATCH)
    (to,) = places
    assert {rank for sharding in to.values() for rank in sharding.ranks} == {0, 1}
    tree_allclose(values(trainer.state), trained, rtol=0, atol=0)


def test_every_number_of_stages_writes_the_bits_that_it_reads(files: Path, tmp_path: Path):
    expected = {file.name: file.read_bytes() for file in files.iterdir()}
    for stages in (1, 2, 3):
        trainer = make_trainer(0, stages)
        trainer.load_pretrained(files, map=NAMES)
        if stages == 3:
            assign_stages(trainer, BATCH)
        out = trainer.export_pretrained(tmp_path / str(stages), map=NAMES, max_shard_bytes=1000)
        assert {file.name: file.read_bytes() for file in out.iterdir()} == expected
        tokens = BATCH["tokens"]
        np.testing.assert_array_equal(trainer.gather_model()(tokens), Tokens(rngs=nnx.Rngs(3))(tokens))


@pytest.mark.filterwarnings("ignore::jaxpp_flax.trainers.BatchStatisticsWarning")
def test_running_statistics_and_frozen_parameters_too(tmp_path: Path):
    source = Tokens(rngs=nnx.Rngs(3), batch_norm=True, dropout=0.1)
    source.norm.mean[...] = jnp.full(8, 5.0)
    path = export_pretrained(nnx.state(source, (nnx.Param, nnx.BatchStat)), tmp_path / "w", map=NAMES)
    model = Tokens(rngs=nnx.Rngs(0), batch_norm=True, dropout=0.1)
    trainer = make_trainer(0, model=model, training=Training(frozen="embed"))
    trainer.load_pretrained(path, map=NAMES)
    loaded = nnx.state(trainer.gather_model(), (nnx.Param, nnx.BatchStat))
    tree_allclose(loaded, nnx.state(source, (nnx.Param, nnx.BatchStat)), rtol=0, atol=0)
    out = trainer.export_pretrained(tmp_path / "out", map=NAMES)
    assert (out / "model.safetensors").read_bytes() == (path / "model.safetensors").read_bytes()


def test_leaves_that_no_file_has(files: Path):
    """The factory makes them; an abstract model has no values for them."""
    made, eager, abstract = (make(kind, dropout=0.1) for kind in ("factory", "module", "abstract"))
    for trainer in (made, eager, abstract):
        trainer.load_pretrained(files, map=NAMES)
    streams = [values(trainer.state.model_state) for trainer in (made, eager)]
    assert streams[0]
    tree_allclose(*streams, rtol=0, atol=0)
    with pytest.raises(ModelError, match="the model is abstract"):
        abstract.compile(BATCH)


def test_a_trainers_checkpoint_of_another_number_of_stages(tmp_path: Path):
    """Adapters that the checkpoint lacks keep their values. The average can be written, where there is one."""
    trainer = make_trainer(3, 1, training=Training(ema_decay=0.5))
    trainer.train_step(BATCH)
    path = trainer.save(tmp_path / "run")
    model = Tokens(rngs=nnx.Rngs(0))
    model.blocks[1].adapter = nnx.Param(jnp.full(3, 7.0))
    other = make_trainer(0, model=model)
    other.load_pretrained(path, keep="*/adapter")
    loaded = nnx.to_pure_dict(nnx.state(other.gather_model(), nnx.Param))
    np.testing.assert_array_equal(loaded["blocks"][1].pop("adapter"), np.full(3, 7.0))
    tree_allclose(loaded, nnx.to_pure_dict(nnx.state(trainer.gather_model(), nnx.Param)), rtol=0, atol=0)

    average = load_pretrained(
        trainer.export_pretrained(tmp_path / "w", map=NAMES, ema=True), trainer.state.ema, map=NAMES
    )
    tree_allclose(average, trainer.state.ema, rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"export_pretrained\(ema=True\) needs an average"):
        other.export_pretrained(tmp_path / "x", map=NAMES, ema=True)


def test_a_linen_model(tmp_path: Path):
    module, tokens = LinenModel(1, batch_norm=True), jnp.zeros((1, LENGTH), jnp.int32)
    source, variables = (jax.jit(module.init)(jax.random.key(seed), tokens) for seed in (1, 0))
    names = NameMap((Rule("*", "*"),))
    path = export_pretrained({**source["params"], "batch_stats": source["batch_stats"]}, tmp_path / "w", map=names)
    trainer = make_trainer(0, model=module, variables=variables)
    trainer.load_pretrained(path)
    tree_allclose(trainer.gather_variables(), source, rtol=0, atol=0)


def test_files_that_do_not_fit_change_nothing_and_a_trained_model_takes_none(files: Path):
    trainer = make_trainer(0, 1)
    before = values(trainer.state.params)
    with pytest.raises(CheckpointMismatchError, match=r"head/bias: no rule of the map fills it"):
        trainer.load_pretrained(files, map=NameMap(NAMES.rules[:-1]))
    tree_allclose(values(trainer.state.params), before, rtol=0, atol=0)
    trainer.train_step(BATCH)
    with pytest.raises(ValueError, match="gives the first weights, but this trainer has done 1 steps"):
        trainer.load_pretrained(files, map=NAMES)
