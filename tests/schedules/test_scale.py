"""Growth: linear time."""

import sys

import pytest

from jaxpp_flax.schedules import Interleaved1F1B, Std1F1B, ZeroBubble, simulate, validate


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
@pytest.mark.parametrize("action", [lambda s, m: validate(s, m), lambda s, m: simulate(s, num_microbatches=m)])
def test_work_grows_linearly(schedule, action):
    small, large = (calls(lambda m=m: action(schedule, m)) for m in (32, 256))
    assert large <= 8.2 * small


def test_a_large_schedule_is_exact():
    step = simulate(Std1F1B(32), num_microbatches=128)
    assert step.makespan == (128 + 31) * 3
    assert step.peak_memory == tuple(float(32 - r) for r in range(32))
