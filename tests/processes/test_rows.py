"""Processes that load only the examples they read train bit for bit as those that load whole batches."""

from __future__ import annotations

import pytest

from tests.processes.running import run_processes

pytestmark = pytest.mark.processes


def test_two_stages_of_two_processes():
    for process, output in enumerate(run_processes(4, "run_rows.py")):
        assert "all done" in output
        reads = f"process {process} reads 12 of the 24 examples of a batch (global_batch_size=24): 4 in each of 3 micro"
        assert "shape: batch['mask'] is a shape without a value (ShapeDtypeStruct" in output
        assert f"half: batch['mask'] has shape (6,), but {reads}" in output
        assert "Expected: local (12,), of (24,) global." in output
        assert f"whole: batch['mask'] has shape (24,), but {reads}" in output
        assert f"evaluate: batch['mask'] has shape (6,), but process {process} reads 8 of the 16 examples" in output
        assert "left over: the 3 examples of a batch cannot be shared evenly by the 2 data-parallel devices" in output
        assert "unlike: " in output
        assert "the same: batch['mask'] (places 4 to 7 of each microbatch)." in output
