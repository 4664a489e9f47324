"""Whether all processes see one directory, with threads that play them; real processes are in tests/processes."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from jaxpp_flax.checkpoint import CheckpointSaveError, shared_directory
from jaxpp_flax.processes import ProcessGroup
from tests.engine.stores import MemoryStore, in_parallel


@pytest.fixture
def two_processes(monkeypatch):
    """What `check_shared` raises in each of two processes, or None, given the directory of each."""
    played, store = threading.local(), MemoryStore()
    monkeypatch.setattr(shared_directory, "process_group", lambda: played.group)
    monkeypatch.setattr(shared_directory, "_PATIENCE", 0.1)

    def one(index: int, directory: Path) -> CheckpointSaveError | None:
        played.group = ProcessGroup(store, index, 2)
        try:
            shared_directory.check_shared(directory)
        except CheckpointSaveError as error:
            return error
        return None

    return lambda *directories: in_parallel([lambda i=i, d=d: one(i, d) for i, d in enumerate(directories)])


def test_a_directory_that_all_see(two_processes, tmp_path: Path):
    assert two_processes(tmp_path / "run", tmp_path / "run") == [None, None]
    assert list((tmp_path / "run").iterdir()) == [], "the file that all were to see is gone"


def test_the_processes_that_do_not_see_it_are_named(two_processes, tmp_path: Path):
    errors = two_processes(tmp_path / "run", tmp_path / "other")
    for error in errors:
        assert str(error).startswith(f"process 1 cannot see in {tmp_path / 'other'} what process 0 has written")
    assert str(tmp_path / "run") in str(errors[0])
    assert list((tmp_path / "run").iterdir()) == []
