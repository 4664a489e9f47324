"""Sends overlap computation: a process computes on while what it has sent is still on its way."""

from __future__ import annotations

import pytest

from tests.processes.running import run_processes

pytestmark = pytest.mark.processes


def test_a_process_computes_on_while_its_sends_are_held_back():
    """If a task waited for the send before it, no send would ever leave: the deadline ends the processes."""
    first, second = run_processes(2, "run_slow_sends.py", timeout=120.0)
    assert "6 forward tasks have run before the first send" in first
    assert all("the results are right" in output for output in (first, second))
