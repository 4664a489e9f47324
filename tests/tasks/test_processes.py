"""The example as several processes: each runs the tasks of its ranks, and finds what plain `jax.jit` computes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers import slow
from tests.launch.running import QUICK, started
from tests.running import ROOT

EXAMPLE = str(ROOT / "examples" / "tasks" / "one_f_one_b.py")


@pytest.mark.processes
@pytest.mark.parametrize(("stages", "found"), [slow("2", ["4 arrays", "10 arrays"]), ("4", ["8 arrays", "14 arrays"])])
def test_two_processes(stages: str, found: list[str], tmp_path: Path):
    """Rank 0 of two has 4 matrices, rank 1 has 4 and the losses of 6 microbatches; of four, each process has two."""
    # Two devices for each stage, so each of two processes has as many devices as there are stages.
    options = ["-n", "2", "--devices-per-process", stages]
    with started(tmp_path, [*QUICK, *options, EXAMPLE, "--stages", stages]) as run:
        assert run.finish() == 0, run.stderr
        output = run.stdout
    lines = dict(re.findall(r"process (\d): loss [\d.]+; (\d+ arrays) equal plain jax\.jit", output))
    assert [lines[process] for process in sorted(lines)] == found, output
