"""`python -m jaxpp_flax.launch -n N`: real processes on loopback, their ends, and that nothing is left of them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.launch.running import CONNECTED, QUICK, REAL, Run, addresses, environment, forks, launched, marked, started
from tests.processes.faults import says
from tests.running import PATIENCE, ROOT, wait_for

pytestmark = pytest.mark.processes

# What every script here begins with: process_group() needs no devices, so a script without collectives starts fast.
BEGIN = """
import os, signal, sys, time
from jaxpp_flax.processes import process_group
group = process_group()
index = group.process_index
print("pid", os.getpid(), flush=True)
"""
# Waits for process 1, as a stage does whose input is late; a failure may end it in either of two ways.
WAIT_IN_PYTHON = """
with group.waiting("stage 1's activations of microbatch 3", on=1):
    while True:
        group.check()
        time.sleep(0.05)
"""
WAIT_OUTSIDE_OF_PYTHON = """
with group.waiting("stage 1's activations of microbatch 3", on=1):
    time.sleep(1000)
"""
AWAITED = r"was waiting for stage 1's activations of microbatch 3 \(from process 1\)"


def error_block(stderr: str) -> str:
    """What the launcher says itself, at the end."""
    _, found, block = stderr.rpartition("\njaxpp_flax.launch: ")
    assert found, f"the launcher gave no reason: {stderr}"
    return block


def test_a_script_runs_unchanged_in_every_process(tmp_path: Path):
    source = (
        BEGIN
        + """
import jax, jax.numpy as jnp
from jax.experimental import multihost_utils
assert __name__ == "__main__" and __file__ == sys.argv[0]
import neighbour
sums = multihost_utils.process_allgather(jnp.asarray(index + 1)).tolist()
print("got", sys.argv[1:], jax.process_count(), len(jax.devices()), len(jax.local_devices()), sums, neighbour.NAME)
print("to stderr", file=sys.stderr)
"""
    )
    (tmp_path / "neighbour.py").write_text("NAME = 'next door'\n")
    with launched(
        tmp_path,
        source,
        *("-n", "2", "--devices-per-process", "2"),
        arguments=("--steps", "3", "-n"),
        launcher=REAL,
    ) as run:
        assert run.finish() == 0, run.stderr
        for index in range(2):
            assert f"[{index}] got ['--steps', '3', '-n'] 2 4 2 [1, 2] next door\n" in run.stdout
            assert f"[{index}] to stderr\n" in run.stderr
        run.check_nothing_is_left()


def test_all_sockets_listen_on_loopback(tmp_path: Path):
    source = (
        BEGIN
        + """
import jax
from jax.experimental import multihost_utils
from jaxpp_flax.engine.runtime.transport.connection import process_connection
multihost_utils.process_allgather(jax.numpy.zeros(1))
process_connection()
print("ready")
while not os.path.exists("looked"):
    time.sleep(0.05)
"""
    )
    with launched(tmp_path, source, "-n", "2") as run:
        run.wait_for_output("ready", times=2)
        found = addresses(list(marked(run.mark)))
        (tmp_path / "looked").touch()
        assert run.finish() == 0, run.stderr
    # At least the service's, and gloo's and the transfer server's of each process.
    assert len(found) >= 5
    # 127.0.0.1, as itself and as an IPv6 address, in the byte order of /proc.
    assert set(found) <= {"0100007F", "0000000000000000FFFF00000100007F"}


@pytest.mark.parametrize(
    ("wait", "launcher"), [(WAIT_IN_PYTHON, REAL), (WAIT_OUTSIDE_OF_PYTHON, QUICK)], ids=["in Python", "outside"]
)
def test_an_exception_ends_all_and_is_shown_last(tmp_path: Path, wait: str, launcher: tuple[str, ...]):
    source = BEGIN + "if index == 1:\n    raise KeyError('bad luck')\n" + wait
    with launched(tmp_path, source, "-n", "3", launcher=launcher) as run:
        assert run.finish() == 1
        block = error_block(run.stderr)
        assert block.startswith("process 1 of 3 failed first: it ended with exit status 1.")
        assert block.rstrip().endswith("[1] KeyError: 'bad luck'")
        assert launcher == QUICK or "runpy" not in run.stderr  # the traceback is the user's own
        first = run.stderr.index("[1] KeyError: 'bad luck'")
        for index in (0, 2):
            assert re.search(rf"\[{index}\] Process {index} {AWAITED}", run.stderr)
            assert run.stderr.index(f"[{index}] ") > first
        assert says("an exception, `sys.exit` with an error").search(run.stderr)
        run.check_nothing_is_left()


@pytest.mark.filterwarnings("ignore:os.fork")  # what runs between fork and exec here is one call of `signal`
@pytest.mark.parametrize("more", [[], ["--no-fork"]], ids=["forks", "no forks"])
def test_a_launcher_that_is_started_to_ignore_its_children_sees_them_fail(tmp_path: Path, more: list[str]):
    # The system would not keep their exit statuses, and a failure would look like a good end.
    (tmp_path / "script.py").write_text("import sys\nsys.exit(3)\n", encoding="utf-8")
    launcher = subprocess.Popen(
        [*REAL, "-n", "1", *more, "script.py"],
        env=environment("c" * 32),
        cwd=tmp_path,
        preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN) and None,
    )
    assert launcher.wait(timeout=PATIENCE) == 3


def test_the_exit_status_is_that_of_the_first_failure(tmp_path: Path):
    with launched(tmp_path, BEGIN + "if index == 1:\n    sys.exit(3)\n" + WAIT_IN_PYTHON, "-n", "2") as run:
        assert run.finish() == 3
        assert "process 1 of 2 failed first: it ended with exit status 3" in error_block(run.stderr)
        assert re.search(rf"\[0\] Process 0 {AWAITED}", run.stderr)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_is_named_and_ends_the_others(tmp_path: Path, victim: int):
    with launched(tmp_path, BEGIN + WAIT_OUTSIDE_OF_PYTHON, "-n", "3") as run:
        run.wait_for_output(" pid ", times=3)
        run.kill(victim)
        assert run.finish() == 128 + signal.SIGKILL
        assert error_block(run.stderr).startswith(f"process {victim} of 3 failed first: it was killed by SIGKILL")
        for index in {0, 1, 2} - {victim}:
            assert f"[{index}] jaxpp_flax: the run has ended: process {victim}: it was killed by SIGKILL" in run.stderr
            assert says("a killed process, under `-n`").search(run.stderr)
            assert re.search(rf"\[{index}\] Process {index} {AWAITED}", run.stderr)
        run.check_nothing_is_left()


def test_a_process_killed_while_it_starts(tmp_path: Path):
    with launched(tmp_path, BEGIN, "-n", "2", "--no-fork", launcher=REAL) as run:
        # Interpreters of their own, which import for a while.
        def children() -> list[int]:
            return sorted(pid for pid, line in marked(run.mark).items() if "launch.child" in line)

        wait_for(lambda: len(children()) == 2, "the start of both processes")
        first, last = children()
        os.kill(last, signal.SIGSTOP)  # it gets no further, however busy the machine is

        # It connects to the service once it listens to the launcher.
        wait_for(lambda: addresses([first], CONNECTED), "the other one to connect")
        os.kill(last, signal.SIGKILL)
        assert run.finish() == 128 + signal.SIGKILL
        assert "killed by SIGKILL" in error_block(run.stderr)
        # The other one waits inside of JAX to be connected, and is told all the same.
        assert re.search(r"\[\d\] jaxpp_flax: the run has ended: process \d: it was killed by SIGKILL", run.stderr)
        run.check_nothing_is_left()


@pytest.mark.parametrize(
    ("module", "who"), [("launch.child", "process 1 of 2"), ("launch.coordinator", "the coordination service")]
)
def test_what_is_stopped_while_processes_start_is_named(tmp_path: Path, module: str, who: str):
    # Nobody watches it yet: the others would wait for it until their own limit of 300 s.
    options = ("-n", "2", "--no-fork", "--max-restarts", "1")
    with launched(tmp_path, BEGIN, *options, failure_timeout=5.0, launcher=REAL) as run:

        def those() -> list[int]:
            return [pid for pid, line in marked(run.mark).items() if module in line]

        wait_for(lambda: len(those()) == (2 if "child" in module else 1), module)
        os.kill(max(those()), signal.SIGSTOP)
        assert run.finish() == 0, run.stderr
        says = (
            f"jaxpp_flax.launch: {who} was stopped (SIGSTOP), and then killed. That was before the first step; restart"
        )
        assert says in run.stderr
        run.check_nothing_is_left()


def test_a_process_that_the_launcher_has_to_end_is_named(tmp_path: Path):
    with launched(tmp_path, BEGIN, "-n", "2", "--no-fork", failure_timeout=10.0, launcher=REAL) as run:
        wait_for(lambda: sum("launch.child" in line for line in marked(run.mark).values()) == 2, "both processes")
        children = [pid for pid, line in marked(run.mark).items() if "launch.child" in line]
        os.kill(max(children), signal.SIGSTOP)  # it gets no further, however fast the machine is
        os.kill(min(children), signal.SIGKILL)
        assert run.finish() == 128 + signal.SIGKILL
        assert "failed first: it was killed by SIGKILL" in error_block(run.stderr)
        for name in ("SIGTERM", "SIGKILL"):  # a stopped process does not see the first
            said = rf"^jaxpp_flax.launch: process \d of 2 was still starting: it is ended by {name}\.$"
            assert re.search(said, run.stderr, re.MULTILINE), run.stderr
        run.check_nothing_is_left()


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Run]]:
    """Two runs side by side: in one process 1 stands still, in one the service. Their time is that of the silence."""
    with ExitStack() as stack:
        runs: dict[str, Run] = {}
        for what in ("process", "service"):
            folder = tmp_path_factory.mktemp(f"stopped_{what}")
            run = launched(folder, BEGIN + WAIT_OUTSIDE_OF_PYTHON, "-n", "2", failure_timeout=8.0)
            runs[what] = stack.enter_context(run)
        for run in runs.values():
            run.wait_for_output(" pid ", times=2)
        time.sleep(4.0)  # ten times the interval after which its first heartbeat has been seen
        runs["process"].kill(1, signal.SIGSTOP)
        os.kill(forks(runs["service"].mark)[0], signal.SIGSTOP)
        yield runs


def test_a_stopped_process_is_found_and_named(stopped: dict[str, Run]):
    run = stopped["process"]
    assert run.finish() == 128 + signal.SIGSTOP
    assert error_block(run.stderr).startswith("process 1 of 2 was stopped (SIGSTOP)")
    assert "[0] jaxpp_flax: the run has ended: process 1: no sign of life for " in run.stderr
    assert re.search(rf"\[0\] Process 0 {AWAITED}", run.stderr)
    run.check_nothing_is_left()


def test_a_coordination_service_that_does_not_answer_ends_all_with_our_own_words(stopped: dict[str, Run]):
    # As where the network to its host is gone. JAX, which would abort without a word on why, waits for longer.
    run = stopped["service"]
    assert run.finish() == 69
    for index in range(2):
        name = r"the coordination service at 127\.0\.0\.1:\d+ \(the host of process 0\)"
        assert re.search(rf"\[{index}\].* {name} has not answered process {index}", run.stderr)
    assert "Terminating process" not in run.stderr
    run.check_nothing_is_left()


def test_a_killed_coordination_service_ends_all(tmp_path: Path):
    with launched(tmp_path, BEGIN + WAIT_OUTSIDE_OF_PYTHON, "-n", "2") as run:
        run.wait_for_output(" pid ", times=2)
        os.kill(forks(run.mark)[0], signal.SIGKILL)
        assert run.finish() == 128 + signal.SIGKILL
        # The processes end with messages of their own; the last line is the reason all the same.
        assert says("a killed service, under `-n`").search(run.stderr)
        assert error_block(run.stderr).startswith(
            "the coordination service was killed by SIGKILL: the processes cannot meet without it."
        )
        run.check_nothing_is_left()


def test_a_process_that_ends_early_is_an_error_that_says_so(tmp_path: Path):
    source = BEGIN + "if index == 1:\n    sys.exit(0)\n" + WAIT_IN_PYTHON
    with launched(tmp_path, source, "-n", "2", failure_timeout=10.0) as run:
        # Process 1 is told that it is the one that failed, and may be the first to end by that.
        assert run.finish() in (1, 69)
        assert "process 1: it ended its program while others wait for it" in run.stderr
        assert says("a script that ends early in one process").search(run.stderr)
        assert re.search(rf"\[0\] Process 0 {AWAITED}", run.stderr)
        run.check_nothing_is_left()


def test_a_process_may_take_its_time_at_the_end(tmp_path: Path):
    source = BEGIN + "time.sleep(6.0 if index == 0 else 0.0)\nprint('done')\n"
    with launched(tmp_path, source, "-n", "2", failure_timeout=5.0) as run:  # a silence of 3 s, on a busy machine too
        assert run.finish() == 0, run.stderr
        assert run.stdout.count("done") == 2


def test_what_is_awaited_for_long_is_said_by_all(tmp_path: Path):
    (tmp_path / "script.py").write_text(
        BEGIN
        + """
with group.waiting("the next batch of the data"):
    while index == 1 and not os.path.exists("said"):
        time.sleep(0.05)
group.barrier("the loss of step 8")
"""
    )
    said = [
        rf"^\[{index}\] jaxpp_flax: process {index} has been waiting for \d+ s for {awaited}$"
        for index, awaited in enumerate([r"the loss of step 8 \(from process 1\)", "the next batch of the data"])
    ]
    with started(tmp_path, [*QUICK, "-n", "2", "script.py"], JAXPP_FLAX_REPORT_AFTER="1") as run:
        wait_for(lambda: all(re.search(line, run.stderr, re.MULTILINE) for line in said), "both lines")
        (tmp_path / "said").touch()
        assert run.finish() == 0, run.stderr


def test_one_process_is_an_ordinary_program(tmp_path: Path):
    with launched(tmp_path, BEGIN + "sys.exit(5)", "-n", "1") as run:
        assert run.finish() == 5


def test_ctrl_c_leaves_nothing(tmp_path: Path):
    child = "import subprocess\nsubprocess.Popen(['sleep', '1000'])\n"
    with launched(tmp_path, BEGIN + child + "print('waits')\n" + WAIT_OUTSIDE_OF_PYTHON, "-n", "2") as run:
        run.wait_for_output("waits", times=2)
        run.popen.send_signal(signal.SIGINT)
        assert run.finish() == 128 + signal.SIGINT
        assert "Traceback" not in run.stderr
        run.check_nothing_is_left()


# A program that notes SIGTERM.
ASKED = (
    BEGIN
    + """
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
print("waits")
"""
)


def test_ctrl_c_while_processes_connect_ends_them_at_once(tmp_path: Path):
    # JAX holds one of them until all are there, and Python's handler would not run: nothing can be saved yet either.
    options = ("-n", "2", "--no-fork", "--grace", "1000")  # longer than the test's patience
    with launched(tmp_path, BEGIN, *options, launcher=REAL) as run:

        def children() -> list[int]:
            return sorted(pid for pid, line in marked(run.mark).items() if "launch.child" in line)

        wait_for(lambda: len(children()) == 2, "the start of both processes")
        first, last = children()
        os.kill(last, signal.SIGSTOP)
        wait_for(lambda: addresses([first], CONNECTED), "the other one to connect")
        run.popen.send_signal(signal.SIGINT)
        assert run.finish() == 128 + signal.SIGINT
        run.check_nothing_is_left()


@pytest.mark.filterwarnings("ignore:os.fork")  # what runs between fork and exec here is one call of `signal`
def test_ctrl_c_while_the_launcher_imports_ends_it(tmp_path: Path):
    # As JAX's callback does, a module swallows the exception of Python's handler.
    (tmp_path / "jax.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept KeyboardInterrupt:\n    pass\n"
    )
    own = {**environment("ctrl_c"), "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    # The tests may run in the background, where Ctrl-C is ignored.
    end = subprocess.run(
        [*REAL, "-n", "2", "script.py"],
        env=own,
        capture_output=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,
    )
    assert end.returncode == -signal.SIGINT, end.stderr


def test_sigterm_lets_the_processes_finish(tmp_path: Path):
    source = (
        ASKED
        + """
while not asked:
    time.sleep(0.05)
print("saved")
"""
    )
    with launched(tmp_path, source, "-n", "2") as run:
        run.wait_for_output("waits", times=2)
        run.popen.send_signal(signal.SIGTERM)
        assert run.finish() == 128 + signal.SIGTERM
        assert run.stdout.count("saved") == 2
        run.check_nothing_is_left()


@pytest.mark.parametrize("signalled", ["the launcher", "process 1"])
def test_a_preemption_is_no_failure(tmp_path: Path, signalled: str):
    source = (
        ASKED
        + """
while not group.values.announcement("the last step"):
    if asked:
        group.values.announce("the last step", b"7")
    time.sleep(0.05)
group.barrier("the save")
time.sleep(2.0 * index)
sys.exit(75)
"""
    )
    with launched(tmp_path, source, "-n", "2") as run:
        run.wait_for_output("waits", times=2)
        if signalled == "the launcher":
            run.popen.send_signal(signal.SIGTERM)
        else:
            run.kill(1, signal.SIGTERM)
        assert run.finish() == 75, run.stderr
        assert error_block(run.stderr).strip() == (
            "preempted: all 2 processes have saved after SIGTERM. Start the run again: fit(resume=True) goes on from "
            "there."
        )
        run.check_nothing_is_left()


def test_a_failed_save_after_sigterm_is_a_failure(tmp_path: Path):
    source = (
        BEGIN
        + """
def end(*_):
    if index == 1:
        os._exit(3)
    os._exit(75)
signal.signal(signal.SIGTERM, end)
print("waits")
while True:
    time.sleep(0.05)
"""
    )
    with launched(tmp_path, source, "-n", "2") as run:
        run.wait_for_output("waits", times=2)
        run.popen.send_signal(signal.SIGTERM)
        assert run.finish() == 3
        assert error_block(run.stderr).startswith("process 1 of 2 failed first: it ended with exit status 3")


def test_processes_that_hang_after_their_programs_are_killed(tmp_path: Path):
    source = (
        BEGIN
        + """
class Hangs:
    def __del__(self, sleep=time.sleep, stop=os.kill, me=os.getpid()):
        stop(me, 19) if index == 0 else sleep(1000)

import builtins
builtins.hangs = Hangs()  # deleted when the interpreter ends
"""
    )
    with launched(tmp_path, source, "-n", "2", "--grace", "2") as run:
        assert run.finish() == 0, run.stderr
        says = r"process {} of 2 has ended its program, but is still running: {}.* After 2 s \(--grace\) it is killed"
        assert re.search(says.format(0, r"it was stopped \(SIGSTOP\)"), run.stderr), run.stderr
        assert re.search(says.format(1, "an object's `__del__`"), run.stderr), run.stderr
        run.check_nothing_is_left()


def test_a_thread_that_keeps_a_process_from_its_end_is_named_and_ends_all(tmp_path: Path):
    source = (
        BEGIN
        + """
import threading
from jaxpp_flax.launch.process import process_end
process_end._SECONDS_IN_SILENCE, process_end.EXIT_SECONDS = 1.0, 2.0
if index == 1:
    threading.Thread(target=time.sleep, args=(1000,), name="uploader").start()
"""
    )
    with launched(tmp_path, source, "-n", "2") as run:
        assert run.finish() == 1
        held = "the program of process 1 is over, but its thread 'uploader' still runs (daemon=False)"
        assert f"[1] jaxpp_flax: {held}. The other processes wait for it; after 2 s it ends." in run.stderr
        assert error_block(run.stderr).startswith("process 1 of 2 failed first: it ended with exit status 1")
        assert f"process 1: {held}, for 2 s" in run.stderr, run.stderr  # as the other one was told
        run.check_nothing_is_left()


def test_a_second_signal_kills(tmp_path: Path):
    source = BEGIN + "signal.signal(signal.SIGTERM, lambda *_: print('asked'))\nprint('waits')\ntime.sleep(1000)"
    with launched(tmp_path, source, "-n", "2") as run:
        run.wait_for_output("waits", times=2)
        run.popen.send_signal(signal.SIGTERM)
        run.wait_for_output("asked", times=2)
        run.popen.send_signal(signal.SIGTERM)
        assert run.finish() == 128 + signal.SIGTERM
        run.check_nothing_is_left()


@pytest.mark.parametrize("launcher", [QUICK, REAL], ids=["while running", "while starting"])
def test_a_killed_launcher_leaves_nothing(tmp_path: Path, launcher: tuple[str, ...]):
    child = "import subprocess\nsubprocess.Popen(['sleep', '1000'])\n"
    with launched(tmp_path, BEGIN + child + "print('waits')\ntime.sleep(1000)\n", "-n", "2", launcher=launcher) as run:
        if launcher == QUICK:
            run.wait_for_output("waits", times=2)
        else:
            wait_for(lambda: forks(run.mark), "the first child")
        run.popen.kill()
        run.popen.wait()
        # A process that starts hears of it once it has imported JAX.
        run.check_nothing_is_left(seconds=60.0)


def test_a_module_runs_too(tmp_path: Path):
    (tmp_path / "program.py").write_text("import sys\nprint('module', __name__, sys.argv[1:])\n")
    with started(tmp_path, [*QUICK, "-n", "2", "-m", "program", "--flag"]) as run:
        assert run.finish() == 0, run.stderr
        assert run.stdout.count("module __main__ ['--flag']") == 2


def test_output_that_is_lost_is_no_good_end(tmp_path: Path):
    (tmp_path / "script.py").write_text("print('loss 0.5')\n", encoding="utf-8")
    with open("/dev/full", "wb") as full:
        launcher = subprocess.Popen(
            [*REAL, "-n", "1", "script.py"],
            env=environment("f" * 32),
            cwd=tmp_path,
            stdout=full,
            stderr=subprocess.PIPE,
        )
        _, errors = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 74, errors
    assert errors.strip().decode() == (
        "jaxpp_flax.launch: output of the run is lost: [Errno 28] No space left on device. Make room where it goes, or "
        "send it elsewhere."
    )
