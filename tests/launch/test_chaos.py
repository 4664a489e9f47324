"""Random faults at random moments of 2 to 4 processes: every run ends in time and says why, and no work is lost.

A seed is a trial: a job that lives once or twice until something happens to it, and then goes on to its end. Every loss
of every life, and the state at the end, are bit for bit those of a run that nobody disturbed. To repeat one:
`pytest -m soak "tests/launch/test_chaos.py::test_chaos[17]"`; all of them, two at a time: `pytest -m soak -n 2 --dist
load tests/launch/test_chaos.py`. A trial takes about 13 seconds; two at a time on two cores, all take 80 minutes.

`test_restarts` does the same to one run under `--max-restarts`, once to three times, half of them with copies of the
state in memory: it ends well by itself.
"""

from __future__ import annotations

import functools
import json
import os
import random
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from jaxpp_flax.trainers import PREEMPTED_STATUS
from tests.helpers import steps_in
from tests.launch.running import QUICK, Run, by_start, started
from tests.running import wait_for
from tests.trainers.script_damage import needed_files

pytestmark = pytest.mark.processes

FAILURE_TIMEOUT = 10.0
# The promise, and twice as much again as a busy machine may keep the launcher and the processes from running.
DEADLINE = 3 * FAILURE_TIMEOUT
STEPS = 100  # more than are done before anything happens
TRIALS = 500

FEW_STEPS = 60  # of a run that is started again
RESTARTED = 500

TO_PROCESSES = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "terminate": signal.SIGTERM, "interrupt": signal.SIGINT}
TO_LAUNCHER = {"terminate all": signal.SIGTERM, "interrupt all": signal.SIGINT}
TO_SERVICE = {"kill the service": signal.SIGKILL}
INSIDE = ("data", "callback", "loss", "full disk", "read-only directory")
DAMAGE = ("truncated file", "missing file", "empty directory")
AGREED = ("terminate", "terminate all", "interrupt", "interrupt all")  # all processes end after the same step, saved
# What a run is started again after: in any life; and in the first one, as an error needs a new step before it.
CRASHES = ("kill", "kill two", "stop", "pause", "kill the service")
ERRORS = ("exit", "data", "callback", "full disk", "read-only directory")
# SIGTERM and SIGINT mean something else before the training has begun; a process that is not connected yet is awaited
# for as long as a start may take.
MOMENTS = {
    "kill": ("start", "compile", "step", "save"), "kill two": ("start", "compile", "step", "save"),
    "stop": ("compile", "step", "save"), "pause": ("compile", "step", "save"), "kill the service": ("compile", "step"),
}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """What happens, to which process (None: to all), and when: a while after a step, or another moment."""

    kind: str
    process: int | None
    moment: str
    step: int
    delay: float

    @classmethod
    def draw(cls, rng: random.Random, processes: int, kind: str | None = None) -> Fault:
        kind = kind or rng.choice([*TO_PROCESSES, *TO_LAUNCHER, *TO_SERVICE, *INSIDE])
        one = rng.randrange(processes)
        return cls(
            kind,
            None if kind in (*TO_LAUNCHER, *TO_SERVICE, "read-only directory") else one,
            rng.choice(MOMENTS.get(kind, ("step",))),
            rng.randrange(1, 7),
            rng.uniform(0.0, 0.3),
        )

    def verdict(self, processes: int) -> tuple[set[int], str]:
        """The launcher's exit statuses, and what it says at the end."""
        of = f"process {self.process if self.process is not None else '[0-9]'} of {processes}"
        if self.kind == "kill":
            return {128 + signal.SIGKILL}, f"{of} failed first: it was killed by SIGKILL"
        if self.kind == "kill the service":
            return {128 + signal.SIGKILL}, "the coordination service was killed by SIGKILL"
        if self.kind == "stop":
            return {128 + signal.SIGSTOP}, f"{of} was stopped .SIGSTOP., and then killed"
        if self.kind in AGREED:
            # All end after the same step, and any of them may be the first to have ended.
            interrupted = self.kind.startswith("interrupt")
            # Ctrl-C reaches the launcher too, which may hear of it before a process has ended.
            return {130 if interrupted else PREEMPTED_STATUS}, "interrupted|ended by SIGINT" if interrupted else ""
        why = {"full disk": "the disk is full", "read-only directory": "[Rr]ead-only"}.get(
            self.kind, f"chaos in the {self.kind} of process {self.process}"
        )
        return {1}, rf"(?s){of} failed first: it ended with exit status 1\..*{why}"


@contextmanager
def launched(folder: Path, processes: int, restarts: int = 0, **settings: Any) -> Iterator[Run]:
    """`chaos.py` under the launcher, in forks of one interpreter; ended at the end, if it has not ended itself."""
    numbers = {"-n": processes, "--failure-timeout": FAILURE_TIMEOUT, "--max-restarts": restarts}
    options = [str(word) for item in numbers.items() for word in item]
    (temporary := folder / "temporary").mkdir(exist_ok=True)
    command = [*QUICK, *options, "-m", "tests.launch.chaos", json.dumps(settings)]
    with started(folder, command, TMPDIR=str(temporary)) as run:
        try:
            yield run
        except BaseException as error:
            # A test's failure is to tell all.
            raise AssertionError(f"{error}\n{settings}\n{run.stdout[-3000:]}\n{run.stderr[-6000:]}") from error


def processes_of(run: Run) -> list[int]:
    """The ids of the coordination service and of the processes, whether they have said anything or not."""
    return by_start(_children(run.popen.pid))[1:]  # the interpreter that forks them started before


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def strike(run: Run, fault: Fault, processes: int, directory: Path, since: int = 0) -> None:
    """Let it happen, or wait until it has, in the life that prints from so many characters on."""
    if fault.kind in (*INSIDE, "exit"):
        return run.wait_for_output("in trouble")
    if fault.moment == "start":
        wait_for(lambda: len(processes_of(run)) == 1 + processes, "the start of all processes")
        time.sleep(3 * fault.delay)
    elif fault.moment == "compile":
        run.wait_for_output("compiling", processes, since)
        time.sleep(2 * fault.delay)
    else:
        run.wait_for_output(f"step {fault.step} loss", processes, since)
        if fault.moment == "save":
            wait_for(lambda: any(directory.glob("*tmp*")), "a save")
        time.sleep(fault.delay if fault.moment == "step" else fault.delay / 10)
    if fault.kind in TO_LAUNCHER:
        return os.kill(run.popen.pid, TO_LAUNCHER[fault.kind])
    service, *others = processes_of(run)
    if fault.process is None:
        return os.kill(service, TO_SERVICE[fault.kind])
    if fault.kind == "pause":
        os.kill(others[fault.process], signal.SIGSTOP)
        time.sleep(2.0)
        return os.kill(others[fault.process], signal.SIGCONT)
    if fault.kind == "kill two":
        os.kill(others[fault.process - 1], signal.SIGKILL)
    return os.kill(others[fault.process], TO_PROCESSES[fault.kind.removesuffix(" two")])


def damage(directory: Path, kind: str, rng: random.Random) -> None:
    """Of the latest checkpoint; or there seems to be a later one."""
    latest = directory / str(max(steps_in(directory)))
    if kind == "empty directory":
        return (directory / str(int(latest.name) + 5)).mkdir()
    files = needed_files(latest)
    file = rng.choice(sorted(files))
    if kind == "missing file":
        return file.unlink()
    file.write_bytes(file.read_bytes()[: rng.randrange(files[file])])
    return None


def said(run: Run) -> dict[str, str]:
    """Each step's loss, and the states: by process, to the last bit."""
    found: dict[str, str] = {}
    lines = re.findall(r"^\[(\d+)\] (?:step (\d+) loss|state (\d+)) (\S+)$", run.stdout, re.MULTILINE)
    for process, step, state, value in lines:
        key = f"the loss of step {step} in process {process}" if step else f"the state {state} of process {process}"
        assert found.setdefault(key, value) == value
    return found


@functools.cache
def undisturbed(processes: int, stages: int | None = None) -> dict[str, str]:
    """What so many processes say of all steps if nothing happens to them."""
    settings = {"directory": None, "steps": STEPS, "resume": False, "every": True, "stages": stages or processes}
    with tempfile.TemporaryDirectory() as folder, launched(Path(folder), processes, **settings) as run:
        assert run.finish() == 0, run.stderr
        return said(run)


@dataclass
class Job:
    """One training, through all of its lives."""

    folder: Path
    processes: int
    options: dict[str, Any]

    @property
    def directory(self) -> Path:
        return self.folder / "checkpoints"

    def live(self, fault: Fault) -> None:
        """Until something happens."""
        before = steps_in(self.directory)
        settings = {"kind": fault.kind, "process": fault.process, "step": max(before, default=0) + fault.step}
        with self._begun(STEPS, resume=True, **settings) as run:
            strike(run, replace(fault, step=settings["step"]), self.processes, self.directory)
            begin = time.monotonic()
            status = run.finish()
            took = time.monotonic() - begin
            self._check_verdict(run, fault, status)
            assert took < DEADLINE, f"it took {took:.1f} s to end"
            self._check_numbers(run)
            self._check_that_nothing_is_lost(run, before, agreed=fault.kind in AGREED)

    def _check_verdict(self, run: Run, fault: Fault, status: int) -> None:
        statuses, text = fault.verdict(self.processes)
        assert status in statuses, f"exit status {status}"
        block = run.stderr.rpartition("\njaxpp_flax.launch: ")[2]
        assert re.search(text, block), f"{text!r} is not what the launcher says"
        named = set(re.findall(r"the run has ended: process (\d+):", run.stderr))
        if fault.process is not None:
            assert named <= {str(fault.process)}, f"the processes name {named}"

    def _check_numbers(self, run: Run) -> None:
        wanted = undisturbed(self.processes)
        for what, value in said(run).items():
            assert value == wanted[what], f"{what} is {value}, not {wanted[what]}"

    def _check_that_nothing_is_lost(self, run: Run, before: list[int], *, agreed: bool) -> None:
        after = max(steps_in(self.directory), default=0)
        assert after >= max(before, default=0), "a checkpoint that was complete is gone"
        done = max((int(step) for step in re.findall(r"step (\d+) loss", run.stdout)), default=0)
        # A save in the background is complete when the next one begins, and that one may be cut off.
        slack = 2 * self.options["every"] if self.options["asynchronous"] else self.options["every"]
        assert after >= done - (0 if agreed else slack), f"after step {done}, the latest checkpoint is {after}"

    def suffer(self, kind: str, rng: random.Random) -> None:
        """Damage on disk, which the next life is told of."""
        damage(self.directory, kind, rng)
        if rng.random() < 0.5:
            with self._begun(STEPS, resume=True) as run:
                assert run.finish() == 1, "it resumed from a damaged checkpoint"
                assert 'resume="latest_valid"' in run.stderr

    def end(self, resume: bool | str, more: int) -> None:
        """Go on for a few steps."""
        steps = max((step for step in steps_in(self.directory)), default=0) + more
        with self._begun(steps, resume=resume) as run:
            status = run.finish()
            assert status == 0, f"exit status {status}"
            self._check_numbers(run)
            states = [what for what in said(run) if f"the state {steps} " in what]
            assert len(states) == self.processes

    def _begun(self, steps: int, **settings: Any) -> AbstractContextManager[Run]:
        options = {"directory": str(self.directory), "steps": steps, "checkpoints": self.options, **settings}
        return launched(self.folder, self.processes, **options)


def trial(folder: Path, seed: int, kind: str | None = None) -> None:
    """A job, and what happens to it: by the seed, or of this kind alone to two processes."""
    rng = random.Random(seed)
    folder.mkdir()
    processes = rng.choice([2, 2, 3, 4]) if kind is None else 2
    options = {"every": rng.choice([1, 1, 2, 3]), "keep": rng.randrange(2, 5), "asynchronous": rng.random() < 0.7}
    job = Job(folder, processes, options)
    print(f"seed {seed}: {processes} processes, {options}")
    faults = [Fault.draw(rng, processes, kind) for _ in range(rng.choice([1, 1, 1, 2]))] if kind not in DAMAGE else []
    for fault in faults:
        print(fault, flush=True)
        job.live(fault)
    if kind in DAMAGE:
        job.end(True, 4 * options["every"])
    damaged = rng.choice([None, None, *DAMAGE]) if kind is None else kind if kind in DAMAGE else None
    resume: bool | str = True
    if damaged is not None and len(steps_in(job.directory)) > 1:
        print(damaged, flush=True)
        job.suffer(damaged, rng)
        resume = "latest_valid"
    job.end(resume, rng.randrange(1, 4))
    shutil.rmtree(folder)


@pytest.mark.parametrize("kind", ["kill", "full disk", "truncated file"])
def test_a_fault_loses_nothing(tmp_path: Path, kind: str):
    trial(tmp_path / "job", 1, kind)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(TRIALS))
def test_chaos(tmp_path: Path, seed: int):
    trial(tmp_path / "job", seed)


def deserted(folder: Path, since: float) -> list[str]:
    """The files in a folder that all share, made since then, which no process has open or mapped."""
    new = {str(path) for path in folder.iterdir() if path.stat().st_mtime > since}
    for process in Path("/proc").glob("[0-9]*") if new else ():
        with suppress(OSError):
            used = {line.split(maxsplit=5)[-1] for line in (process / "maps").read_text().splitlines()}
            new -= used | {os.readlink(descriptor) for descriptor in (process / "fd").iterdir()}
    return sorted(new)


def restarted_trial(folder: Path, seed: int, *kinds: str) -> None:
    """A run that is started again each time that something happens to it: by the seed, or of these kinds to it."""
    rng, since = random.Random(seed), time.time()
    folder.mkdir()
    processes, stages = rng.choice([(2, 2), (2, 2), (3, 3), (4, 4), (4, 2)]) if not kinds else (2, 2)
    options = {"every": rng.choice([1, 1, 2, 3]), "keep": rng.randrange(2, 5), "asynchronous": rng.random() < 0.7}
    options["memory_every"] = rng.choice([None, 1])
    first = rng.choice(rng.choice([ERRORS, CRASHES, CRASHES]))
    kinds = kinds or (first, *rng.choices(CRASHES, k=rng.choice([0, 0, 1, 2])))
    faults = [Fault.draw(rng, processes, kind) for kind in kinds]
    print(f"seed {seed}: {processes} processes, {stages} stages, {options}, {faults}", flush=True)
    settings = {"directory": str(folder / "checkpoints"), "steps": FEW_STEPS, "resume": True, "checkpoints": options}
    settings |= {"stages": stages, "kind": faults[0].kind, "process": faults[0].process, "step": faults[0].step + 1}
    with launched(folder, processes, len(faults), **settings) as run:
        restarts = printed = 0
        for fault in faults:
            done = max((int(step) for step in re.findall(r"step (\d+) loss", run.stdout)), default=0)
            step = done + fault.step + 2  # a life may go on from a step whose loss is not printed yet
            strike(run, replace(fault, step=step), processes, folder / "checkpoints", printed)
            restarts += fault.kind != "pause"
            wait_for(lambda: run.stderr.count("; restart ") >= restarts or run.popen.poll() is not None, "a restart")  # noqa: B023
            printed = len(run.stdout) if fault.kind != "pause" else printed
        assert run.finish() == 0
        assert run.stderr.count("; restart ") == restarts
        found, wanted = said(run), undisturbed(processes, stages)
        assert {what: wanted[what] for what in found} == found
        assert len([what for what in found if f"the state {FEW_STEPS} " in what]) == processes
        # See `_check_that_nothing_is_lost`. Of copies, the step under way, and one that not all processes have copied.
        most = 2 if options["memory_every"] else options["every"] * (2 if options["asynchronous"] else 1)
        assert all(int(steps) <= most for steps in re.findall(r"(\d+) steps? repeated", run.stderr))
        run.check_nothing_is_left()
        left = [*(folder / "temporary").iterdir(), *(folder / "checkpoints").glob("*tmp*")]
        assert not left
        wait_for(lambda: not deserted(Path("/dev/shm"), since), f"nothing in {deserted(Path('/dev/shm'), since)}", 10.0)
    shutil.rmtree(folder)


def test_a_run_is_started_again_and_nothing_is_left(tmp_path: Path):
    restarted_trial(tmp_path / "job", 1, "exit", "kill two")


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(RESTARTED))
def test_restarts(tmp_path: Path, seed: int):
    restarted_trial(tmp_path / "job", seed)
