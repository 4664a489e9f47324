"""A loop that goes back by `trainer.restore`: what it left is set aside, and a later run resumes the new branch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.checkpoint import CheckpointNotFoundError, CheckpointSaveError
from jaxpp_flax.processes import process_group
from jaxpp_flax.trainers import Callback, Checkpoints, Logging
from tests.helpers import tree_allclose
from tests.trainers import models as m
from tests.trainers.sharing import sharing_steps

DATA = [m.make_batch(4, seed) for seed in range(20)]


class Stream:
    """An endless iterator with a state."""

    number = 0

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Any:
        self.number += 1
        return DATA[self.number - 1]

    def get_state(self) -> int:
        return self.number

    def set_state(self, state: int) -> None:
        self.number = state


@sharing_steps("checkpoints", "progress")
def make_trainer(progress: bool = False, **options: Any) -> PipelineTrainer:
    return PipelineTrainer(
        m.Layers(), optax.sgd(0.1, momentum=0.9),
        lambda model, batch: (model(batch["tokens"][:, :4] * 1.0) ** 2).mean(),
        num_stages=1, num_microbatches=2, logging=Logging(progress=progress), **options,
    )  # fmt: skip


def trainer_in(directory: Path, progress: bool = False, **options: Any) -> PipelineTrainer:
    return make_trainer(progress=progress, checkpoints=Checkpoints(directory, every=2, **options))


class GoesBack(Callback):
    """Restores a checkpoint once, after a step."""

    def __init__(self, at: int, to: int | Path):
        super().__init__()
        self.at, self.to = at, to

    def on_step(self, trainer: Any, record: Any) -> None:
        if record.step == self.at:
            self.at = -1
            trainer.restore(self.to)


def in_the_body(trainer: PipelineTrainer, data: Any, back: GoesBack, batches: int) -> None:
    for step, _ in trainer.training_steps(data, steps=batches):
        if step == back.at:
            back.at = -1
            trainer.restore(back.to)


def in_a_callback_of_fit(trainer: PipelineTrainer, data: Any, back: GoesBack, batches: int) -> None:
    trainer.fit(data, steps=batches, callbacks=[back])


def in_a_callback_of_a_loop(trainer: PipelineTrainer, data: Any, back: GoesBack, batches: int) -> None:
    for _ in trainer.training_steps(data, steps=batches, callbacks=[back]):
        pass


LOOPS = pytest.mark.parametrize("loop", [in_the_body, in_a_callback_of_fit, in_a_callback_of_a_loop])


def after(batches: list[Any]) -> Any:
    """The state after these batches."""
    trainer = make_trainer()
    for batch in batches:
        trainer.train_step(batch)
    return trainer.state


@LOOPS
@pytest.mark.parametrize("kind", [Stream, lambda: list(DATA), lambda: iter(DATA)], ids=["stream", "list", "iterator"])
def test_a_later_run_resumes_the_new_branch(loop: Any, kind: Any, tmp_path: Path):
    """Steps 1 to 7, back to 4, and steps 5 and 6 on the next batches."""
    loop(trainer_in(tmp_path, keep=None), kind(), GoesBack(7, 4), batches=9)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "4", "6", "6.abandoned"]
    resumed = trainer_in(tmp_path)
    resumed.fit(kind(), steps=7, resume=True)
    tree_allclose(resumed.state, after([*DATA[:4], *DATA[7:10]]), rtol=0, atol=0)


@LOOPS
def test_a_crash_before_the_next_save_resumes_the_new_branch(loop: Any, tmp_path: Path):
    class Crashes(Stream):
        def __next__(self) -> Any:
            if self.number == 8:
                raise OSError("the disk is gone")
            return super().__next__()

    with pytest.raises(OSError, match="the disk is gone"):
        loop(trainer_in(tmp_path, keep=None), Crashes(), GoesBack(7, 2), batches=20)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "4.abandoned", "6.abandoned"]
    resumed = trainer_in(tmp_path)
    resumed.fit(Stream(), steps=3, resume=True)
    tree_allclose(resumed.state, after(DATA[:3]), rtol=0, atol=0)  # the position is that of the checkpoint


def test_an_evaluation_is_that_of_its_step_though_a_callback_goes_back(tmp_path: Path):
    class GoesBackAfterAnEvaluation(GoesBack):
        def on_evaluate(self, trainer: Any, step: int, metrics: Any) -> None:
            if step == self.at:
                self.at = -1
                trainer.restore(self.to)

    class Notes(Callback):
        def on_evaluate(self, trainer: Any, step: int, metrics: Any) -> None:
            noted.append((step, trainer.step))

    noted: list[tuple[int, int]] = []
    callbacks = [GoesBackAfterAnEvaluation(4, 2), Notes()]
    callbacks[0].on_step = lambda *_: None  # type: ignore[method-assign]
    trainer_in(tmp_path).fit(DATA[:6], eval_data=DATA[:1], eval_every=2, callbacks=callbacks)
    assert noted == [(2, 2), (4, 2), (4, 4)]


def test_it_is_told_and_names_are_new(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    trainer = make_trainer(progress=True, checkpoints=Checkpoints(tmp_path, every=2))
    for step, _ in trainer.training_steps(Stream(), steps=8):
        if len(list(tmp_path.glob("*.abandoned*"))) < 2 and step == 4:
            trainer.restore(2)
    told = [line for line in capsys.readouterr().out.splitlines() if "has gone back" in line]
    assert told == [
        f"the run has gone back to step 2: its checkpoint of step 4 is now {tmp_path / name}"
        for name in ("4.abandoned", "4.abandoned_2")
    ]


def test_the_restored_checkpoint_of_another_directory(tmp_path: Path):
    """The checkpoint that is restored lies elsewhere, so that the next save may be of its own step."""
    other = make_trainer()
    other.train_step(DATA[0])
    other.train_step(DATA[1])
    other.save(tmp_path / "elsewhere")
    trainer = trainer_in(tmp_path / "run", keep=1)
    in_the_body(trainer, Stream(), GoesBack(5, tmp_path / "elsewhere"), batches=7)
    assert trainer.step == 4
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["4", "4.abandoned"]
    resumed = trainer_in(tmp_path / "run")
    resumed.fit(Stream(), steps=5, resume=True)
    tree_allclose(resumed.state, after([*DATA[:2], *DATA[5:8]]), rtol=0, atol=0)


@pytest.mark.parametrize("kind", [Stream, lambda: list(DATA), lambda: iter(DATA)], ids=["stream", "list", "iterator"])
def test_a_run_begins_at_an_earlier_step(kind: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Steps 1 to 7, then a run from step 4: the data goes back too, and what is left behind is set aside."""
    trainer_in(tmp_path, keep=None).fit(kind(), steps=7)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "4", "6", "7"]
    back = trainer_in(tmp_path, keep=None, progress=True)
    back.fit(kind(), steps=6, resume=4)
    told = capsys.readouterr().out
    assert "step 4; later checkpoints, up to step 7, are renamed to <step>.abandoned after the next step" in told
    assert "the run has gone back to step 4: its checkpoint of step 6 is now" in told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "4", "6", "6.abandoned", "7.abandoned"]
    tree_allclose(back.state, after(DATA[:6]), rtol=0, atol=0)
    resumed = trainer_in(tmp_path)
    resumed.fit(kind(), steps=8, resume=True)
    tree_allclose(resumed.state, after(DATA[:8]), rtol=0, atol=0)


def test_nothing_is_set_aside_before_the_first_step_of_the_new_branch(tmp_path: Path):
    trainer_in(tmp_path).fit(DATA, steps=6)

    def dies() -> Any:
        yield from DATA[:2]
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        trainer_in(tmp_path).fit(dies(), steps=6, resume=2)
    trainer_in(tmp_path).fit(DATA, steps=2, resume=2)  # nothing to do
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "4", "6"]
    with pytest.raises(CheckpointNotFoundError, match=r"has no checkpoint of step 3; it has 2, 4, 6"):
        trainer_in(tmp_path).fit(DATA, steps=6, resume=3)
    for wrong in (0, 2.0, "first"):
        with pytest.raises(ValueError, match='must be True, False, "latest_valid" or the step of a checkpoint'):
            trainer_in(tmp_path).fit(DATA, steps=6, resume=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("to", [2, 6])
def test_a_run_that_counts_from_the_beginning_ends_at_its_step_though_it_goes_back(to: int, tmp_path: Path):
    """On resume, `steps` is the step at the end; a restore within the run, back or forth, does not move the end."""
    trainer_in(tmp_path, keep=None).fit(Stream(), steps=6)
    run = trainer_in(tmp_path, keep=None)
    run.fit(Stream(), steps=9, resume=4, callbacks=[GoesBack(5, to)])
    assert run.step == 9


def test_a_run_that_goes_forth_past_its_end_ends(tmp_path: Path):
    trainer_in(tmp_path, keep=None).fit(Stream(), steps=6)
    run = trainer_in(tmp_path, keep=None)
    run.fit(Stream(), steps=4, resume=2, callbacks=[GoesBack(3, 6)])
    assert run.step == 6


def test_the_position_is_known_again_after_a_step_with_another_batch(tmp_path: Path):
    trainer = trainer_in(tmp_path)
    for step, _ in trainer.training_steps(Stream(), steps=3):
        if step == 1:
            trainer.train_step(DATA[9])
            assert trainer.data.position is None
    assert trainer.step == 4
    resumed = trainer_in(tmp_path)
    resumed.fit(Stream(), steps=5, resume=True)
    tree_allclose(resumed.state, after([DATA[0], DATA[9], *DATA[1:4]]), rtol=0, atol=0)


def test_who_has_gone_back_without_a_step_is_told_how_to_go_on(tmp_path: Path):
    trainer = trainer_in(tmp_path)
    trainer.fit(Stream(), steps=6)
    trainer.fit(Stream(), steps=4, resume=4)  # nothing to do
    with pytest.raises(CheckpointSaveError, match=r"go back to this step with fit\(\.\.\., resume=4\)"):
        trainer.fit(Stream(), steps=1)
    trainer.fit(Stream(), steps=5, resume=4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "4", "5", "6.abandoned"]
    new = trainer_in(tmp_path)
    with pytest.raises(CheckpointSaveError, match=r"this run begins at step 0\. .*resume=True\), or use another"):
        new.fit(Stream(), steps=1)


def test_outside_of_a_loop_later_checkpoints_are_not_touched(tmp_path: Path):
    trainer = trainer_in(tmp_path)
    trainer.fit(DATA, steps=6)
    trainer.restore(2)
    trainer.train_step(DATA[0])
    with pytest.raises(CheckpointSaveError, match="there are later ones, up to step 6"):
        trainer.save()
    with pytest.raises(CheckpointSaveError, match="holds checkpoints up to step 6, and this run begins at step 3"):
        trainer.fit(DATA)
    trainer.restore("latest")
    in_the_body(trainer, Stream(), GoesBack(7, 6), batches=3)  # to its own begin
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "4", "6", "8"]


def test_a_loop_that_goes_back_and_ends_leaves_all(tmp_path: Path):
    trainer = trainer_in(tmp_path, keep=None)
    in_the_body(trainer, Stream(), GoesBack(5, 2), batches=5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "4"]
    assert trainer.step == 2
    trainer.restore("latest")
    np.testing.assert_equal(trainer.step, 4)
    with pytest.raises(CheckpointSaveError, match="there is a checkpoint of it"):
        trainer.save()


def test_a_callbacks_state_is_that_of_its_step(tmp_path: Path):
    """The checkpoint is written in the background, while the callback goes on to change its state."""

    class Counts(Callback):
        def __init__(self) -> None:
            super().__init__()
            self.state = {"steps": 0}

        def get_state(self) -> Any:
            return self.state

        def set_state(self, state: Any) -> None:
            self.state = state or {"steps": 0}

        def on_step(self, trainer: Any, record: Any) -> None:
            self.state["steps"] += 1

    counts = Counts()
    trainer = trainer_in(tmp_path)
    trainer.fit(DATA, steps=3, callbacks=[counts])
    first = trainer.checkpoints.callbacks.to_json()
    counts.state["steps"] = 9
    assert first == {"Counts": {"steps": 3}}


def test_a_run_that_the_launcher_has_started_again_goes_back_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The second attempt goes back only if the first one died before it saved; else its steps would be lost."""
    trainer_in(tmp_path).fit(DATA, steps=6)
    group = process_group()
    monkeypatch.setattr(group, "run_id", "another run")
    monkeypatch.setattr(group, "attempt", 2)
    trainer = trainer_in(tmp_path)
    trainer.fit(DATA, steps=4, resume=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "4", "4.abandoned", "6.abandoned"]
    again = trainer_in(tmp_path)
    again.fit(DATA, steps=6, resume=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "4", "4.abandoned", "6", "6.abandoned"]
    tree_allclose(again.state, after(DATA[:6]), rtol=0, atol=0)
    again.fit(DATA, steps=4, resume=2)  # not the first one of the trainer
    assert (tmp_path / "4.abandoned_2").exists()
