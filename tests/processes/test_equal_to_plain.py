"""The same step as one process and as several on loopback: what every process has of the results is the same."""

from __future__ import annotations

import pytest

from tests.processes.cases import NAMES
from tests.processes.running import results_of_cases, run_processes

pytestmark = pytest.mark.processes


# (processes, devices of each, group of cases, transport). By device_put, all processes follow one order: with three of
# them, of each transfer one is a bystander.
STARTS = [(3, 1, "one", ""), (2, 2, "two", ""), (3, 1, "one", "device_put")]
SLOW = [(2, 1, "one", ""), (4, 1, "one", ""), (4, 2, "two", "")]


@pytest.mark.parametrize(
    ("count", "devices", "group", "transport", "name"),
    [
        pytest.param(
            *start,
            name,
            id="-".join([f"{start[0]}x{start[1]}", *filter(None, [start[3], name])]),
            marks=[pytest.mark.slow] if start in SLOW else [],
        )
        for start in STARTS + SLOW
        for name in NAMES[start[2]]
    ],
)
def test_every_process_has_what_plain_jit_gives(count: int, devices: int, group: str, transport: str, name: str):
    found = results_of_cases(count, "run_cases.py", group, names=NAMES[group], devices=devices, transport=transport)
    assert not found[name], found[name]


def test_a_program_that_differs_is_refused_in_every_process():
    for output in run_processes(2, "run_mismatch.py"):
        assert "refused: the processes of this run do not agree on program 1" in output
        assert "process 0: " in output
        assert "process 1: " in output
        assert "tanh" in output
        assert "sin" in output
