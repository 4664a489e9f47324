"""The doors of processes: which of those that stay closed say that a process has ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from jaxpp_flax.processes import doors
from jaxpp_flax.processes.doors import Doors, is_closed, open_door
from tests.running import ROOT, wait_for

WITH_A_FORK = """
import os, time
from jaxpp_flax.processes.doors import open_own_door
door, address = open_own_door("127.0.0.1:1")
child = os.fork()
if not child:
    time.sleep(60)
print(child, address, flush=True)
os.kill(os.getpid(), 9)
"""


def test_only_a_door_that_was_open_and_stays_closed_says_that_a_process_has_ended(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doors, "_CERTAIN_SECONDS", 0.2)
    (first, known), (second, unknown) = open_door("127.0.0.1"), open_door("127.0.0.1")
    found, heard = Doors(), time.monotonic()
    found.learn([known, ""], 5.0)
    assert not found.has_closed(known, 5.0, heard)
    first.close()
    second.close()
    found.learn([known, unknown], 5.0)  # as if a firewall refused it from the beginning
    assert not found.has_closed(known, 5.0, heard)  # the network may be reset for a second
    time.sleep(0.3)
    assert not found.has_closed(known, 5.0, time.monotonic())  # a sign of life came since
    assert not found.has_closed(unknown, 5.0, heard)
    time.sleep(0.3)
    assert found.has_closed(known, 5.0, heard)
    assert not found.has_closed(unknown, 5.0, heard)


def test_a_fork_that_lives_on_does_not_hold_the_door_open():
    program = [sys.executable, "-c", WITH_A_FORK]
    with subprocess.Popen(
        program, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    ) as run:
        assert run.stdout
        child, address = run.stdout.readline().split()
        try:
            assert run.wait(60.0) == -signal.SIGKILL
            wait_for(lambda: is_closed(address, 5.0), "the end of the door")  # the fork may have begun just now
        finally:
            os.kill(int(child), signal.SIGKILL)
