"""The same step as one process and as several on loopback: what every process has of the results is the same."""

from __future__ import annotations

import pytest

from tests.processes.running import run_processes

pytestmark = [pytest.mark.slow, pytest.mark.processes]


@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_rank_in_each_process(count: int):
    for output in run_processes(count, "run_cases.py", "one"):
        assert "all cases done" in output


@pytest.mark.parametrize("count", [2, 4])
def test_two_devices_in_each_process(count: int):
    for output in run_processes(count, "run_cases.py", "two", devices=2):
        assert "all cases done" in output


def test_by_device_put_in_one_order_for_all():
    # Three processes: of each transfer, one is a bystander.
    environment = {"JAXPP_FLAX_TRANSPORT": "device_put"}
    for output in run_processes(3, "run_cases.py", "one", environment=environment):
        assert "all cases done" in output


def test_a_program_that_differs_is_refused_in_every_process():
    for output in run_processes(2, "run_mismatch.py"):
        assert "refused: the processes of this run do not agree on program 1" in output
        assert "process 0: " in output
        assert "process 1: " in output
        assert "tanh" in output
        assert "sin" in output
