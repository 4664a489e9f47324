"""Batches that are `jax.Array`s over several processes are taken as they are; a run of several goes back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes.running import run_processes

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("processes", "devices"),
    [
        pytest.param(2, 2, id="a stage a process", marks=pytest.mark.slow),
        pytest.param(4, 1, id="two processes a stage"),
    ],
)
def test_they_give_what_whole_batches_give(processes: int, devices: int, tmp_path: Path):
    for output in run_processes(processes, "run_global_batches.py", str(tmp_path), devices=devices):
        assert "all done" in output
        assert "half: the batch has a jax.Array over several processes, float32[16, 6], sharded as" in output
        assert "NamedSharding(trainer.mesh.jax_mesh, PartitionSpec('data'))" in output
        assert "rows: batch['weight'] is a jax.Array over several processes, which has the whole batch" in output
        assert "directory: ['2', '4', '4.abandoned', '5', '6.abandoned']" in output
