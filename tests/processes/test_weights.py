"""Weights go to samplers on devices of several processes: equal bits, and no byte that the process had."""

from __future__ import annotations

import pytest

from tests.helpers import slow
from tests.processes.running import run_processes, told

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(("count", "ranks"), [(2, "all"), (4, "apart"), slow(4, "all")])
def test_samplers_on_other_processes(count: int, ranks: str):
    for output in run_processes(count, "run_weights.py", ranks, devices=2):
        assert "different values of the targets of trainer.stream_weights" in told(output)
        assert "layers/0/bias" in told(output)
