"""The runner of processes: what it tells of a case that fails, and how a fork differs from the others."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.processes.running import ProcessesError, results_of_cases, run_processes, start_processes

pytestmark = pytest.mark.processes

CASES = """
import json, os, sys
for name in json.loads(sys.argv[1]):
    if name == "bad" and os.environ["TEST_PROCESS"] == "1":
        raise ValueError("of this case alone")
    print(f"passed {name}")
"""


def script(folder: Path, source: str) -> str:
    """The path of a script with this source."""
    (folder / "script.py").write_text(source, encoding="utf-8")
    return str(folder / "script.py")


def test_a_case_that_fails_is_told_and_those_after_it_run(tmp_path: Path):
    results = results_of_cases(2, script(tmp_path, CASES), names=("first", "bad", "last"))
    assert {name for name, wrong in results.items() if not wrong} == {"first", "last"}
    assert "ValueError: of this case alone" in results["bad"]
    assert "process 1: exit code 1" in results["bad"]


def test_processes_have_hashes_environments_and_ends_of_their_own(tmp_path: Path):
    source = "import os, sys\nprint(hash('a'), os.environ['OWN'], sys.argv[1:])\nsys.exit(int(sys.argv[1]))\n"
    path = script(tmp_path, source)
    first, second = run_processes(2, path, "0", environment={"OWN": "mine"})
    assert first.split()[0] != second.split()[0]
    assert first.split()[1:] == second.split()[1:] == ["mine", "['0']"]
    with pytest.raises(ProcessesError, match="process 0: exit code 3"):
        run_processes(1, path, "3", environment={"OWN": "mine"})


def test_what_jax_reads_when_it_is_imported_reaches_it(tmp_path: Path):
    source = "import jax\nprint('x64', jax.config.read('jax_enable_x64'))\n"
    (output,) = run_processes(1, script(tmp_path, source), environment={"JAX_ENABLE_X64": "1"})
    assert "x64 True" in output


def test_signals_end_what_runs_and_what_stands_still(tmp_path: Path):
    path = script(tmp_path, "import time\nprint('waits', flush=True)\ntime.sleep(1000)\n")
    with start_processes(2, path) as processes:
        for index in range(2):
            processes.wait_for_output(index, "waits")
        first, second = processes.processes
        first.send_signal(signal.SIGTERM)
        second.send_signal(signal.SIGSTOP)
        ended = processes.wait(60.0, standing=[1])
    assert [end.code for end in ended] == [-signal.SIGTERM, None]
    for process in (first, second):
        assert process.returncode is not None
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)
