"""`verify` in a run of several processes: each runs the blocks of its ranks, and all have the same report."""

from __future__ import annotations

import pytest

from tests.helpers import slow
from tests.processes.running import run_processes, told

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("count", "devices", "stages"), [(2, 2, 2), slow(3, 1, 3), slow(4, 1, 2)], ids=["2 with 2 devices", "3", "2x2"]
)
def test_all_processes_have_one_report_that_names_the_process_at_fault(count: int, devices: int, stages: int):
    outputs = run_processes(count, "run_verify.py", str(stages), devices=devices)
    first, *others = map(told, outputs)
    assert all(other == first for other in others)
    assert first["agrees"], first["right"]
    assert first["same loss"]
    assert first["facts"] == count
    each = count // stages  # of several processes of a stage, the first one runs its blocks
    assert first["holders"] == list(range(0, count, each))
    sentence, kind, block, process = first["wrong"]
    assert (kind, process) == ("gradient", each), sentence
    assert block in ("block_1", "block_2", "after_block_1"), sentence  # the blocks of stage 1
    assert "a doubled reduction" in sentence
    assert sentence.endswith(f"Process {each} holds it.")
    assert "the state before the step is not finite: params/" in first["not finite"]
