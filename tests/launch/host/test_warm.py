"""Processes that are forks of a warm interpreter are as those that start by themselves."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.launch.running import REAL, Run, launched, marked
from tests.running import wait_for

pytestmark = pytest.mark.processes

SOURCE = """
import atexit, os, random, signal, sys, threading, time
import jax, numpy
from jax._src import xla_bridge
loaded = open("/proc/self/maps").read()
print("backends", len(xla_bridge._backends), [name for name in ("libcuda.so", "libtpu", "nccl") if name in loaded])
print("random", random.random(), numpy.random.rand())
print("is", __name__, sys.argv, os.getpgid(0) == os.getpid(), len(jax.local_devices()))
print("shown as", [word for word in open("/proc/self/cmdline").read().split("\\0") if word])
handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
print("handlers", handlers == [signal.default_int_handler, signal.SIG_DFL])
atexit.register(print, "exit handler")
def finish():
    time.sleep(0.3)
    print("thread")
threading.Thread(target=finish).start()
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("more", [[], ["--no-fork"]], ids=["forks", "no forks"])
def test_a_process_begins_and_ends_as_any_other(tmp_path: Path, more: list[str]):
    # Without a backend, a library of a device, or numbers of another process; with threads and exit handlers.
    options = ["-n", "2", "--devices-per-process", "3", *more]
    with launched(tmp_path, SOURCE, *options, arguments=("0",), launcher=REAL) as run:
        assert run.finish() == 0, run.stderr
        script = str(tmp_path / "script.py")
        for index in range(2):
            said = re.findall(rf"^\[{index}\] (.*)$", run.stdout, re.MULTILINE)
            assert said[0] == "backends 0 []"
            assert said[2] == f"is __main__ {[script, '0']} True 3"
            assert said[3] == f"shown as {[sys.executable, '-m', 'jaxpp_flax.launch.child', script, '0']}"  # by `ps`
            assert said[4:] == ["handlers True", "thread", "exit handler"]
        numbers = re.findall(r"random (\S+) (\S+)", run.stdout)
        assert len({number for pair in numbers for number in pair}) == 4
        run.check_nothing_is_left()


def interpreter(run: Run) -> int:
    """The warm interpreter of a run that has forked nothing yet, or nothing any more."""

    def found() -> list[int]:
        return [pid for pid, line in marked(run.mark).items() if "launch.host.warm" in line]

    wait_for(found, "the warm interpreter")
    return found()[0]


NAMED = (
    r"^jaxpp_flax.launch: the interpreter that forks the run's processes {} "
    r"\(`--no-fork` starts each process by itself\)\."
)


def test_a_stopped_interpreter_is_named_and_ends_the_run(tmp_path: Path):
    with launched(tmp_path, "", "-n", "2", launcher=REAL) as run:
        os.kill(interpreter(run), signal.SIGSTOP)
        assert run.finish() == 128 + signal.SIGSTOP
        how = NAMED.format(r"was stopped \(SIGSTOP\), and then killed")
        assert re.search(f"{how}$", run.stderr, re.MULTILINE), run.stderr
        run.check_nothing_is_left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_launcher_hears_signals_while_the_interpreter_is_stopped(tmp_path: Path, number: int):
    with launched(tmp_path, "", "-n", "2", launcher=REAL) as run:
        stopped = interpreter(run)
        os.kill(stopped, signal.SIGSTOP)
        run.popen.send_signal(number)
        assert run.finish() == 128 + number
        assert "interpreter" not in run.stderr
        run.check_nothing_is_left()


def test_an_interpreter_that_is_killed_before_it_forks_is_named_and_replaced(tmp_path: Path):
    with launched(tmp_path, "", "-n", "2", "--max-restarts", "1", launcher=REAL) as run:
        os.kill(interpreter(run), signal.SIGKILL)
        assert run.finish() == 0, run.stderr
        how = NAMED.format("was killed by SIGKILL")
        assert re.search(f"{how} That was before the first step; restart 1 of 1.$", run.stderr, re.MULTILINE), (
            run.stderr
        )
        run.check_nothing_is_left()


def test_the_loss_of_the_interpreter_does_no_harm_to_what_it_has_forked(tmp_path: Path):
    source = """
import os, time
from jaxpp_flax.processes.group import process_group
print("attempt", process_group().attempt)
while not os.path.exists("lost"):
    time.sleep(0.05)
if process_group().attempt == 1 and process_group().process_index == 1:
    os.kill(os.getpid(), 9)
process_group().barrier("the end")
"""
    with launched(tmp_path, source, "-n", "2", "--max-restarts", "1", launcher=REAL) as run:
        run.wait_for_output("attempt 1", times=2)
        os.kill(interpreter(run), signal.SIGKILL)
        (tmp_path / "lost").touch()
        assert run.finish() == 0, run.stderr
        assert run.stdout.count("attempt 2") == 2
        assert "process 1 of 2 failed first: it was killed by SIGKILL." in run.stderr
        assert "interpreter" not in run.stderr
        run.check_nothing_is_left()
