"""Arguments that lie on other ranks than a step reads: moved between processes, or refused in all of them."""

from __future__ import annotations

import pytest

from tests.processes.running import run_processes

pytestmark = pytest.mark.processes


def test_arguments_of_other_ranks():
    for output in run_processes(2, "run_fetch_arguments.py", devices=2):
        assert "279 moves" in output
        assert "all done" in output
        assert "cut over all: argument[0][0]['w'], float32[8, 8], " in output
