"""The work of one process for all: if it fails there, the others raise the same kind of error."""

from __future__ import annotations

import pytest

from jaxpp_flax.checkpoint import CheckpointSaveError, DirectoryInUseError
from jaxpp_flax.processes import ProcessGroup
from jaxpp_flax.processes.comparison import do_in_process_0
from tests.engine.stores import MemoryStore, in_parallel


@pytest.mark.parametrize(
    ("raised", "wanted"),
    [
        (DirectoryInUseError("another job"), DirectoryInUseError),
        (CheckpointSaveError("a full disk"), CheckpointSaveError),
        (ValueError("none of these"), CheckpointSaveError),
    ],
)
def test_the_others_raise_what_process_0_did(raised: Exception, wanted: type[Exception]):
    store = MemoryStore()

    def fails() -> None:
        raise raised

    def one(index: int) -> Exception | None:
        try:
            do_in_process_0(ProcessGroup(store, index, 2), "a claim", fails, DirectoryInUseError, CheckpointSaveError)
        except Exception as error:
            return error
        return None

    first, second = in_parallel([lambda i=i: one(i) for i in range(2)])
    assert first is raised
    assert type(second) is wanted
    assert str(second) == f"in process 0: {raised}"
