"""The output of several processes as one: it is taken whatever becomes of it, for a full pipe stops its process."""

from __future__ import annotations

import errno
import io
import os
import signal

import pytest
from rich.console import Console

from jaxpp_flax.launch.host.signals import handled_signals
from jaxpp_flax.launch.logs import Logs


def printed(logs: Logs, text: str) -> None:
    stream = io.StringIO(text)
    logs.follow(0, stream, errors=False)
    logs.drain(seconds=10.0)


def test_characters_that_the_output_cannot_show_are_escaped():
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    printed(Logs(1, Console(file=io.StringIO()), out), "loss ↓ 0.5\nnext\n")
    assert out.buffer.getvalue().decode() == "[0] loss \\u2193 0.5\n[0] next\n"


def test_output_that_a_full_disk_does_not_take_is_noted_and_a_reader_that_has_gone_is_not():
    reading, writing = os.pipe()
    os.close(reading)
    for descriptor, lost in ((os.open("/dev/full", os.O_WRONLY), errno.ENOSPC), (writing, None)):
        logs = Logs(1, Console(file=io.StringIO()), os.fdopen(descriptor, "w"))
        printed(logs, "loss 0.5\n")
        assert getattr(logs.lost, "errno", None) == lost
        with pytest.raises(OSError, match=r"No space left|Broken pipe"):
            logs.close()


def test_the_launcher_goes_on_where_its_own_messages_cannot_be_written():
    reading, writing = os.pipe()
    os.close(reading)
    for descriptor, lost in ((os.open("/dev/full", os.O_WRONLY), errno.ENOSPC), (writing, None)):
        errors = os.fdopen(descriptor, "w")
        logs = Logs(1, Console(file=errors), io.StringIO())
        logs.print_line(0, "ValueError: no", True)
        logs.lost = None
        logs.say("process 0 failed. That was at step 7; restart 1 of 3.")
        assert getattr(logs.lost, "errno", None) == lost
        logs.tell_error(0)
        with pytest.raises(OSError, match=r"No space left|Broken pipe"):
            errors.close()


def test_on_a_terminal_the_launcher_s_own_messages_are_bold():
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", no_color=False)
    Logs(1, console, io.StringIO()).say("[3] failed.")
    assert console.file.getvalue() == "\n\x1b[1mjaxpp_flax.launch: [3] failed.\x1b[0m\n"  # type: ignore[attr-defined]


def test_a_hangup_that_is_ignored_stays_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with handled_signals():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with handled_signals() as received:
            signal.raise_signal(signal.SIGHUP)
            assert received == [signal.SIGHUP]
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_error_of_a_thread_does_not_hide_that_of_the_process():
    logs = Logs(1, Console(file=io.StringIO()), io.StringIO())
    main = ["Traceback (most recent call last):", "SaveError: the disk is full"]
    thread = ["Exception in thread Thread-5:", "Traceback (most recent call last):", *["  File"] * 80, "ValueError: 27"]
    for line in ["compiling", *main, *thread]:
        logs.print_line(0, line, True)
    assert logs.last_error(0)[:2] == [f"[0] {line}" for line in main]
    only = Logs(1, Console(file=io.StringIO()), io.StringIO())
    for line in thread:
        only.print_line(0, line, True)
    assert only.last_error(0)[0] == "[0] Traceback (most recent call last):"
