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

from jaxpp_flax.trainers import KILLED_STATUS, PREEMPTED_STATUS
from jaxpp_flax.trainers.state.placement import to_ordinary
from tests.checkpoint.program import batches, make_trainer
from tests.helpers import steps_in, tree_allclose
from tests.processes.running import Processes, start_processes

pytestmark = pytest.mark.processes

LAST = 100_000  # more steps than any process lives for


@contextmanager
def started(directory: Path, *options: str) -> Iterator[Processes]:
    """The program, at the moment of its first step in this life; compiled as the tests' own process compiles."""
    flags = {"XLA_FLAGS": os.environ["XLA_FLAGS"]}
    arguments = (str(directory), str(LAST), *options)
    with start_processes(1, "tests.checkpoint.program", *arguments, environment=flags) as processes:
        processes.wait_for_output(0, "took step ")
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
    with started(tmp_path / "run", "hang", "5" if signals == 1 else "300") as processes:
        processes.wait_for_output(0, "hanging\n")
        begin = time.monotonic()
        (process,) = processes.processes
        for _ in range(signals):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.5 if signals == 1 else 2.5)  # signals within a second of one another, as they come, are one
            if signals == 1:
                assert process.poll() is None, "the deadline is the process's to use"
        assert process.wait(timeout=60) == KILLED_STATUS
        assert time.monotonic() - begin < 60
    assert max(steps_in(tmp_path / "run")) >= 1, "the checkpoint before is there"
