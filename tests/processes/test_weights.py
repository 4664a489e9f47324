"""Weights go to samplers on devices of several processes: equal bits, and no byte that the process had."""

from __future__ import annotations

import pytest

from tests.helpers import slow
from tests.processes.running import run_processes, told

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("count", [2, slow(4)])
def test_samplers_on_other_processes(count: int):
    for output in run_processes(count, "run_weights.py", devices=2):
        assert "different values of the targets of trainer.stream_weights" in told(output)
        assert "layers/0/bias" in told(output)
