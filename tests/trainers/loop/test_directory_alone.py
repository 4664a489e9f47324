"""`checkpoints="run"`, a directory alone: `fit` saves its last step, and says so."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from typing import Any

import optax
import pytest

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.checkpoint import CheckpointSaveError
from jaxpp_flax.trainers import Callback
from tests.helpers import tree_allclose
from tests.trainers import models as m
from tests.trainers.sharing import sharing_steps

DATA = [m.make_batch(4, seed) for seed in range(6)]


@sharing_steps("checkpoints", "logging")
def make_trainer(checkpoints: Path | None, *, logging: bool = False) -> PipelineTrainer:
    return PipelineTrainer(
        m.Layers(), optax.sgd(0.1, momentum=0.9),
        lambda model, batch: (model(batch["tokens"][:, :4] * 1.0) ** 2).mean(),
        num_stages=1, num_microbatches=2, checkpoints=checkpoints, logging=logging,
    )  # fmt: skip


def steps(directory: Path) -> list[int]:
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdigit())


def test_fit_saves_its_last_step_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    make_trainer(tmp_path, logging=True).fit(DATA, steps=3)
    assert steps(tmp_path) == [3]
    assert f"step 3 is saved in {tmp_path}: a directory alone saves the last step of fit" in capsys.readouterr().out
    resumed, whole = make_trainer(tmp_path), make_trainer(None)
    resumed.fit(DATA, steps=5, resume=True)
    whole.fit(DATA, steps=5)
    assert steps(tmp_path) == [3, 5]
    tree_allclose(resumed.state, whole.state, rtol=0, atol=0)
    resumed.fit(DATA, steps=1)
    assert steps(tmp_path) == [3, 5, 6]


class Ends(Callback):
    def __init__(self, how: str):
        super().__init__()
        self.how = how

    def on_step(self, trainer: Any, record: Any) -> None:
        if record.step == 2 and self.how == "stop":
            trainer.stop("enough")
        elif record.step == 2:
            signal.raise_signal(signal.SIGINT if self.how == "ctrl_c" else signal.SIGTERM)


@pytest.mark.parametrize(("how", "error"), [("stop", None), ("ctrl_c", KeyboardInterrupt), ("sigterm", SystemExit)])
def test_every_early_end_saves(how: str, error: Any, tmp_path: Path):
    trainer = make_trainer(tmp_path)
    with contextlib.nullcontext() if error is None else pytest.raises(error):
        trainer.fit(DATA, callbacks=[Ends(how)])
    assert steps(tmp_path) == [2]


def test_a_save_after_fit_finds_it_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Before, a directory alone needed this save."""
    trainer = make_trainer(tmp_path, logging=True)
    trainer.fit(DATA, steps=2)
    assert trainer.save() == tmp_path / "2" == trainer.save(2)
    assert "step 2 is saved already" in capsys.readouterr().out
    trainer.train_step(DATA[2])
    trainer.save()
    assert steps(tmp_path) == [2, 3]
    trainer.restore(2)
    with pytest.raises(CheckpointSaveError, match="there are later ones"):
        trainer.save()
    trainer.restore(3)
    with pytest.raises(CheckpointSaveError, match="there is a checkpoint of it"):
        trainer.save()


def test_a_loop_of_the_users_own_leaves_saves_to_the_user(tmp_path: Path):
    trainer = make_trainer(tmp_path)
    for step, _ in trainer.training_steps(DATA, steps=4):
        if step == 3:
            trainer.save()
    assert steps(tmp_path) == [3]


def test_an_error_saves_nothing(tmp_path: Path):
    def data() -> Any:
        yield from DATA[:2]
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        make_trainer(tmp_path).fit(data())
    assert steps(tmp_path) == []


def test_a_directory_that_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    make_trainer(tmp_path).fit(DATA, steps=1)

    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("jaxpp_flax.checkpoint.checkpoint_store.try_to_write", refuse)
    trainer = make_trainer(tmp_path)
    trainer.fit(DATA, steps=2, resume=True)
    assert trainer.step == 2
    assert "The last step of this run is not saved" in capsys.readouterr().err
