"""A process that lives but does not go on is named by all others, and ends the run if the option says so."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.processes.faults import says
from tests.processes.running import Ended, start_processes
from tests.running import PATIENCE

pytestmark = pytest.mark.processes

# A process also waits for one that compiles for longer than it did, but not for so long on a busy machine.
REPORT, STUCK = 4.0, 15.0
LIMITS = {"JAXPP_FLAX_REPORT_AFTER": str(REPORT), "JAXPP_FLAX_STUCK_TIMEOUT": str(STUCK)}
# What the table says, and the last words about the place where process 1 stands.
TASK = r"It last began task \S+ \(rank \d.*\) in step \d+, \d+ s before, and was at "
DATA = TASK + r"batches \(.*run_stuck\.py:\d+\), waiting for the next batch of the data\."
PLACES = {
    # Tasks are begun before what they compute is: the last may be steps ahead of the callback.
    "callback": (says("a callback, data loader or collective that never ends"), TASK),
    "data": (says("a callback, data loader or collective that never ends"), DATA),
    "collective": (says("a callback, data loader or collective that never ends"), DATA),
}


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[str, list[Ended]]]:
    """All of them side by side: most of their time is the limit."""
    with ExitStack() as stack:
        started = {}
        for where in PLACES:
            count = 4 if where == "collective" else 3
            started[where] = stack.enter_context(start_processes(count, "run_stuck.py", where, environment=LIMITS))
        yield {where: processes.wait(PATIENCE) for where, processes in started.items()}


@pytest.mark.parametrize("where", PLACES)
def test_a_process_that_stands_still_is_named_by_all_others(where: str, runs: dict[str, list[Ended]]):
    words, place = PLACES[where]
    ended = runs[where]
    assert "step 1\n" in ended[1].output, ended[1].output[-3000:]
    for index, end in enumerate(ended):
        if index == 1:
            continue
        assert end.code == 69, end.output[-3000:]
        named = [line for line in end.output.splitlines() if "it lives, but all wait for it" in line]
        notice, last = named[0], next(line for line in named if "the run has ended" in line)
        for line, seconds in ((notice, REPORT), (last, STUCK)):
            assert words.search(line), line
            waited = re.search(r"ha(?:s|ve) waited (\d+) s", line)
            assert waited is not None, line
            # A heartbeat tells it a second later at most; the rest, below the default limit of 60 s, is for machines
            # that are busy with other tests.
            assert seconds <= int(waited[1]) <= seconds + 30, line
            assert re.search(place, line), line
    # Its own watch ends it too. Process 0, which serves the coordination here, ends last: else JAX would abort others.
    assert ended[1].code == 1, ended[1].output[-3000:]
    assert ended[0].seconds >= max(end.seconds for end in ended[1:])
