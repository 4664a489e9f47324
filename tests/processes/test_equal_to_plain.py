"""The same step as one process and as several on loopback: what every process has of the results is the same."""

from __future__ import annotations

import pytest

from tests.processes.cases import NAMES
from tests.processes.running import results_of_cases, run_processes

pytestmark = pytest.mark.processes


# (processes, devices of each, group of cases, transport): the cases that run by default. By device_put, all processes
# follow one order: with three of them, of each transfer one is a bystander.
DEFAULT = {
    (3, 1, "one", ""): NAMES["one"],
    (2, 2, "two", ""): (
        "ranks-gpipe", "rows-clipped", "rows-interleaved", "rows-statistics", "rows-fsdp-step", "rows-many",
        "columns-data-chain", "columns-clipped", "columns-tied", "columns-odd", "columns-zero_bubble",
        "columns-offloaded", "columns-fsdp-step",
    ),
    (3, 1, "one", "device_put"): ("chain-1f1b", "chain-zero_bubble", "chain-interleaved", "tied", "odd-types"),
}  # fmt: skip
SLOW = {start: NAMES[start[2]] for start in [(2, 1, "one", ""), (4, 1, "one", ""), (4, 2, "two", "")]}


@pytest.mark.parametrize(
    ("start", "name"),
    [
        pytest.param(
            start,
            name,
            id="-".join([f"{start[0]}x{start[1]}", *filter(None, [start[3], name])]),
            marks=[pytest.mark.slow] if start in SLOW else [],
        )
        for start, names in (DEFAULT | SLOW).items()
        for name in names
    ],
)
def test_every_process_has_what_plain_jit_gives(start: tuple[int, int, str, str], name: str):
    count, devices, group, transport = start
    names = (DEFAULT | SLOW)[start]
    found = results_of_cases(count, "run_cases.py", group, names=names, devices=devices, transport=transport)
    assert not found[name], found[name]


def test_a_program_that_differs_is_refused_in_every_process():
    for output in run_processes(2, "run_mismatch.py"):
        assert "refused: the processes of this run do not agree on program 1" in output
        assert "process 0: " in output
        assert "process 1: " in output
        assert "tanh" in output
        assert "sin" in output
