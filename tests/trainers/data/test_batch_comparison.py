"""When the batches of several processes are compared, and which steps an error names."""

import itertools

import numpy as np
import pytest

from jaxpp_flax.trainers.data import batch_comparison
from jaxpp_flax.trainers.data.batch_comparison import BatchComparison


@pytest.fixture
def compared(monkeypatch):
    """The ranges of every comparison."""
    found = []
    monkeypatch.setattr(batch_comparison, "compare_hashes", lambda *arguments: found.append(arguments[-1]))
    return found


def several():
    alike = BatchComparison(None, "training")
    alike._several = True  # a process of several, whose answers the fixture gives
    return alike


def test_the_interval_is_bounded(compared):
    alike = several()
    for step in range(13, 13 + 300):  # a resumed run
        alike.before({"x": np.zeros(2)})
        alike.after(np.zeros(()), step)
    alike.end(312)
    counts = [1, 2, 4, 8, 16, 32, 64, 128, 192, 256]
    ranges = [(12 + begin + 1, 12 + end) for begin, end in itertools.pairwise(counts)]
    assert compared == ["batches 1 to 1", *[f"steps {begin} to {end}" for begin, end in ranges], "steps 269 to 312"]


def test_what_is_about_to_be_saved_is_compared_first(compared):
    alike = several()
    for step in range(1, 8):
        alike.before({"x": np.zeros(2)})
        alike.after(np.zeros(()), step)
        if step in (3, 7):
            alike.check(step)
    assert compared == ["batches 1 to 1", "steps 2 to 2", "steps 3 to 3", "steps 4 to 4", "steps 5 to 7"]


def test_one_process_compares_nothing(compared):
    alike = BatchComparison(None, "training")
    alike.before({"x": np.zeros(2)})
    alike.after(np.zeros(()), 1)
    alike.check(1)
    alike.end(1)
    assert compared == []
