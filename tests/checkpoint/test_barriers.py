"""The waits of processes for each other in saves and restores: an error is blamed on the process that failed."""

from __future__ import annotations

import threading
from typing import Any

import jax
import pytest

from jaxpp_flax.checkpoint.barriers import background_barrier, shared_work
from jaxpp_flax.processes import ProcessFailedError, ProcessGroup
from jaxpp_flax.processes.failures import Failure
from tests.engine.stores import MemoryStore


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> ProcessGroup:
    group = ProcessGroup(MemoryStore(), 0, 2)
    for module in ("jaxpp_flax.checkpoint.barriers", "jaxpp_flax.processes.group"):
        monkeypatch.setattr(f"{module}.process_group", lambda: group)
    return group


@pytest.mark.parametrize("everywhere", [False, True])
def test_the_death_of_another_process_does_not_look_like_damage(group: ProcessGroup, everywhere: bool):
    threading.Timer(0.2, lambda: group.observe(Failure(1, "it was killed by SIGKILL"))).start()
    with (
        pytest.raises(ProcessFailedError, match="process 1: it was killed by SIGKILL"),
        shared_work("the restore of step 4", lambda error: OSError(f"damaged: {error}"), everywhere=everywhere),
    ):
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: Gloo all-gather failed: Connection closed by peer")
    assert group.failure == Failure(1, "it was killed by SIGKILL")


def test_an_error_of_this_process_is_described_and_reported(group: ProcessGroup):
    with (
        pytest.raises(OSError, match="damaged: RESOURCE_EXHAUSTED"),
        shared_work("the restore of step 4", lambda error: OSError(f"damaged: {error}")),
    ):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
    assert group.failure is not None
    assert group.failure.process == 0
    assert group.failure.message.startswith("the restore of step 4 failed in this process, and others wait for it")


def test_an_error_that_the_program_handles_is_none_of_a_save(group: ProcessGroup, monkeypatch: pytest.MonkeyPatch):
    """A program may save in an `except` block; Orbax then calls the barrier in the same thread."""
    met = list[Any]()
    monkeypatch.setattr(group, "barrier", lambda *args, **_: met.append(args))
    barrier = background_barrier(lambda: "the save of step 4", lambda error: OSError(f"cannot save: {error}"))
    assert barrier is not None
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        with shared_work("the save of step 4", lambda error: error):
            barrier(key="async_commit_complete.4", timeout_ms=1000)
            assert (len(met), group.failure) == (1, None)
            try:
                raise ValueError("full")
            except ValueError:
                barrier(key="async_commit_complete.4", timeout_ms=1000)
    assert len(met) == 1
    assert group.failure is not None
    assert "cannot save: full" in group.failure.message
