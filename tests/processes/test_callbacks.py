"""Callbacks and trackers of a run of two processes: one tracker, a trace of each process, one decision for both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.processes.running import run_processes, told

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("callbacks")


@pytest.fixture(scope="module")
def found(directory: Path) -> list[dict[str, Any]]:
    """What each process has found."""
    outputs = run_processes(2, "run_callbacks.py", str(directory))
    return [told(output) for output in outputs]


def test_the_tracker_of_one_process_is_opened_and_closed(found: list[dict[str, Any]]):
    # Step 2 is logged while step 3 is under way, after its predictions.
    rows = ["1 loss", "2 samples", "2 loss", "4 samples", "4 loss"]
    assert found[0]["calls"] == ["config of 2 processes", *rows, "close"]
    assert found[0]["files"] == ["rows_0.jsonl"]
    assert found[1]["calls"] == found[1]["files"] == []


def test_predictions_are_equal_in_all_processes_and_logged_by_one(found: list[dict[str, Any]]):
    first, second = (of["predicted"] for of in found)
    assert first == second
    assert first[0] != first[1], "the weights of steps 2 and 4"
    assert found[0]["logged"] == {"2": first[0], "4": first[1]}
    assert found[1]["logged"] == {}


def test_each_process_writes_a_trace_of_its_own_tasks(found: list[dict[str, Any]], directory: Path):
    assert sorted(path.name for path in (directory / "profile").iterdir()) == ["process_0", "process_1"]
    # `fwd_1` is of the predictions.
    assert [of["tasks"] for of in found] == [["bwd_0", "fwd_0"], ["fwd_1", "fwd_bwd_1"]]


def test_the_clock_of_one_process_decides_for_both(found: list[dict[str, Any]]):
    # A decision after a step holds four steps later, which no process has begun.
    assert [of["limited"] for of in found] == [[7, "the time limit of 1000 seconds"]] * 2
