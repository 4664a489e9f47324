"""Processes that are forks of a warm interpreter are as those that start by themselves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.launch.running import REAL, launched

pytestmark = pytest.mark.processes

SOURCE = """
import atexit, os, random, signal, sys, threading, time
import jax, numpy
from jax._src import xla_bridge
loaded = open("/proc/self/maps").read()
print("backends", len(xla_bridge._backends), [name for name in ("libcuda.so", "libtpu", "nccl") if name in loaded])
print("random", random.random(), numpy.random.rand())
print("is", __name__, sys.argv, os.getpgid(0) == os.getpid(), len(jax.local_devices()))
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
            assert said[2:] == [f"is __main__ {[script, '0']} True 3", "handlers True", "thread", "exit handler"]
        numbers = re.findall(r"random (\S+) (\S+)", run.stdout)
        assert len({number for pair in numbers for number in pair}) == 4
        run.check_nothing_is_left()
