"""Which errors of a process are its own, and which come of a failure that is known."""

from __future__ import annotations

import errno
import io
import json
import os
import socket
import sys
import threading
from collections.abc import Callable

import jax
import pytest

from jaxpp_flax.launch.process import process_end
from jaxpp_flax.launch.process.process_end import ProcessEnd, listen_to_launcher
from jaxpp_flax.processes import ProcessFailedError, ProcessGroup
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


@pytest.mark.parametrize("has_read", [True, False])
def test_the_launcher_s_end_is_noticed(has_read: bool):
    launcher, own = socket.socketpair()
    ended = threading.Event()
    own_fd = own.detach()
    listen_to_launcher(own_fd, lambda _: None, ended.set)
    os.write(own_fd, b"connected\n")
    if has_read:
        assert launcher.recv(100) == b"connected\n"
    launcher.close()  # with unread bytes the system resets the connection, as it does when a launcher is killed
    assert ended.wait(10.0)


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


class Ended(BaseException):
    """In place of the end of this process."""


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> ProcessGroup:
    def end(status: int) -> None:
        raise Ended(status)

    monkeypatch.setattr(process_end, "end_at_once", end)
    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)  # put back at the end
    return ProcessGroup(MemoryStore(), 0, 2)


def error_of(function: Callable[[], object]) -> BaseException:
    try:
        function()
    except BaseException as error:
        return error
    raise AssertionError("no error")


def test_the_others_are_told_the_type_and_the_message_and_no_note(group: ProcessGroup):
    error = OSError("no space left on the device:\n/checkpoints/12")
    error.add_note("Mend the cause and call fit again.")
    with pytest.raises(Ended):
        ProcessEnd(group, 0.1, lambda: None).fail(error)
    second = ProcessGroup(group._store, 1, 2)
    second.observe_end(Failure(0, "it ended with exit status 1"))
    assert str(second.failure) == "process 0: OSError: no space left on the device:\n/checkpoints/12"


def test_the_place_is_the_line_of_the_program_that_an_error_has_ended(
    group: ProcessGroup, capsys: pytest.CaptureFixture[str]
):
    """The hook for uncaught errors runs when the program's frames are gone."""

    def train() -> None:
        "".join(json.loads("1 2"))

    group.observe(Failure(1, "it was killed by SIGKILL"))
    with pytest.raises(Ended):
        ProcessEnd(group, 0.1, lambda: None).fail(error_of(train))
    line = train.__code__.co_firstlineno + 1
    name = train.__code__.co_name
    assert f"Process 0 was at {name} ({__file__}:{line}), inside loads." in capsys.readouterr().err


class Full(io.StringIO):
    """Output onto a full disk."""

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def hook_that_fails(*_: object) -> None:
    raise BrokenPipeError


@pytest.mark.parametrize("error", [ProcessFailedError("process 1"), ValueError("mine"), KeyboardInterrupt()])
def test_a_process_whose_output_is_gone_ends_and_tells_the_others(
    group: ProcessGroup, monkeypatch: pytest.MonkeyPatch, error: BaseException
):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, Full())
    monkeypatch.setattr(sys, "excepthook", hook_that_fails)
    with pytest.raises(Ended):
        ProcessEnd(group, 0.1, lambda: None).fail(error)
    assert (group.failure is None) == isinstance(error, ProcessFailedError)
