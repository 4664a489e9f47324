"""A loss in two parts on several processes: the loss and gradients of the whole batch, on each process."""

from __future__ import annotations

import pytest

from tests.helpers import slow
from tests.processes.running import run_processes

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(("count", "arguments"), [slow(2, []), (4, ["data"])], ids=["stages", "data"])
def test_equals_the_whole_batch(count, arguments):
    for output in run_processes(count, "run_whole_batch.py", *arguments):
        assert "all done" in output
