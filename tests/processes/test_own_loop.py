"""A loop that owns its state, and batches of several sizes, in several processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes.running import run_processes

pytestmark = pytest.mark.processes


def test_two_processes(tmp_path: Path):
    for output in run_processes(2, "run_own_loop.py", str(tmp_path)):
        assert "all done" in output
