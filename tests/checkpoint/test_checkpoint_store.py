"""A directory of checkpoints: what is kept, what failures leave behind, and when they are told."""

from __future__ import annotations

import datetime
import os
import resource
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from orbax.checkpoint import checkpoint_managers as policies

from jaxpp_flax.checkpoint import CheckpointNotFoundError, CheckpointSaveError, restore, save
from jaxpp_flax.checkpoint.checkpoint_store import CheckpointStore
from jaxpp_flax.checkpoint.format import locations
from jaxpp_flax.checkpoint.reading import read_json


def tree(step: int):
    return {"w": jnp.full(50_000, step, jnp.float32) * jnp.arange(50_000) ** 0.5}


def assert_holds(store: CheckpointStore, step: int) -> None:
    restored = restore(store.path(step), tree(0))
    np.testing.assert_array_equal(restored["w"], tree(step)["w"])


def check_for(store: CheckpointStore, seconds: float) -> None:
    """As the steps of a run do."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        store.check()
        time.sleep(0.01)


@contextmanager
def full_disk():
    """No file may grow beyond a few KiB: writes fail as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def no_permission():
    """As another user, who may not write here."""
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_intervals_and_keeping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = CheckpointStore(tmp_path / "run", every=3, keep=2)
    assert store.latest() is None
    with pytest.raises(CheckpointNotFoundError, match=r"no complete checkpoint yet\. Save one first .*`every=`"):
        store.path(store.latest())
    with monkeypatch.context() as patch:
        listed = []
        patch.setattr(CheckpointStore, "steps", lambda store: listed.append(store) or ())
        assert [step for step in range(1, 10) if store.wants(step)] == [3, 6, 9]
        assert len(listed) == 3, "a step without a save reads no directory"
    for step in (3, 6, 9):
        store.save(step, tree(step), {"about": {"n": step}})
    store.close()
    assert store.steps() == (6, 9)
    assert not store.wants(9)
    assert store.path(store.latest()) == tmp_path / "run" / "9"
    assert read_json(store.path(9), "about") == {"n": 9}
    assert read_json(store.path(9), "absent") is None
    assert_holds(store, 6)
    with pytest.raises(CheckpointNotFoundError, match=r"no checkpoint of step 3; it has 6, 9"):
        store.path(3)


def test_policies_of_orbax(tmp_path: Path):
    store = CheckpointStore(
        tmp_path / "run",
        every=policies.SpecificStepsPolicy([2, 5]),
        keep=policies.LatestDuration(datetime.timedelta(days=1)),
    )
    for step in range(1, 7):
        if store.wants(step):
            store.save(step, tree(step), {}, wait=True)
    assert store.steps() == (2, 5)
    store.close()


def test_what_is_on_no_file_system_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    texts = ("s3://bucket/run", "hf://name/run", "file://server/run")
    for path in (*texts, Path("s3://bucket/run"), epath.Path("s3://b/run")):
        for call in (CheckpointStore, lambda path: save(path, tree(1)), lambda path: restore(path, tree(1))):
            with pytest.raises(ValueError, match=r"Mount the bucket|neither a file system nor"):
                call(path)
    assert not list(tmp_path.iterdir())


def test_a_bucket_without_its_package_is_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(locations, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"gs://bucket/run needs the package 'gcsfs'.*jaxpp-flax\[buckets\]"):
        CheckpointStore("gs://bucket/run")


def test_a_url_of_a_file_is_a_path(tmp_path: Path):
    for given in (str(tmp_path / "a run"), f"file://{tmp_path}/a%20run", f"file:{tmp_path}/a%20run"):
        assert CheckpointStore(given).directory == tmp_path / "a run"


def test_what_cut_off_saves_left_is_ignored_and_removed(tmp_path: Path):
    store = CheckpointStore(tmp_path / "run")
    store.save(1, tree(1), {}, wait=True)
    store.close()
    remains = tmp_path / "run" / "2.orbax-checkpoint-tmp"
    (remains / "state").mkdir(parents=True)
    (remains / "state" / "half").write_bytes(b"x" * 100)
    again = CheckpointStore(tmp_path / "run")
    assert again.latest() == 1
    assert remains.exists(), "reading removes nothing: another process may be writing"
    again.save(2, tree(2), {}, wait=True)
    assert again.steps() == (1, 2)
    assert not remains.exists()
    assert_holds(again, 2)


def test_a_step_before_the_latest_is_refused(tmp_path: Path):
    """What `keep` holds would be the later ones of another run, or this one's in their place."""
    store = CheckpointStore(tmp_path / "run", keep=2)
    for step in (2, 4):
        store.save(step, tree(step), {}, wait=True)
    with pytest.raises(CheckpointSaveError, match=r"cannot save step 3 .*there are later ones, up to step 4"):
        store.save(3, tree(3), {})
    assert store.steps() == (2, 4)


def test_a_step_that_was_deleted_meanwhile_can_be_saved_again(tmp_path: Path):
    store = CheckpointStore(tmp_path / "run")
    store.save(1, tree(1), {}, wait=True)
    shutil.rmtree(tmp_path / "run" / "1")
    store.save(1, tree(2), {}, wait=True)
    assert store.steps() == (1,)


def test_a_step_that_was_deleted_meanwhile_is_not_counted_among_those_to_keep(tmp_path: Path):
    store = CheckpointStore(tmp_path / "run", keep=2)
    for step in (1, 2):
        store.save(step, tree(step), {}, wait=True)
    shutil.rmtree(tmp_path / "run" / "2")
    store.save(3, tree(3), {}, wait=True)
    assert store.steps() == (1, 3)


def test_damaged_metrics_of_an_old_step_end_no_save(tmp_path: Path):
    """Orbax reads the metrics of all steps when it opens the directory, and once a step was deleted."""
    store = CheckpointStore(tmp_path / "run", keep=3)
    for step in (1, 2):
        store.save(step, tree(step), {}, metrics={"loss": 1.0}, wait=True)
    file = tmp_path / "run" / "1" / "metrics" / "metrics"
    file.write_text(file.read_text()[:5])
    shutil.rmtree(tmp_path / "run" / "2")
    with pytest.warns(UserWarning, match=r"the metrics of the checkpoint of step 1 cannot be read.*run/1/metrics"):
        store.save(3, tree(3), {}, metrics={"loss": 1.0}, wait=True)
    other = CheckpointStore(tmp_path / "run", keep=3)
    with pytest.warns(UserWarning, match="it counts as one without metrics"):
        other.save(4, tree(4), {}, metrics={"loss": 1.0}, wait=True)
    assert other.steps() == (1, 3, 4)


def test_an_existing_step_is_left_alone(tmp_path: Path):
    store = CheckpointStore(tmp_path / "run")
    store.save(1, tree(1), {}, wait=True)
    with pytest.raises(CheckpointSaveError, match=r"step 1.*there is a checkpoint of it"):
        store.save(1, tree(5), {})
    assert_holds(store, 1)


def test_a_failure_in_the_background_is_told_by_the_next_check(tmp_path: Path):
    store = CheckpointStore(tmp_path / "run", keep=1)
    store.save(1, tree(1), {}, wait=True)
    with full_disk():
        store.save(2, tree(2), {})
        with pytest.raises(CheckpointSaveError, match=r"run/2 failed: the disk is full.*untouched"):
            check_for(store, seconds=30)
    store.check()  # told once
    assert store.steps() == (1,), "keep=1 has not cost the good one"
    assert_holds(store, 1)
    store.save(3, tree(3), {}, wait=True)
    assert store.steps() == (3,)
    assert not list((tmp_path / "run").glob("*tmp*")), "the failed save's remains are gone"
    assert_holds(store, 3)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
    if os.geteuid() != 0 or shutil.which("mount") is None or subprocess.run(command, check=False).returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_disk_that_is_full(small_disk: Path):
    """200 kB each, all kept: the disk fills up; room made by hand is used again."""
    store = CheckpointStore(small_disk / "run")

    def fill() -> None:
        for step in range(1, 10):
            store.save(step, tree(step), {}, wait=True)

    with pytest.raises(CheckpointSaveError, match="the disk is full"):
        fill()
    kept = store.steps()
    failed = len(kept) + 1
    assert failed > 1
    assert kept == tuple(range(1, failed))
    for step in kept:
        assert_holds(store, step)
    shutil.rmtree(store.path(kept[0]))
    store.save(failed, tree(failed), {}, wait=True)
    assert store.steps() == (*kept[1:], failed)
    assert not list((small_disk / "run").glob("*tmp*"))
    assert_holds(store, failed)
    with pytest.raises(CheckpointSaveError, match="the disk is full"):
        save(small_disk / "by hand", tree(1))
    assert store.steps() == (*kept[1:], failed)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_no_permission(tmp_path: Path):
    store = CheckpointStore(tmp_path / "run", keep=1)
    store.save(1, tree(1), {}, wait=True)
    with no_permission(), pytest.raises(CheckpointSaveError, match="no permission"):
        store.save(2, tree(2), {}, wait=True)
    assert_holds(store, 1)
    fresh = CheckpointStore(tmp_path / "other")
    with no_permission(), pytest.raises(CheckpointSaveError, match="no permission"):
        fresh.save(1, tree(1), {}, wait=True)


def test_a_directory_that_is_a_file(tmp_path: Path):
    (tmp_path / "run").write_text("")
    store = CheckpointStore(tmp_path / "run")
    with pytest.raises(CheckpointSaveError, match="run failed"):
        store.save(1, tree(1), {}, wait=True)
