"""One job at a time writes to a directory of checkpoints: a second is refused by name, a dead one's place is taken."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxpp_flax.checkpoint import CheckpointSaveError, DirectoryInUseError, owner
from jaxpp_flax.checkpoint.checkpoint_store import CheckpointStore
from jaxpp_flax.checkpoint.owner import FILE_NAME, Owner, Ownership
from jaxpp_flax.trainers import Callback, Checkpoints, Logging
from tests.checkpoint.program import batches, make_trainer
from tests.running import run_python

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def other():
    """Another process of this machine."""
    process = subprocess.Popen(SLEEP)
    yield process
    process.kill()
    process.wait()


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(owner, "_RENEW_SECONDS", 0.02)
    monkeypatch.setattr(owner, "STALE_SECONDS", 0.5)


def write(directory: Path, of: Owner) -> Path:
    path = directory / FILE_NAME
    new = path.with_name("new")
    new.write_text(json.dumps(asdict(of)))
    return new.replace(path)


def on_another_host(process: int = 7) -> Owner:
    return replace(Owner.of(process), host="elsewhere", started="12")


def test_the_file_is_there_while_it_is_owned(tmp_path):
    ownership = Ownership(tmp_path / "new")
    ownership.take(print)
    path = tmp_path / "new" / FILE_NAME
    assert json.loads(path.read_text())["process"] == os.getpid()
    first = json.loads(path.read_text())["renewed"]
    time.sleep(0.05)
    ownership.renew()
    assert json.loads(path.read_text())["renewed"] > first
    ownership.check()
    ownership.release()
    assert not path.exists()
    ownership.release()
    ownership.renew()


def test_a_running_process_is_named(tmp_path, other):
    of = Owner.of(other.pid)
    path = write(tmp_path, of)
    with pytest.raises(DirectoryInUseError) as error:
        Ownership(tmp_path).take(print)
    assert f"process {other.pid} on {of.host}, since {of.since}" in str(error.value)
    assert f"remove {path}" in str(error.value)


@pytest.mark.parametrize("how", ["killed", "its number taken by another one"])
def test_the_place_of_a_dead_process_is_taken_at_once(tmp_path, other, how, monkeypatch):
    monkeypatch.setattr(owner, "STALE_SECONDS", 1e9)
    of = Owner.of(other.pid)
    write(tmp_path, of if how == "killed" else replace(of, started="1"))
    if how == "killed":
        other.kill()
        time.sleep(0.05)  # not waited for: what is left of it has a number still
    told = []
    ownership = Ownership(tmp_path)
    ownership.take(told.append)
    assert re.fullmatch(rf".* was left by process {other.pid} on .*, which has ended: this job takes it", told[-1])
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]
    ownership.release()


def test_a_job_whose_file_was_taken_saves_nothing_more(tmp_path):
    ownership = Ownership(tmp_path)
    ownership.take(print)
    write(tmp_path, on_another_host())
    with pytest.raises(DirectoryInUseError, match=r"belongs to another job now \(process 7 on elsewhere, since "):
        ownership.check()
    ownership.release()
    assert (tmp_path / FILE_NAME).exists()  # the other job's


def test_another_host_is_alive_while_it_renews_its_file(tmp_path):
    write(tmp_path, on_another_host())
    ended = threading.Event()

    def renew():
        while not ended.wait(0.02):
            write(tmp_path, on_another_host())

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with pytest.raises(DirectoryInUseError, match=r"process 7 on elsewhere"):
            Ownership(tmp_path).take(print)
    finally:
        ended.set()
        thread.join()
    told = []
    ownership = Ownership(tmp_path)
    ownership.take(told.append)
    assert "waiting up to" in told[0]
    assert "which has ended: this job takes it" in told[1]
    ownership.release()


def test_an_old_file_of_another_host_is_taken_without_a_wait(tmp_path):
    write(tmp_path, replace(on_another_host(), renewed=0.0))
    told = []
    ownership = Ownership(tmp_path)
    ownership.take(told.append)
    [line] = told
    assert "which has ended: this job takes it" in line
    ownership.release()


def test_an_owner_that_ends_while_it_is_watched_gives_the_place_back(tmp_path):
    path = write(tmp_path, on_another_host())
    threading.Timer(0.1, path.unlink).start()
    ownership, told = Ownership(tmp_path), []
    ownership.take(told.append)
    assert "waiting up to" in told[0]
    ownership.check()  # it is this job's now
    ownership.release()


def test_a_file_that_cannot_be_read_is_a_dead_owners(tmp_path):
    (tmp_path / FILE_NAME).write_text("torn")
    told = []
    ownership = Ownership(tmp_path)
    ownership.take(told.append)
    assert "a job that cannot be read" in told[-1]
    ownership.release()


def test_one_process_may_have_several_trainers(tmp_path):
    first, second = Ownership(tmp_path), Ownership(tmp_path)
    first.take(print)
    second.take(print)
    first.release()
    second.check()  # writes the file again
    assert (tmp_path / FILE_NAME).exists()
    second.release()
    assert not (tmp_path / FILE_NAME).exists()


def test_a_store_owns_its_directory_while_it_writes(tmp_path, other):
    store = CheckpointStore(tmp_path)
    store.save(1, {"w": jnp.ones(2)}, {})
    store.wait()
    assert not (tmp_path / FILE_NAME).exists()
    write(tmp_path, Owner.of(other.pid))
    with pytest.raises(DirectoryInUseError, match=f"process {other.pid}"):
        store.save(2, {"w": jnp.ones(2)}, {})
    (tmp_path / FILE_NAME).unlink()
    store.save(2, {"w": jnp.ones(2)}, {}, wait=True)
    with store.owned():
        store.save(3, {"w": jnp.ones(2)}, {}, wait=True)
        assert (tmp_path / FILE_NAME).exists()
        write(tmp_path, on_another_host())
        with pytest.raises(DirectoryInUseError, match="another job now"):
            store.save(4, {"w": jnp.ones(2)}, {})
    assert store.steps() == (1, 2, 3)


class Seen(Callback):
    def __init__(self, path):
        super().__init__()
        self.path, self.seen = path, []

    def on_step(self, trainer, record):
        self.seen.append(self.path.exists())


@pytest.mark.parametrize("every", [None, 1])
def test_fit_owns_the_directory_and_a_second_job_is_refused_before_a_step(tmp_path, other, every):
    path, trainer = tmp_path / FILE_NAME, make_trainer(Checkpoints(tmp_path, every=every))
    seen = Seen(path)
    trainer.fit(batches(), steps=2, callbacks=[seen])
    assert seen.seen == [True, True]
    assert not path.exists()
    if every is None:
        trainer.save()
    write(tmp_path, Owner.of(other.pid))
    second = make_trainer(Checkpoints(tmp_path, every=every))
    for resume in (True, False):
        with pytest.raises(DirectoryInUseError, match=f"process {other.pid}"):
            second.fit(batches(), steps=4, resume=resume)
    if every is not None:
        with pytest.raises(DirectoryInUseError):
            next(second.training_steps(batches()))
    assert second.step == 0
    second.restore()  # reading is for everyone
    assert second.step == 2


def test_where_nothing_can_be_written_checkpoints_are_read(tmp_path, monkeypatch):
    make_trainer(Checkpoints(tmp_path, every=1)).fit(batches(), steps=1)

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Ownership, "take", refuse)
    reader = make_trainer(tmp_path)
    reader.fit(batches(), steps=2, resume=True)
    assert reader.step == 2
    with pytest.raises(CheckpointSaveError, match="no permission to write there"):
        make_trainer(Checkpoints(tmp_path, every=1)).fit(batches(), steps=3, resume=True)


@pytest.mark.slow
def test_the_same_program_a_second_time(tmp_path):
    """A job that was queued again while its first life still runs."""
    program = ["-m", "tests.checkpoint.program", str(tmp_path / "run")]
    with subprocess.Popen([sys.executable, *program, "2000"], stdout=subprocess.PIPE, text=True) as first:
        try:
            assert first.stdout is not None
            next(line for line in first.stdout if line.startswith("step 2"))
            second = run_python(*program, "5", status=1)
            assert f"process {first.pid} on " in second.stderr
            assert first.poll() is None
        finally:
            first.kill()
    third = run_python(*program, "5")
    assert f"was left by process {first.pid} on " in third.stderr


def test_of_two_jobs_that_find_a_dead_owner_one_takes_its_place(tmp_path, monkeypatch):
    write(tmp_path, replace(on_another_host(), renewed=0.0))
    found, told = Ownership(tmp_path)._read(), []
    write(tmp_path, replace(on_another_host(8), started="13"))
    late = Ownership(tmp_path)
    assert not late._write(Owner.of(os.getpid()), found)
    with monkeypatch.context() as patch:
        patch.setattr(Owner, "lives", lambda self: True)
        with pytest.raises(DirectoryInUseError, match="process 8"):
            late.take(told.append)
    assert not told


def test_a_full_disk_is_an_error_of_the_system(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        Ownership(tmp_path / "file" / "run").take(print)


def test_a_save_under_way_keeps_the_directory_beyond_a_loop(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(1, {"w": jnp.ones(2)}, {})
    with store.owned():
        pass
    assert (tmp_path / FILE_NAME).exists()
    store.wait()
    assert not (tmp_path / FILE_NAME).exists()


def test_a_save_that_fails_after_a_loop_was_left_is_told(tmp_path, monkeypatch, capsys):
    trainer = make_trainer(Checkpoints(tmp_path, every=1), logging=Logging(every=1))
    steps = trainer.training_steps(batches())
    next(steps)
    trainer._parts.checkpoints.store.wait()

    def full(directory):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jaxpp_flax.checkpoint.checkpoint_store.write_sizes", full)
    next(steps)
    steps.close()
    assert "the disk is full" in " ".join(capsys.readouterr().out.split())
