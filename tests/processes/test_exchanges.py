"""What one process does for all: where it fails, the others raise the same kind of error."""

from __future__ import annotations

import threading

import pytest

from jaxpp_flax.checkpoint import CheckpointSaveError, DirectoryInUseError
from jaxpp_flax.processes import exchanges
from jaxpp_flax.processes.group import ProcessGroup
from tests.engine.stores import MemoryStore, in_parallel


@pytest.mark.parametrize(
    ("raised", "wanted"),
    [
        (DirectoryInUseError("another job"), DirectoryInUseError),
        (CheckpointSaveError("a full disk"), CheckpointSaveError),
        (ValueError("none of these"), CheckpointSaveError),
    ],
)
def test_the_others_raise_what_process_0_did(raised: Exception, wanted: type[Exception], monkeypatch):
    played, store = threading.local(), MemoryStore()
    monkeypatch.setattr(exchanges, "process_group", lambda: played.group)

    def fails() -> None:
        raise raised

    def one(index: int) -> Exception | None:
        played.group = ProcessGroup(store, index, 2)
        try:
            exchanges.done_by_one("a claim", fails, DirectoryInUseError, CheckpointSaveError)
        except Exception as error:
            return error
        return None

    first, second = in_parallel([lambda i=i: one(i) for i in range(2)])
    assert first is raised
    assert type(second) is wanted
    assert str(second) == f"in process 0: {raised}"
