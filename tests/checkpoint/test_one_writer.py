"""Of two jobs that save to one directory the later one is refused by name, and nothing is overwritten."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from jaxpp_flax.checkpoint import CheckpointSaveError, DirectoryInUseError
from jaxpp_flax.checkpoint.checkpoint_store import CheckpointStore
from jaxpp_flax.checkpoint.format.orbax_io import TMP_MARK
from jaxpp_flax.checkpoint.reading import read_json
from jaxpp_flax.processes.group import process_group
from jaxpp_flax.trainers import Callback, Checkpoints, Logging
from tests.checkpoint import at_commit
from tests.checkpoint.program import batches, make_trainer
from tests.running import run_python

TREE = {"w": jnp.ones(2)}


class OtherJob:
    """A store as another process would have it: its own life, another writer."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store, self._patch = CheckpointStore(directory), monkeypatch

    def save(self, step: int) -> None:
        with self._patch.context() as patch:
            patch.setattr(process_group(), "life", "another")
            self.store.save(step, TREE, {}, wait=True)


def test_a_step_of_another_job_is_named_at_the_next_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store, other = CheckpointStore(tmp_path, every=1), OtherJob(tmp_path, monkeypatch)
    store.begin()
    store.save(1, TREE, {}, wait=True)
    other.store.begin()
    other.save(2)
    assert store.wants(2)  # not left out because there is one of this step
    assert not store.holds(2)
    for step in (2, 3):
        with pytest.raises(DirectoryInUseError, match=r"of step 2 has appeared .* by process id \d+ .* another"):
            store.save(step, TREE, {})
    assert store.steps() == (1, 2)
    other.save(3)  # the one that came first goes on
    assert store.steps() == (1, 2, 3)


def test_a_checkpoint_that_names_no_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = CheckpointStore(tmp_path)
    store.begin()
    monkeypatch.setattr("jaxpp_flax.checkpoint.one_writer.read_json", lambda *_: None)
    OtherJob(tmp_path, monkeypatch).save(1)
    with pytest.raises(DirectoryInUseError, match="written by a job that it does not name"):
        store.save(2, TREE, {})


def test_what_was_there_before_the_run_is_nobodys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    OtherJob(tmp_path, monkeypatch).save(1)
    store = CheckpointStore(tmp_path)
    store.save(2, TREE, {}, wait=True)
    assert "life another" in read_json(tmp_path / "1", "writer")
    assert process_group().life in read_json(tmp_path / "2", "writer")


def test_one_process_may_have_several_trainers(tmp_path: Path):
    first, second = CheckpointStore(tmp_path), CheckpointStore(tmp_path)
    for step, store in ((1, first), (2, second), (3, first)):
        store.save(step, TREE, {}, wait=True)
    assert first.steps() == (1, 2, 3)


def test_what_another_trainer_of_the_process_has_saved_is_known(tmp_path: Path):
    """Also in a directory that was empty at the beginning."""
    first, second = CheckpointStore(tmp_path, every=1), CheckpointStore(tmp_path)
    first.begin()
    second.save(1, TREE, {}, wait=True)
    assert first.wants(1)
    first.refuse_another_writer()
    assert first.holds(1)
    assert not first.wants(1)


def test_only_what_was_cut_off_before_the_run_is_removed(tmp_path: Path):
    def begin_save(step: int) -> Path:
        place = tmp_path / f"{step}{TMP_MARK}" / "state"
        place.mkdir(parents=True)
        return place.parent

    before = begin_save(1)
    store = CheckpointStore(tmp_path)
    store.begin()
    under_way = begin_save(7)  # another job's
    store.save(2, TREE, {}, wait=True)
    assert (before.exists(), under_way.exists()) == (False, True)


def test_a_run_that_goes_back_leaves_the_checkpoints_of_another_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trainer = make_trainer(Checkpoints(tmp_path, every=1), logging=Logging(every=1))
    steps = trainer.training_steps(batches())
    next(steps), next(steps)
    trainer.restore(1)
    OtherJob(tmp_path, monkeypatch).save(5)
    with pytest.raises(DirectoryInUseError, match="of step 5 has appeared"):
        next(steps)
    assert trainer.checkpoints.store.steps() == (1, 2, 5)


class Meanwhile(Callback):
    def __init__(self, other: OtherJob) -> None:
        super().__init__()
        self.other = other

    def on_step(self, trainer: Any, record: Any) -> None:
        if record.step == 2:
            self.other.save(2)


@pytest.mark.parametrize("every", [2, None])
def test_fit_ends_at_its_save(every: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also where the other job was first with the very step: `fit` does not take that for its own."""
    trainer = make_trainer(Checkpoints(tmp_path, every=every))
    with pytest.raises(DirectoryInUseError, match="of step 2 has appeared"):
        trainer.fit(batches(), steps=2, callbacks=[Meanwhile(OtherJob(tmp_path, monkeypatch))])


def test_where_nothing_can_be_written_checkpoints_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make_trainer(Checkpoints(tmp_path, every=1)).fit(batches(), steps=1)

    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("jaxpp_flax.checkpoint.checkpoint_store.try_to_write", refuse)
    reader = make_trainer(tmp_path)
    reader.fit(batches(), steps=2, resume=True)
    assert reader.step == 2
    with pytest.raises(CheckpointSaveError, match="no permission to write there"):
        make_trainer(Checkpoints(tmp_path, every=1)).fit(batches(), steps=3, resume=True)


@pytest.mark.slow
def test_the_same_program_a_second_time(tmp_path: Path):
    """A job that was queued again while its first life still runs: one of the two ends, and a third needs no wait."""
    program = [sys.executable, "-m", "tests.checkpoint.program", str(tmp_path / "run")]
    jobs: list[subprocess.Popen[str]] = []
    try:
        for name in ("first", "second"):
            with (tmp_path / name).open("w", encoding="utf-8") as output:
                jobs.append(subprocess.Popen([*program, "100000"], stdout=output, stderr=output, text=True))
            while "took step 2\n" not in (text := (tmp_path / "first").read_text(encoding="utf-8")):
                assert jobs[0].poll() is None, text
                time.sleep(0.05)
        end = time.monotonic() + 60.0
        while all(job.poll() is None for job in jobs) and time.monotonic() < end:
            time.sleep(0.05)
        refused, other = sorted(jobs, key=lambda job: job.poll() is None)
        text = (tmp_path / ("first" if refused is jobs[0] else "second")).read_text(encoding="utf-8")
        assert (refused.poll(), other.poll()) == (1, None), text
        named = re.search(rf"DirectoryInUseError: another job saves to .* by process id {other.pid} of host ", text)
        # The program keeps three checkpoints: the other job may remove the one from which this job resumes.
        assert named or re.search(r"CorruptCheckpointError: .*run/\d+", text), text
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    latest = max(CheckpointStore(tmp_path / "run").steps())
    run_python(*program[1:], str(latest + 2))
    assert max(CheckpointStore(tmp_path / "run").steps()) == latest + 2


def test_a_save_that_fails_after_a_loop_was_left_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    trainer = make_trainer(Checkpoints(tmp_path, every=1), logging=Logging(every=1))
    steps = trainer.training_steps(batches())
    next(steps)
    trainer.checkpoints.store.wait()

    def full() -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(at_commit, "hook", full)
    next(steps)
    steps.close()
    assert "the disk is full" in " ".join(capsys.readouterr().out.split())
