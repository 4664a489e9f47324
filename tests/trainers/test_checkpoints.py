"""A run that is interrupted ends as one that is not: state, losses and data."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.checkpoint import (
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointSaveError,
    CorruptCheckpointError,
    reading,
)
from jaxpp_flax.checkpoint.format.integrity import needed_bytes
from jaxpp_flax.trainers import Checkpoints, DataPositionError, Precision, Training
from jaxpp_flax.trainers.callbacks import Callback, OnMetrics
from jaxpp_flax.trainers.data.position import DataPosition
from jaxpp_flax.trainers.data.stream import Batches
from jaxpp_flax.trainers.progress import Display
from jaxpp_flax.trainers.state.placement import to_ordinary
from tests.checkpoint import at_commit, program
from tests.helpers import tree_allclose
from tests.trainers.models import squared_error

OTHER = list(program.batches(3))
make_small = program.make_trainer


def make_trainer(
    stages: int = 2, checkpoints: Path | Checkpoints | None = None, depth: int = 2, **options
) -> PipelineTrainer:
    return make_small(checkpoints, stages, depth, assignment="even", **options)


def fit(trainer: PipelineTrainer, data=OTHER, **options) -> dict[int, float]:
    """Train; the losses by step."""
    losses: dict[int, float] = {}
    callback = OnMetrics(lambda step, metrics: losses.update({step: metrics["loss"]}))
    trainer.fit(data, callbacks=[callback], **options)
    return losses


@dataclass
class Whole:
    """A run that nothing interrupted: its trainer and the losses."""

    trainer: PipelineTrainer
    losses: dict[int, float]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Whole:
    """A run of 10 steps. Tests restore its trainer to a step of their own."""
    trainer = make_trainer(checkpoints=Checkpoints(tmp_path_factory.mktemp("whole"), every=2))
    losses = fit(trainer, steps=10)
    return Whole(trainer, losses)


@pytest.fixture(scope="module")
def after_four(whole: Whole, tmp_path_factory) -> Path:
    """A directory with the checkpoints of steps 2 and 4, in the middle of the second pass over the data."""
    directory = tmp_path_factory.mktemp("run") / "ckpt"
    for step in ("2", "4"):
        shutil.copytree(whole.trainer.checkpoints.store.directory / step, directory / step)
    return directory


@pytest.fixture(scope="module")
def one_stage(tmp_path_factory) -> PipelineTrainer:
    """A trainer after a step; its directory was empty."""
    trainer = make_small(tmp_path_factory.mktemp("one") / "run", stages=1)
    trainer.fit(OTHER, steps=1, resume=True)
    assert trainer.step == 1
    return trainer


def test_a_callback_saves_to_a_path_on_a_condition_of_its_own(one_stage: PipelineTrainer, tmp_path: Path):
    found: list[Any] = []

    class SaveSecond(Callback):
        def on_evaluate(self, trainer: Any, step: int, metrics: Any) -> None:
            if step == 2:
                trainer.save(tmp_path / f"good_{step}")
                found.append(to_ordinary(trainer.state))

    fitted = make_small(None, stages=1)
    fitted.fit(OTHER, steps=3, eval_data=OTHER[:1], eval_every=1, callbacks=[SaveSecond()])
    assert [path.name for path in tmp_path.iterdir()] == ["good_2"]
    again = make_small(None)
    again.restore(tmp_path / "good_2")
    assert again.step == 2
    tree_allclose(to_ordinary(again.state), found[0], rtol=0, atol=0)
    with pytest.raises(CheckpointSaveError, match="it exists"):
        fitted.save(tmp_path / "good_2")


def copy_of(directory: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(directory, tmp_path / "copy"))


def test_with_another_number_of_stages(tmp_path: Path):
    for stages, others in ((1, 2), (2, 1)):
        first = make_small(tmp_path / f"run{stages}", stages=stages)
        fit(first, program.batches(), steps=1)
        first.save()
        loss = float(first.train_step(OTHER[1])["loss"])
        second = make_small(tmp_path / f"run{stages}", stages=others)
        assert fit(second, program.batches(), steps=2, resume=True)[2] == pytest.approx(loss, rel=1e-6)
        tree_allclose(to_ordinary(second.state.params), to_ordinary(first.state.params), rtol=1e-6, atol=1e-6)


def test_restoring_into_a_run_under_way_keeps_its_layout(whole: Whole):
    trainer = whole.trainer
    before = jax.tree.map(lambda leaf: leaf.sharding, trainer.state)
    trainer.restore(4)
    assert trainer.step == 4
    assert jax.tree.map(lambda leaf: leaf.sharding, trainer.state) == before
    assert float(trainer.train_step(OTHER[1])["loss"]) == whole.losses[5]


def test_errors_leave_the_state_as_it_was(after_four: Path, tmp_path: Path):
    trainer = make_trainer(depth=3, checkpoints=after_four)
    state = trainer.state
    with pytest.raises(CheckpointMismatchError, match=r"params/layers/2/kernel: missing"):
        trainer.restore("latest")
    assert trainer.state is state
    with pytest.raises(CheckpointNotFoundError, match="has no checkpoint of step 3; it has 2, 4"):
        trainer.restore(3)
    with pytest.raises(CheckpointNotFoundError, match="give the trainer checkpoints="):
        make_trainer().save()
    with pytest.raises(CheckpointSaveError, match=r"up to step 4.*resume=True"):
        make_trainer(checkpoints=after_four).fit(OTHER, steps=1)
    with pytest.raises(ValueError, match=r"save.7.: the state in memory is that of step 0"):
        make_trainer(checkpoints=tmp_path / "x").save(7)
    assert trainer.state is state


def test_another_model_is_named(after_four: Path):
    class Other(program.MLP):
        pass

    trainer = PipelineTrainer(
        Other(3, rngs=nnx.Rngs(0)), optax.sgd(1.0), squared_error, num_stages=1, num_microbatches=2, logging=False
    )
    with pytest.raises(CheckpointMismatchError, match="written for the model MLP; this trainer has Other"):
        trainer.restore(after_four / "4")


def test_weights_alone(after_four: Path, whole: Whole):
    trainer = make_trainer(checkpoints=after_four)
    trainer.restore("latest", only="params/*")
    whole.trainer.restore(4)
    tree_allclose(to_ordinary(trainer.state.params), to_ordinary(whole.trainer.state.params), rtol=0, atol=0)
    assert (trainer.step, whole.trainer.step) == (0, 4)
    assert not np.any(np.asarray(jax.tree.leaves(trainer.state.opt_state)[0]))


def test_a_restore_checks_everything_before_it_gives_the_state_up(after_four: Path, tmp_path: Path, whole: Whole):
    directory, trainer = copy_of(after_four, tmp_path), whole.trainer
    name, size = max(needed_bytes(directory / "4" / "state").items())
    data = directory / "4" / "state" / name
    content = data.read_bytes()
    data.write_bytes(content[: size - 1])
    with pytest.raises(CorruptCheckpointError, match=rf"restore another one(?s:.*){data.name}"):
        trainer.restore(directory / "4")
    trainer.train_step(OTHER[0])  # as if nothing had been
    data.write_bytes(content)
    old = jax.tree.leaves(trainer.state.params)[0]
    trainer.restore(directory / "4")
    assert old.is_deleted()
    assert float(trainer.train_step(OTHER[1])["loss"]) == whole.losses[5]
    trainer.restore(directory / "2", only="params/*")
    assert trainer.step == 5, "what is not restored is kept"
    assert np.isfinite(float(trainer.train_step(OTHER[1])["loss"]))


def test_a_restore_that_breaks_off_says_that_the_state_is_gone(whole: Whole, monkeypatch):
    left, read = [1], reading._read

    def fail(*arguments):
        if not left:
            raise CorruptCheckpointError("the disk broke.")
        left.pop()
        return read(*arguments)

    trainer = whole.trainer
    monkeypatch.setattr(reading, "_read", fail)
    with pytest.raises(CorruptCheckpointError, match=r"the disk broke. The state in memory is already deleted"):
        trainer.restore(4)  # the number of the step is read before the state is deleted
    with pytest.raises(RuntimeError, match=r"the trainer has no state.* a restore that did not end"):
        trainer.train_step(OTHER[0])
    monkeypatch.undo()
    trainer.restore(4)
    assert float(trainer.train_step(OTHER[1])["loss"]) == whole.losses[5]


def test_a_restore_leaves_the_users_own_arrays_alone(after_four: Path):
    model = program.MLP(2, rngs=nnx.Rngs(0))
    trainer = PipelineTrainer(
        model, optax.sgd(0.1, momentum=0.9), squared_error, num_stages=2, num_microbatches=2, logging=False,
        checkpoints=after_four,
    )  # fmt: skip
    trainer.restore("latest")
    assert trainer.step == 4
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(nnx.state(model)))


def test_an_unpipelined_model_of_stock_orbax(tmp_path: Path):
    plain = program.MLP(2, rngs=nnx.Rngs(5))
    with ocp.StandardCheckpointer() as stock:
        stock.save(tmp_path / "plain", nnx.state(plain))
    trainer = make_small(None)
    trainer.train_step(OTHER[0])  # on its two ranks by now
    trainer.restore(tmp_path / "plain", only="params/*", rename={"params": ""})
    tree_allclose(to_ordinary(trainer.state.params), nnx.state(plain, nnx.Param), rtol=0, atol=0)
    assert trainer.step == 1
    with pytest.raises(CheckpointMismatchError, match=r"params/layers/2/kernel: missing .*looked for layers/2/kernel"):
        make_small(None, depth=3).restore(tmp_path / "plain", only="params/*", rename={"params": ""})


def test_a_failed_background_save_is_told_by_the_next_step(one_stage: PipelineTrainer, monkeypatch):
    trainer, store = one_stage, one_stage.checkpoints.store
    trainer.save()
    trainer.train_step(OTHER[0])
    monkeypatch.setattr(at_commit, "hook", _fail)
    trainer.save(wait=False)
    while store._manager.is_saving_in_progress():
        pass
    with pytest.raises(CheckpointSaveError, match=r"run/2 failed.*on purpose"):
        trainer.train_step(OTHER[1])
    monkeypatch.undo()
    trainer.train_step(OTHER[1])  # the state is intact
    trainer.save()
    assert store.steps() == (1, 3)


def _fail(*_):
    raise RuntimeError("on purpose")


class Counting:
    """An iterator with a state of its own, in kinds that JSON lacks."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.at += 1
        return OTHER[self.at * 7 % 3]

    def get_state(self):
        return {"at": np.int64(self.at), b"k": (b"bytes", [1.5])}

    def set_state(self, state):
        assert state[b"k"] == (b"bytes", [1.5])
        self.at = int(state["at"])


def generator():
    for i in range(100):
        yield OTHER[i * 7 % 3]


def grain_data():
    grain = pytest.importorskip("grain")
    return grain.MapDataset.source(OTHER).shuffle(seed=3).repeat(4).to_iter_dataset()


def grain_loader():
    grain = pytest.importorskip("grain")
    sampler = grain.samplers.IndexSampler(
        len(OTHER), num_epochs=4, shuffle=True, seed=3, shard_options=grain.sharding.NoSharding()
    )
    return grain.DataLoader(data_source=OTHER, sampler=sampler, worker_count=0)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(Counting, id="get_state"),
        pytest.param(generator, id="generator"),
        pytest.param(grain_data, id="grain", marks=pytest.mark.extras),
        pytest.param(grain_loader, id="DataLoader", marks=pytest.mark.extras),
    ],
)
def test_data_goes_on_where_it_stood(data, tmp_path: Path):
    whole = fit(make_small(Checkpoints(tmp_path / "whole", every=3), stages=1), data(), steps=5)
    shutil.copytree(tmp_path / "whole" / "3", tmp_path / "run" / "3")
    rest = fit(make_small(tmp_path / "run", stages=1), data(), steps=5, resume=True)
    assert rest == {step: whole[step] for step in (4, 5)}


class Lines(Display):
    """Remembers what a bar would have shown."""

    def __init__(self):
        super().__init__(messages=False, progress=False)
        self.shown: list[Any] = []

    def message(self, text: str) -> None:
        self.shown.append(text)

    def start(self, total: int | None, done: int) -> None:
        self.shown.append(("bar", total, done))

    def advance(self, step: int) -> None:
        self.shown.append(step)


def test_a_long_way_through_the_data_is_shown():
    display = Lines()
    position = DataPosition(batches=150, epoch=0, in_epoch=150)
    assert next(Batches(range(1000), position=position, display=display)) == 150
    assert display.shown[:2] == ["fast-forwarding the data by 150 batches", ("bar", 150, 0)]
    assert display.shown[2:] == list(range(1, 151))


def test_data_that_cannot_go_there_may_be_refused(after_four: Path, tmp_path: Path):
    directory = copy_of(after_four, tmp_path)
    with pytest.raises(DataPositionError, match=r"after 1 batches of a pass.*no `set_state`"):
        make_trainer(checkpoints=directory).fit(OTHER, steps=5, resume=True, resume_data="refuse")
    with pytest.raises(DataPositionError, match="but this data ended after 0"):
        make_trainer(checkpoints=directory).fit(iter([]), steps=5, resume=True)
    with pytest.raises(ValueError, match="resume_data='x'"):
        make_trainer(checkpoints=directory).fit(OTHER, steps=5, resume=True, resume_data="x")


def test_the_average_and_the_loss_scale_are_kept(tmp_path: Path) -> None:
    options = {"training": Training(ema_decay=0.9), "precision": Precision(loss_scale="dynamic")}
    trainer = make_small(tmp_path / "ckpt", **options)
    fit(trainer, OTHER, steps=2)
    trainer.save()
    again = make_small(None, stages=1, **options)
    again.restore(tmp_path / "ckpt" / "2")
    before, after = to_ordinary(trainer.state), to_ordinary(again.state)
    assert before.ema is not None
    assert before.loss_scale is not None
    for kept, restored in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        if jax.dtypes.issubdtype(kept.dtype, jax.dtypes.prng_key):
            kept, restored = jax.random.key_data(kept), jax.random.key_data(restored)
        np.testing.assert_array_equal(np.asarray(kept), np.asarray(restored))


SCHEDULE_FREE = optax.contrib.schedule_free_sgd(0.1)


def test_copies_of_weights_follow_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step after the weights alone are restored is that of a trainer that was made with these weights."""

    def make(model: Any, tx: Any = SCHEDULE_FREE, **options: Any) -> PipelineTrainer:
        options = {"num_stages": 2, "num_microbatches": 2, "training": Training(ema_decay=0.9), **options}
        return PipelineTrainer(model, tx, squared_error, **options)

    first = program.MLP(2, rngs=nnx.Rngs(0), dropout=0)
    path = make(first, optax.sgd(0.1), training=None, logging=False).save(tmp_path / "first")
    weights = jax.tree.map(jnp.copy, nnx.state(first, nnx.Param))
    expected = make(first, logging=False)
    trainer = make(program.MLP(2, rngs=nnx.Rngs(5), dropout=0))
    for trained in (False, True):
        trainer.restore(path, only="params/*")
        for leaves in (trainer.state.ema, optax.tree.get(trainer.state.opt_state, "z")):
            tree_allclose(to_ordinary(leaves), weights, rtol=0, atol=0)
        says = "what is made from parameters follows the restored ones: ema/" in capsys.readouterr().out
        assert says == trained, "what does not exist yet is made from the restored weights"
        for each in (trainer, expected) if not trained else (trainer,):  # then the averages' weights differ
            each.train_step(OTHER[0])
        if not trained:
            tree_allclose(to_ordinary(trainer.state.params), to_ordinary(expected.state.params), rtol=1e-6)
    # Two leaves of one on disk, in memory of their own: the next step takes both.
    trainer.restore(path, rename={"ema": "params"}, only=["params/*", "ema/*"])
    for leaves in (trainer.state.ema, trainer.state.params):
        tree_allclose(to_ordinary(leaves), weights, rtol=0, atol=0)
    trainer.train_step(OTHER[1])


def test_what_was_computed_from_weights_is_made_anew(tmp_path: Path) -> None:
    def init(params: Any) -> Any:
        return {"first_norm": optax.tree.norm(params)}

    path = make_small(None, stages=1).save(tmp_path / "first")
    tx = optax.GradientTransformation(init, lambda grads, state, params=None: (grads, state))
    trainer = PipelineTrainer(
        program.MLP(2, rngs=nnx.Rngs(5)), tx, squared_error, num_stages=1, num_microbatches=2, logging=False
    )
    trainer.train_step(OTHER[0])
    trainer.restore(path, only="params/*")
    wanted = init(to_ordinary(trainer.state.params))["first_norm"]
    np.testing.assert_allclose(to_ordinary(trainer.state.opt_state)["first_norm"], wanted, rtol=1e-6)
