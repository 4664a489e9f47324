"""Training as several processes that are killed at random moments: all end, nothing is left, and no loss changes."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.launch.running import QUICK, REAL, Run, forks, started
from tests.running import wait_for

pytestmark = pytest.mark.processes

FOREVER = 100_000  # more steps than any run lives for
FAILURE_TIMEOUT = 30.0  # the default: within a share of it, survivors on a busy machine print where they were


def command(processes: int, directory: Path, steps: int, launcher: tuple[str, ...] = QUICK) -> list[str]:
    """The program of `training.py`, launched."""
    options = ["-n", str(processes), "--failure-timeout", str(FAILURE_TIMEOUT)]
    return [*launcher, *options, "-m", "tests.launch.training", str(directory), str(steps)]


def losses(run: Run) -> dict[int, set[str]]:
    """What the processes said of each step, to the last bit."""
    said: dict[int, set[str]] = {}
    for step, loss in re.findall(r"step (\d+) loss (\S+)$", run.stdout, re.MULTILINE):
        said.setdefault(int(step), set()).add(loss)
    return said


def children(run: Run) -> list[int]:
    """The processes that the launcher has started, whether they have said anything or not."""
    return forks(run.mark)[1:]


def kill_one(run: Run, processes: int, moment: str, rng: random.Random) -> int:
    """Kill a random process at a random time around `moment`; gives its index, or -1 if it has none yet."""
    if moment == "start":
        wait_for(lambda: len(children(run)) == processes, "the start of all processes")
        time.sleep(rng.uniform(0.0, 2.0))
    elif moment == "compile":
        run.wait_for_output("compiling", times=processes)
        time.sleep(rng.uniform(0.0, 1.5))
    else:  # each step is followed by a save, which takes about as long
        run.wait_for_output(" loss ", times=processes * rng.randrange(1, 5))
        time.sleep(rng.uniform(0.0, 0.3))
    victim = rng.choice(children(run))
    index = {pid: index for index, pid in run.process_ids().items()}.get(victim, -1)
    os.kill(victim, signal.SIGKILL)
    return index


def kill_and_restart(folder: Path, processes: int, moments: list[str], seed: int) -> Counter[str]:
    """Kill a process at each of these moments of one job's lives; compare with a run that nobody disturbed."""
    rng, directory = random.Random(seed), folder / "checkpoints"
    said: dict[int, set[str]] = {}
    seen: Counter[str] = Counter()
    longest = 0.0
    for number, moment in enumerate(moments):
        with started(folder, command(processes, directory, FOREVER, REAL if moment == "start" else QUICK)) as run:
            print(f"kill number {number}, {moment}")
            index = kill_one(run, processes, moment, rng)
            begin = time.monotonic()
            assert run.finish() == 128 + signal.SIGKILL, run.stderr
            longest = max(longest, time.monotonic() - begin)
            # Not a measurement but the promise; alone, it is a tenth of that.
            assert time.monotonic() - begin < FAILURE_TIMEOUT
            run.check_nothing_is_left()
            print(run.stderr)
            block = run.stderr.rpartition("\njaxpp_flax.launch: ")[2]
            named = "process \\d+" if index < 0 else f"process {index}"
            assert re.match(rf"{named} of {processes} failed first: it was killed by SIGKILL", block), run.stderr
            survivors = re.findall(r"^\[(\d+)\] jaxpp_flax: the run has ended", run.stderr, re.MULTILINE)
            seen[f"{moment}: kills"] += 1
            seen[f"{moment}: survivors' errors"] += len(set(survivors))
            seen[f"{moment}: survivors that name the victim"] += len(
                re.findall(rf"^\[\d+\] jaxpp_flax: the run has ended.* {named}:", run.stderr, re.MULTILINE)
            )
            seen[f"{moment}: survivors that say where they were"] += len(
                re.findall(r"^\[\d+\] Process \d+ was (?:waiting for|at) ", run.stderr, re.MULTILINE)
            )
            # Python may still be importing: then the launcher speaks for the process.
            still_starting = r"^jaxpp_flax\.launch: process \d+ of \d+ was still starting: it is ended by SIGTERM"
            seen[f"{moment}: survivors that were still starting"] += len(
                re.findall(still_starting, run.stderr, re.MULTILINE)
            )
            for step, values in losses(run).items():
                said.setdefault(step, set()).update(values)
    last = max(said, default=0) + 3
    with (
        started(folder, command(processes, directory, last)) as resumed,
        started(folder, command(processes, folder / "undisturbed", last)) as undisturbed,
    ):
        for run in (resumed, undisturbed):
            assert run.finish() == 0, run.stderr
        for step, values in losses(resumed).items():
            said.setdefault(step, set()).update(values)
        # The same programs on the same processes: equal to the last bit.
        assert said == losses(undisturbed)
    assert len(said) == last
    assert all(len(values) == 1 for values in said.values())
    seen["steps in all"] = last
    seen["longest end in ms"] = round(1000 * longest)
    return seen


def test_a_run_that_is_killed_goes_on_as_if_it_had_not_been(tmp_path: Path):
    moments = ["step or save", "start", "compile"]
    seen = kill_and_restart(tmp_path, 2, moments, seed=0)
    for moment in moments:
        still_starting = seen[f"{moment}: survivors that were still starting"] if moment == "start" else 0
        assert seen[f"{moment}: survivors' errors"] + still_starting == 1, seen
        assert seen[f"{moment}: survivors that name the victim"] + still_starting == 1, seen
    assert seen["step or save: survivors that say where they were"] == 1, seen


@pytest.mark.soak
@pytest.mark.parametrize("processes", [2, 3])
def test_many_kills(tmp_path: Path, processes: int):
    moments = ["start", "compile", "step or save", "step or save", "step or save"] * 3
    print(kill_and_restart(tmp_path, processes, moments, seed=processes))
