"""Requests to end, sent as signals: counted once, kept to a deadline, and taken from nobody else."""

from __future__ import annotations

import os
import select
import signal
import time
from pathlib import Path

import pytest

from jaxpp_flax.trainers import KILLED_STATUS, Checkpoints
from jaxpp_flax.trainers.callbacks import sigterm as module
from jaxpp_flax.trainers.callbacks.sigterm import Preemption
from tests.checkpoint.program import make_trainer
from tests.running import wait_for

pytestmark = pytest.mark.processes


def statuses_of(monkeypatch) -> list[int]:
    statuses: list[int] = []
    monkeypatch.setattr(module.os, "_exit", statuses.append)
    return statuses


def test_signals_of_a_scheduler_and_of_a_launcher_are_one_request(monkeypatch):
    monkeypatch.setattr(module, "_ONE_REQUEST", 30.0)  # a busy machine may come back to the test later than after 1 s
    statuses = statuses_of(monkeypatch)
    with Preemption(60.0) as preemption:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)
        assert preemption.requested
    assert statuses == []


def test_a_second_signal_ends_at_once(monkeypatch):
    monkeypatch.setattr(module, "_ONE_REQUEST", 0.05)
    statuses = statuses_of(monkeypatch)
    with Preemption(60.0) as preemption:
        os.kill(os.getpid(), signal.SIGTERM)
        assert preemption.requested
        time.sleep(0.1)
        assert statuses == []
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(lambda: statuses)
        assert statuses == [KILLED_STATUS] == [143]


def test_the_deadline_ends_a_save_that_hangs(monkeypatch):
    statuses = statuses_of(monkeypatch)
    with Preemption(0.05):
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(lambda: statuses)
        assert statuses == [KILLED_STATUS]
    with Preemption(1.0):  # on a busy machine, too, it is left before
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1.2)
    assert statuses == [KILLED_STATUS], "a save in time is let be"


def test_other_signals_go_where_they_went():
    """An event loop's wakeup file descriptor still hears of them, and has its place back afterwards."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    handler = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        with Preemption(60.0) as preemption:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert os.read(read, 1) == bytes([signal.SIGUSR1])
        assert not preemption.requested
        assert signal.set_wakeup_fd(write, warn_on_full_buffer=False) == write
    finally:
        signal.signal(signal.SIGUSR1, handler)
        signal.set_wakeup_fd(before)
        os.close(read), os.close(write)


def test_an_event_loop_that_reads_nothing_is_no_hindrance(monkeypatch):
    """No loop reads while `fit` has the main thread: a profiler's signals fill its pipe."""
    statuses = statuses_of(monkeypatch)
    read, write = os.pipe()
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    try:
        while select.select([], [write], [], 0)[1]:
            os.write(write, bytes(4096))
        with Preemption(0.05):
            os.kill(os.getpid(), signal.SIGTERM)
            wait_for(lambda: statuses)
        assert statuses == [KILLED_STATUS]
    finally:
        signal.set_wakeup_fd(before)
        os.close(read), os.close(write)


def test_without_a_deadline_signals_are_left_alone():
    before = signal.getsignal(signal.SIGTERM)
    with Preemption(None):
        assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("deadline", [0, -1.0])
def test_a_bad_deadline_is_refused(deadline: float, tmp_path: Path):
    with pytest.raises(ValueError, match="preemption_deadline="):
        make_trainer(Checkpoints(tmp_path, preemption_deadline=deadline))
