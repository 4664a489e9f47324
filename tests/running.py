"""What every test that starts a program needs: where the checkout is, a free port, and a program run to its end.

Several processes that belong together are started by `tests/processes/running.py`, a launcher with all that it starts
by `tests/launch/running.py`; both may leave nothing behind, whatever the test does.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["MARK", "PATIENCE", "ROOT", "free_port", "run_python", "wait_for"]

ROOT = Path(__file__).resolve().parents[1]

# Generous, because the machine may be busy with other tests; nothing that is waited for takes a tenth of it alone.
PATIENCE = 180.0

# The variable by whose value a test finds all processes of a run, those that lost their parents included.
MARK = "JAXPP_FLAX_TEST_RUN"


def free_port() -> int:
    """A port of loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(condition: Callable[[], object], what: str = "the awaited", seconds: float = PATIENCE) -> None:
    """Wait until `condition()` is true.

    Raises:
      TimeoutError: saying `what` did not happen.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not happen within {seconds} s")
        time.sleep(0.02)


def run_python(
    *arguments: str, cwd: Path = ROOT, timeout: float = 300.0, status: int = 0, **environment: str | None
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS...` with this checkout to its end.

    Args:
      timeout: in seconds; generous, because the machine may be busy with other tests.
      status: the exit status that it must have.
      environment: variables that differ from the tests' own; None takes one out.

    Raises:
      AssertionError: with all it printed, if it ends with another status.
      subprocess.TimeoutExpired: if it does not end in time.
    """
    changed = {"PYTHONPATH": str(ROOT), **environment}
    own = {name: value for name, value in {**os.environ, **changed}.items() if value is not None}
    done = subprocess.run(
        [sys.executable, *arguments], env=own, cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False
    )
    if done.returncode != status:
        command = " ".join(["python", *arguments])
        raise AssertionError(f"{command} ended with status {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done
