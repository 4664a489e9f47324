"""Processes that die: by SIGKILL at any moment, by SIGTERM after a checkpoint."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpp_flax.processes import ProcessGroup
from jaxpp_flax.trainers import KILLED_STATUS, PREEMPTED_STATUS, Checkpoints
from jaxpp_flax.trainers.ending import preemption as module
from jaxpp_flax.trainers.ending.preemption import Preemption
from jaxpp_flax.trainers.ending.stopping import CommonStop, StopReason
from jaxpp_flax.trainers.step.compilation import to_ordinary
from tests.checkpoint.program import batches, make_trainer
from tests.engine.stores import MemoryStore
from tests.helpers import steps_in, tree_allclose
from tests.processes.running import Processes, start_processes
from tests.running import wait_for

pytestmark = pytest.mark.processes

LAST = 100_000  # more steps than any process lives for


@contextmanager
def started(directory: Path, *options: str) -> Iterator[Processes]:
    """The program, at the moment of its first step in this life; compiled as the tests' own process compiles."""
    flags = {"XLA_FLAGS": os.environ["XLA_FLAGS"]}
    arguments = (str(directory), str(LAST), *options)
    with start_processes(1, "tests.checkpoint.program", *arguments, environment=flags) as processes:
        processes.wait_for_output(0, "step ")
        yield processes


def kill_and_resume(tmp_path: Path, kills: int, seed: int) -> int:
    """Kill so many processes, ask one to end, and compare with a run that nobody disturbed; the saves cut off."""
    rng, directory = random.Random(seed), tmp_path / "run"
    reached = cut_off = 0
    for _ in range(kills):
        with started(directory) as processes:
            time.sleep(rng.uniform(0.0, 0.4))  # a save takes about a tenth of a second, and one follows another
            processes.processes[0].kill()
        cut_off += bool(list(directory.glob("*tmp*")))
        steps = steps_in(directory)
        assert not steps or max(steps) >= reached, "a checkpoint that was complete is gone"
        reached = max(steps, default=0)
    with started(directory) as processes:
        processes.processes[0].send_signal(signal.SIGTERM)
        assert processes.processes[0].wait(timeout=60) == PREEMPTED_STATUS
    assert not list(directory.glob("*tmp*")), "what the kills left has been removed"
    last = max(steps_in(directory))
    assert last > reached

    resumed = make_trainer(directory)
    resumed.fit(batches(), steps=last + 2, resume=True)
    undisturbed = make_trainer(None)
    undisturbed.fit(batches(), steps=last + 2)
    tree_allclose(to_ordinary(resumed.state), to_ordinary(undisturbed.state), rtol=0, atol=0)
    return cut_off


def test_kills_at_random_moments_lose_nothing(tmp_path: Path):
    kill_and_resume(tmp_path, kills=3, seed=0)


@pytest.mark.soak
def test_fifty_kills_at_random_moments_lose_nothing(tmp_path: Path):
    assert kill_and_resume(tmp_path, kills=50, seed=1) >= 10, "the kills must hit saves"


def test_sigterm_finishes_the_step_and_saves(tmp_path: Path):
    trainer = make_trainer(tmp_path / "run", stages=1)

    def until_the_third():
        for i, batch in enumerate(batches()):
            if i == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught:
        trainer.fit(until_the_third())
    assert caught.value.code == PREEMPTED_STATUS == 75
    # The step of the batch that had been drawn is taken: otherwise the batch would be lost.
    assert steps_in(tmp_path / "run") == [trainer.step] == [3]
    assert signal.getsignal(signal.SIGTERM) is before
    resumed = make_trainer(tmp_path / "run", stages=1)
    resumed.fit(batches(), steps=4, resume=True)
    undisturbed = make_trainer(None, stages=1)
    undisturbed.fit(batches(), steps=4)
    tree_allclose(to_ordinary(resumed.state), to_ordinary(undisturbed.state), rtol=0, atol=0)


@pytest.mark.parametrize("signals", [1, 2])
def test_devices_that_never_answer_do_not_keep_the_process(signals: int, tmp_path: Path):
    """By the deadline after one signal; at once after two, long before the deadline."""
    with started(tmp_path / "run", "hang", "3" if signals == 1 else "300") as processes:
        processes.wait_for_output(0, "hanging\n")
        begin = time.monotonic()
        (process,) = processes.processes
        for _ in range(signals):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.5 if signals == 1 else 1.2)  # signals within a second are one
            if signals == 1:
                assert process.poll() is None, "the deadline is the process's to use"
        assert process.wait(timeout=60) == KILLED_STATUS
        assert time.monotonic() - begin < 60
    assert max(steps_in(tmp_path / "run")) >= 1, "the checkpoint before is there"


def statuses_of(monkeypatch) -> list[int]:
    statuses: list[int] = []
    monkeypatch.setattr(module.os, "_exit", statuses.append)
    return statuses


def test_signals_of_a_scheduler_and_of_a_launcher_are_one_request(monkeypatch):
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
    with Preemption(0.2):
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.4)
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


def test_without_a_deadline_signals_are_left_alone():
    before = signal.getsignal(signal.SIGTERM)
    with Preemption(None):
        assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("deadline", [0, -1.0])
def test_a_bad_deadline_is_refused(deadline: float, tmp_path: Path):
    with pytest.raises(ValueError, match="preemption_deadline="):
        make_trainer(Checkpoints(tmp_path, preemption_deadline=deadline))


@given(seed=st.integers(0, 2**32 - 1), processes=st.integers(2, 4), asked=st.integers(1, 4))
@settings(max_examples=200)
def test_all_processes_stop_after_the_same_step(seed: int, processes: int, asked: int):
    """Processes up to three steps apart, some of them asked to stop, at moments of their own."""
    rng = random.Random(seed)
    store = MemoryStore()
    stops = [CommonStop(ProcessGroup(store, index, processes)) for index in range(processes)]
    signals = {rng.randrange(processes): rng.randrange(6) for _ in range(asked)}  # process -> step
    steps, ended = [0] * processes, [False] * processes
    while not all(ended):
        slowest = min(step for step, end in zip(steps, ended, strict=True) if not end)
        able = [i for i in range(processes) if not ended[i] and steps[i] < slowest + 3]
        index = rng.choice(able)
        steps[index] += 1
        requested = StopReason("preempted") if steps[index] >= signals.get(index, 1000) else None
        ended[index] = stops[index].after(steps[index], requested) is not None
        assert steps[index] < 100
    assert len(set(steps)) == 1
    assert steps[0] <= min(signals.values()) + 8
