"""`verify` in a run of several processes: each runs the blocks of its ranks, and all have the same report."""

from __future__ import annotations

import json

import pytest

from tests.helpers import slow
from tests.processes.running import run_processes

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(("count", "devices"), [(2, 2), slow(3, 1)], ids=["2 with 2 devices", "3"])
def test_all_processes_have_one_report_that_names_the_process_at_fault(count: int, devices: int):
    outputs = run_processes(count, "run_verify.py", devices=devices)
    first, *others = (json.loads(output.split("found ")[1].splitlines()[0]) for output in outputs)
    assert all(other == first for other in others)
    assert first["agrees"], first["right"]
    assert first["same loss"]
    assert first["facts"] == count
    assert first["holders"] == list(range(count))
    sentence, kind, block, process = first["wrong"]
    assert (kind, process) == ("gradient", 1), sentence
    assert block in ("block_1", "block_2", "after_block_1"), sentence  # the blocks of stage 1
    assert "a doubled reduction" in sentence
    assert sentence.endswith("Process 1 holds it.")
    assert "the state is not finite already: params/" in first["not finite"]
