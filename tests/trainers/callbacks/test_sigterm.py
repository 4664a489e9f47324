"""Requests to end, sent as signals: counted once, kept to a deadline, and taken from nobody else."""

from __future__ import annotations

import os
import re
import select
import signal
import threading
import time
from pathlib import Path

import pytest

from jaxpp_flax.trainers import KILLED_STATUS, PREEMPTED_STATUS, Checkpoints
from jaxpp_flax.trainers.callbacks import sigterm as module
from jaxpp_flax.trainers.callbacks.sigterm import Preemption
from tests.checkpoint.program import make_trainer
from tests.running import run_python, wait_for

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


@pytest.mark.parametrize("signals", [1, 2])
def test_an_end_without_a_save_says_why(signals: int, monkeypatch, capfd: pytest.CaptureFixture[str]):
    monkeypatch.setattr(module, "_ONE_REQUEST", 0.05)
    statuses = statuses_of(monkeypatch)
    with Preemption(0.5 if signals == 1 else 60.0, lambda: "The newest complete checkpoint is that of step 4 in run."):
        for _ in range(signals):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)
        wait_for(lambda: statuses)
    why = "complete within 0.5 s (Checkpoints(preemption_deadline=))" if signals == 1 else "it came a second time"
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("jaxpp_flax: SIGTERM: ")
    assert why in line
    assert line.endswith("; exiting with status 143. The newest complete checkpoint is that of step 4 in run.")


def test_a_disk_that_hangs_does_not_keep_the_process(monkeypatch, capfd: pytest.CaptureFixture[str]):
    monkeypatch.setattr(module, "_TO_TELL", 0.1)
    statuses, asked = statuses_of(monkeypatch), threading.Event()
    with Preemption(0.05, lambda: str(asked.wait(60))):
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(lambda: statuses)
    asked.set()
    assert "exiting with status 143" in capfd.readouterr().err


@pytest.mark.parametrize("order", ["last first", "first first"])
def test_two_loops_in_turn_both_note_the_signal(order: str, monkeypatch):
    """As `zip` of two iterators does, which end in any order."""
    monkeypatch.setattr(module, "_ONE_REQUEST", 60.0)  # the second signal here asks for no end
    before = signal.getsignal(signal.SIGTERM)
    got: list[int] = []
    own = signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
    others = {*threading.enumerate()}
    try:
        first, second = Preemption(60.0), Preemption(60.0)
        first.__enter__(), second.__enter__()
        watchers = {*threading.enumerate()} - others
        os.kill(os.getpid(), signal.SIGTERM)
        assert first.requested
        assert second.requested
        ends, stays = (second, first) if order == "last first" else (first, second)
        ends.__exit__()
        stays.requested = False
        os.kill(os.getpid(), signal.SIGTERM)
        assert stays.requested, "the other one goes on to note signals"
        assert got == []
        stays.__exit__()
        assert len(watchers) == 2
        assert not any(watcher.is_alive() for watcher in watchers)
        os.kill(os.getpid(), signal.SIGTERM)
        assert got == [signal.SIGTERM], "then the signal goes where it went before"
    finally:
        signal.signal(signal.SIGTERM, own)
        assert own == before


def test_a_loop_that_another_thread_ends_passes_signals_on():
    got: list[int] = []
    own = signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
    try:
        preemption = Preemption(60.0)
        preemption.__enter__()
        thread = threading.Thread(target=preemption.__exit__)
        thread.start()
        thread.join()
        os.kill(os.getpid(), signal.SIGTERM)
        assert got == [signal.SIGTERM]
        assert not preemption.requested
    finally:
        signal.signal(signal.SIGTERM, own)
        signal.set_wakeup_fd(-1)


@pytest.mark.parametrize("deadline", [60.0, 0.01])
def test_a_loop_that_has_ended_ends_no_process(deadline: float, monkeypatch):
    """Its handler is not the one in place, so that it cannot take itself out; its thread passes signals on alone."""
    monkeypatch.setattr(module, "_ONE_REQUEST", 0.0)
    statuses, got = statuses_of(monkeypatch), list[int]()
    read, write = os.pipe()
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    preemption = Preemption(deadline)
    preemption.__enter__()
    own = signal.signal(signal.SIGTERM, lambda number, _: got.append(number))  # the program's own
    try:
        preemption.__exit__()
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
            assert select.select([read], [], [], 10.0)[0]
            assert os.read(read, 64) == bytes([signal.SIGTERM]), "an event loop of the program still hears of it"
        assert got == [signal.SIGTERM] * 3
        assert statuses == []
    finally:
        signal.signal(signal.SIGTERM, own)
        preemption.__exit__()  # now it can
        assert signal.set_wakeup_fd(before) == write
        os.close(read), os.close(write)


def test_a_slow_save_has_the_time_that_the_job_script_gives(tmp_path: Path):
    """The save takes longer than the deadline: nothing is silent, and the checkpoint before is named."""
    begin = "from tests.checkpoint.slow_save import main; "
    run = run_python("-c", f"{begin}main({str(tmp_path)!r}, seconds=30.0, deadline=1.0)", status=KILLED_STATUS)
    assert "were not complete within 1 s (Checkpoints(preemption_deadline=)); exiting with status 143" in run.stderr
    assert f"The newest complete checkpoint is that of step 2 in {tmp_path}." in run.stderr
    run = run_python(
        "-c", f"{begin}main({str(tmp_path / 'other')!r}, seconds=2.0, deadline=None)", status=PREEMPTED_STATUS
    )
    assert "SIGTERM: saved step 3, exiting with status 75" in run.stdout
    script = Path("docs/guides/jobs/slurm.sh").read_text()
    (given,) = re.findall(r"--signal=TERM@(\d+)", script)
    assert int(given) > Checkpoints("run").preemption_deadline  # type: ignore[operator]


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
