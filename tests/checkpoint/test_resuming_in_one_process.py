"""`fit(resume=True)` again and again in one process draws what an uninterrupted run draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.checkpoint import CheckpointSaveError
from jaxpp_flax.checkpoint.checkpoint_store import CheckpointStore
from jaxpp_flax.trainers import Checkpoints, DataPositionError, Logging
from jaxpp_flax.trainers.callbacks import OnMetrics
from tests.checkpoint import program
from tests.helpers import slow

BATCHES = list(program.batches(8))


def make_trainer(checkpoints: Path | Checkpoints | None, **options: Any) -> PipelineTrainer:
    return program.make_trainer(checkpoints, stages=1, **options)


def losses_of(trainer: PipelineTrainer, data: Any = BATCHES, **options: Any) -> dict[int, float]:
    losses: dict[int, float] = {}
    trainer.fit(data, callbacks=[OnMetrics(lambda step, metrics: losses.update({step: metrics["loss"]}))], **options)
    return losses


@pytest.fixture(scope="module")
def uninterrupted() -> dict[int, float]:
    return losses_of(make_trainer(None), steps=8)


@pytest.mark.parametrize("every", [2, slow(3), None], ids=["saved", "saved_at_the_end", "unsaved"])
def test_twice(every: int | None, tmp_path: Path, uninterrupted: dict[int, float]):
    trainer = make_trainer(Checkpoints(tmp_path / "run", every=every))
    losses = losses_of(trainer, steps=4, resume=True)
    losses |= losses_of(trainer, steps=8, resume=True)
    assert losses == uninterrupted


def test_epochs_count_from_the_beginning(tmp_path: Path):
    whole = losses_of(make_trainer(None), BATCHES[:4], epochs=2)
    trainer = make_trainer(Checkpoints(tmp_path / "run", every=2))
    losses = losses_of(trainer, BATCHES[:4], epochs=1, resume=True)
    losses |= losses_of(trainer, BATCHES[:4], epochs=2, resume=True)
    assert trainer.step == 8
    assert losses == whole


def test_a_save_under_way_is_the_latest(
    tmp_path: Path, uninterrupted: dict[int, float], monkeypatch: pytest.MonkeyPatch
):
    trainer = make_trainer(tmp_path / "run")
    list(trainer.training_steps(BATCHES, steps=4))
    waited: list[int | None] = []
    wait = CheckpointStore.wait

    def told(store: CheckpointStore) -> None:
        waited.append(store._writing)
        wait(store)

    monkeypatch.setattr(CheckpointStore, "wait", told)
    trainer.save(wait=False)
    other = losses_of(trainer, steps=8, resume=True)
    assert 4 in waited, "nothing was being written: the test proves nothing"
    assert other == {step: loss for step, loss in uninterrupted.items() if step > 4}


def test_what_was_not_saved_is_given_up(
    tmp_path: Path, uninterrupted: dict[int, float], capsys: pytest.CaptureFixture[str]
):
    trainer = make_trainer(tmp_path / "run", logging=Logging(every=1))
    list(trainer.training_steps(BATCHES, steps=2))
    trainer.save()
    list(trainer.training_steps(BATCHES[5:], steps=3))
    again = losses_of(trainer, steps=8, resume=True)
    assert again == {step: loss for step, loss in uninterrupted.items() if step > 2}
    assert "step 2; later steps, up to step 5, were not saved and are lost" in capsys.readouterr().out


@pytest.mark.parametrize("steps", [slow(0), 2])
def test_a_checkpoint_of_the_step_in_memory_is_taken(steps: int, tmp_path: Path, uninterrupted: dict[int, float]):
    first = make_trainer(tmp_path / "run")
    if steps:
        losses_of(first, steps=steps)
    first.save()
    second = make_trainer(tmp_path / "run", depth=2)
    for batch in BATCHES[6 : 6 + max(steps, 1)]:
        second.train_step(batch)
    second.held.step = steps  # as many steps, with other batches
    assert losses_of(second, steps=8, resume=True) == {s: loss for s, loss in uninterrupted.items() if s > steps}


def test_one_iterator_goes_on(tmp_path: Path, uninterrupted: dict[int, float]):
    """It stands where the run stands: nothing is skipped."""
    trainer, data = make_trainer(Checkpoints(tmp_path / "run", every=4)), iter(BATCHES)
    losses = losses_of(trainer, data, steps=4, resume=True)
    losses |= losses_of(trainer, data, steps=6, resume=True)
    losses |= losses_of(trainer, data, steps=8, resume=True)
    assert losses == uninterrupted


def test_an_iterator_that_is_past_the_checkpoint_is_refused(tmp_path: Path):
    trainer, data = make_trainer(tmp_path / "run"), iter(BATCHES)
    list(trainer.training_steps(data, steps=2))
    trainer.save()
    list(trainer.training_steps(data, steps=3))
    with pytest.raises(DataPositionError, match=r"after 2 batches.* but 5 are drawn from this list_iterator"):
        trainer.fit(data, steps=8, resume=True)


def test_a_loop_of_the_users_own_saves_as_fit_does(tmp_path: Path, uninterrupted: dict[int, float]):
    trainer = make_trainer(Checkpoints(tmp_path / "run", every=2))
    for step, _ in trainer.training_steps(BATCHES, steps=8):
        if step == 5:
            break
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["2", "4"]
    with pytest.raises(CheckpointSaveError, match="up to step 4, and this run begins at step 0"):
        next(make_trainer(Checkpoints(tmp_path / "run", every=2)).training_steps(BATCHES))
    assert losses_of(make_trainer(tmp_path / "run"), steps=8, resume=True) == {
        step: loss for step, loss in uninterrupted.items() if step > 4
    }
    other = make_trainer(Checkpoints(tmp_path / "other", every=2))
    list(other.training_steps(BATCHES, steps=3))
    assert sorted(path.name for path in (tmp_path / "other").iterdir()) == ["2", "3"]


def test_restoring_the_latest_waits_for_the_save_under_way(tmp_path: Path):
    trainer = make_trainer(tmp_path / "run")
    list(trainer.training_steps(BATCHES, steps=2))
    trainer.save(wait=False)
    trainer.train_step(BATCHES[5])
    trainer.restore()
    assert trainer.step == 2


def test_a_loop_of_the_users_own_goes_on_with_an_iterator_that_fit_has_used(
    tmp_path: Path, uninterrupted: dict[int, float]
):
    """Its place counts what `fit` has drawn."""
    trainer, data = make_trainer(Checkpoints(tmp_path / "run", every=1)), iter(BATCHES)
    losses = losses_of(trainer, data, steps=2)
    losses |= {step: float(metrics["loss"]) for step, metrics in trainer.training_steps(data, steps=1)}
    losses |= losses_of(make_trainer(tmp_path / "run"), steps=8, resume=True)
    assert losses == uninterrupted
