"""Which errors of a process are its own, and which come of a failure that is known."""

from __future__ import annotations

import threading

import jax
import pytest

from jaxpp_flax.launch.process import process_end
from jaxpp_flax.launch.process.process_end import ProcessEnd
from jaxpp_flax.processes import ProcessGroup
from jaxpp_flax.processes.failures import Failure
from tests.engine.stores import MemoryStore


@pytest.mark.parametrize(
    ("failed", "error", "is_a_consequence"),
    [
        (1, jax.errors.JaxRuntimeError("INTERNAL: RECOVERABLE InjectFailure"), True),
        (1, ValueError("no such file"), True),
        # A save in the background has failed here, and what the main thread waits for has been given up.
        (0, jax.errors.JaxRuntimeError("INTERNAL: RECOVERABLE InjectFailure"), True),
        (0, ValueError("no such file"), False),
    ],
)
def test_errors_after_a_known_failure(failed: int, error: Exception, is_a_consequence: bool):
    group = ProcessGroup(MemoryStore(), 0, 2)
    group.observe(Failure(failed, "the save of step 6 failed"))
    assert ProcessEnd(group, 0.1, lambda: None).is_a_consequence(error) == is_a_consequence


def test_no_thread_prints_behind_the_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def fails() -> None:
        raise OSError("the same failure, in words of a library")

    def end(status: int) -> None:
        thread = threading.Thread(target=fails)
        thread.start()
        thread.join()
        raise SystemExit(status)

    monkeypatch.setattr(process_end, "end_at_once", end)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)  # put back at the end
    with pytest.raises(SystemExit):
        ProcessEnd(ProcessGroup(MemoryStore(), 0, 2), 0.1, lambda: None).fail(ValueError("the disk is full"))
    assert capsys.readouterr().err.strip().endswith("ValueError: the disk is full")
