"""A process that lives but does not go on is named by all others, and ends the run if the option says so."""

from __future__ import annotations

import re
import signal

import pytest

from tests.processes.running import start_processes

pytestmark = pytest.mark.processes

LIMITS = {"JAXPP_FLAX_REPORT_AFTER": "3", "JAXPP_FLAX_STUCK_TIMEOUT": "6"}
# Where process 1 stands: the last words about it.
TASK = r"It last began task \S+ \(rank 1.*\) in step \d+, \d+ s before, and was at "
PLACES = {
    "callback": TASK.replace(".*", r", stage 1, microbatch \d"),
    "data": TASK + r"batches \(.*run_stuck\.py:\d+\), waiting for the next batch of the data\.",
    "host": TASK + r"stands\.on_step \(.*run_stuck\.py:\d+\)\.",
}


@pytest.mark.parametrize("where", PLACES)
def test_a_process_that_stands_still_is_named_by_all_others(where: str):
    with start_processes(3, "run_stuck.py", where, environment=LIMITS) as processes:
        since = processes.wait_for_output(1, "step 1\n")
        ended = processes.wait(since + 60)
    for index in (0, 2):
        output = ended[index].output
        assert ended[index].code == 69, output[-3000:]
        assert ended[index].seconds - since < 40
        named = [line for line in output.splitlines() if "process 1: it lives, but all wait for it" in line]
        notice, end = named[0], next(line for line in named if "the run has ended" in line)
        for line in (notice, end):
            assert re.search(r"process \d has waited \d+ s", line) or "have waited" in line, line
            assert re.search(PLACES[where], line), line
    # Its own watch ends it too; or JAX, if process 0, which serves the coordination here, has ended before.
    assert ended[1].code in (1, -signal.SIGABRT)
