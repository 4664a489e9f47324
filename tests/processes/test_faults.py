"""The table of faults on `docs/guides/processes.md`: each of its rows is a test."""

from __future__ import annotations

import re

import pytest

from jaxpp_flax.processes.failures import DEFAULT_FAILURE_TIMEOUT
from jaxpp_flax.processes.verdicts import Patience
from jaxpp_flax.processes.waits import REPORT_SECONDS
from jaxpp_flax.processes.watch import SILENCE_SHARE
from tests.processes.faults import COLUMNS, rows
from tests.running import ROOT

SILENCE = DEFAULT_FAILURE_TIMEOUT * SILENCE_SHARE
SECONDS = {1, Patience(silence=SILENCE, interval=1.0, report=60.0).soon, 4, SILENCE, REPORT_SECONDS}


def used() -> set[str]:
    """The faults whose rows the tests of processes look up."""
    files = [file for folder in ("processes", "launch") for file in (ROOT / "tests" / folder).rglob("test_*.py")]
    return {fault for file in files for fault in re.findall(r'says\("([^"]+)"\)', file.read_text(encoding="utf-8"))}


def test_each_row_is_a_test():
    assert set(rows()) == used()


@pytest.mark.parametrize("fault", rows())
def test_a_row_is_whole(fault: str):
    row = rows()[fault]
    assert all(row[column] for column in COLUMNS)
    assert {float(number) for number in re.findall(r"(\d+) s\b", row["after"])} <= SECONDS
