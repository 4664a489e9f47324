"""Growth: linear time, and memory that the number of microbatches does not enter."""

import sys
import tracemalloc

import pytest

from jaxpp_flax.schedules import Interleaved1F1B, Std1F1B, ZeroBubble, summarize, validate


def calls(action) -> int:
    """How many Python function calls ``action`` makes: a measure that a busy machine cannot blur."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(trace)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("schedule", [Std1F1B(8), ZeroBubble(8), Interleaved1F1B(16, 8)], ids=repr)
@pytest.mark.parametrize("action", [lambda s, m: validate(s, m), lambda s, m: summarize(s, num_microbatches=m)])
def test_work_grows_linearly(schedule, action):
    small, large = (calls(lambda m=m: action(schedule, m)) for m in (64, 512))
    assert large <= 8.2 * small


def test_streaming_takes_no_memory_per_microbatch():
    peaks = []
    for microbatches in (200, 2000):
        tracemalloc.start()
        summarize(Std1F1B(8), num_microbatches=microbatches)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0] + 20_000


def test_summary_of_a_large_schedule_is_exact():
    step = summarize(Std1F1B(64), num_microbatches=256)
    assert step.makespan == (256 + 63) * 3
    assert step.peak_memory == tuple(float(64 - r) for r in range(64))


@pytest.mark.soak
def test_sixteen_million_tasks_by_streaming():
    step = summarize(Std1F1B(1024), num_microbatches=8192)
    assert step.makespan == (8192 + 1023) * 3
    validate(Std1F1B(1024), 8192)
