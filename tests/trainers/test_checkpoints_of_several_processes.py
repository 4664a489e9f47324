"""A training that several processes share goes on with other numbers of them, and stops as one."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path

import jax
import pytest

from jaxpp_flax.trainers.callbacks.sigterm import PREEMPTED_STATUS
from jaxpp_flax.trainers.state.placement import to_ordinary
from tests.checkpoint.processes import make_trainer, run, start
from tests.checkpoint.program import batches
from tests.helpers import steps_in, tree_allclose

pytestmark = pytest.mark.processes


def test_four_processes_then_two_then_one(tmp_path: Path):
    directory = tmp_path / "run"
    run(4, [("train", str(directory), 4, 3)])
    assert steps_in(directory) == [2, 3]
    losses = {re.findall(r"loss (\S+) step 5", text)[0] for text in run(2, [("train", str(directory), 2, 5)])}
    assert len(losses) == 1, "every process has the loss"
    assert steps_in(directory) == [2, 3, 4, 5]

    resumed = make_trainer(str(directory), 1)
    resumed.fit(batches(), steps=6, resume=True)
    undisturbed = make_trainer(None, 4)
    undisturbed.fit(batches(), steps=6)
    # Other numbers of stages are compiled into other programs, which round otherwise.
    tree_allclose(to_ordinary(resumed.state.params), to_ordinary(undisturbed.state.params), rtol=1e-6, atol=1e-6)
    assert jax.tree.structure(resumed.state) == jax.tree.structure(undisturbed.state)


def test_stages_that_two_processes_share(tmp_path: Path):
    """Two stages on two processes each: what the optimizer keeps is made, saved and read by both."""
    directory = tmp_path / "run"
    run(4, [("train", str(directory), 2, 3, None, 2)])
    run(2, [("train", str(directory), 2, 4, None, 2)])
    resumed = make_trainer(str(directory), 2, data=2)
    resumed.fit(batches(), steps=5, resume=True)
    undisturbed = make_trainer(None, 2, data=2)
    undisturbed.fit(batches(), steps=5)
    # Sums over the data axis may go another way between processes.
    tree_allclose(to_ordinary(resumed.state.params), to_ordinary(undisturbed.state.params), rtol=1e-6, atol=1e-6)


def test_sigterm_to_one_process_stops_all_after_the_same_step(tmp_path: Path):
    directory = tmp_path / "run"
    first = [re.findall(r"status (\d+) step (\d+)", text) for text in run(2, [("train", str(directory), 2, 1000, 3)])]
    assert first[0] == first[1]
    [(status, step)] = first[0]
    assert int(status) == PREEMPTED_STATUS
    assert 3 < int(step) <= 8
    assert max(steps_in(directory)) == int(step)

    resumed = make_trainer(str(directory), 2)
    resumed.fit(batches(), steps=int(step) + 2, resume=True)
    undisturbed = make_trainer(None, 2)
    undisturbed.fit(batches(), steps=int(step) + 2)
    tree_allclose(to_ordinary(resumed.state.params), to_ordinary(undisturbed.state.params), rtol=1e-6, atol=1e-6)


def test_saving_and_restoring_by_hand(tmp_path: Path):
    run(2, [("back_and_forth", str(tmp_path))])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "start"]


def kill_and_resume(tmp_path: Path, kills: int, seed: int) -> None:
    """Kill one of two processes so many times, and compare with a run that nobody disturbed."""
    rng, directory = random.Random(seed), tmp_path / "run"
    reached, ends, cut_off = 0, list[float](), 0
    for _ in range(kills):
        with start(2, [("train", str(directory), 2, 100_000)]) as processes:
            processes.wait_for_output(0, "took step ")
            time.sleep(rng.uniform(0.0, 1.0))  # every second step is saved, and a step takes some milliseconds
            killed = rng.randrange(2)
            processes.processes[killed].kill()
            begin = time.monotonic()
            status = processes.processes[1 - killed].wait(timeout=60)
            ends.append(time.monotonic() - begin)
            assert status != 0
            assert f"process {killed}" in processes.output(1 - killed)
        cut_off += bool(list(directory.glob("*tmp*")))
        steps = [int(path.name) for path in directory.iterdir() if path.name.isdigit()]
        assert max(steps, default=0) >= reached, "a checkpoint that was complete is gone"
        reached = max(steps, default=0)
    print(f"{kills} kills up to step {reached}, {cut_off} in a save; the slowest survivor took {max(ends):.1f} s")
    run(2, [("train", str(directory), 2, reached + 2)])
    resumed = make_trainer(str(directory), 2)
    resumed.fit(batches(), steps=reached + 3, resume=True)
    undisturbed = make_trainer(None, 2)
    undisturbed.fit(batches(), steps=reached + 3)
    # Sums over many steps of roundings that two devices of one process may share otherwise than those of two.
    tree_allclose(to_ordinary(resumed.state.params), to_ordinary(undisturbed.state.params), rtol=1e-5, atol=1e-6)


def test_a_process_killed_while_saving_loses_nothing(tmp_path: Path):
    kill_and_resume(tmp_path, kills=2, seed=0)


@pytest.mark.soak
def test_twenty_processes_killed_while_saving_lose_nothing(tmp_path: Path):
    kill_and_resume(tmp_path, kills=20, seed=1)
