"""Each moment belongs to one part."""

from __future__ import annotations

import pytest

from jaxpp_flax.trainers.metrics.clock import Clock, timed


class Time:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Worker:
    def __init__(self) -> None:
        self.time = Time()
        self.clock = Clock(now=self.time)

    @timed("save")
    def save(self, seconds: float) -> str:
        self.time.now += seconds
        if seconds > 5:
            raise OSError("disk full")
        return "saved"


def test_a_part_inside_another_one_interrupts_it():
    worker = Worker()
    with worker.clock.part("dispatch"):
        worker.time.now += 1
        assert worker.save(2) == "saved"
        worker.time.now += 4
    worker.time.now += 0.5
    found = worker.clock.read()
    assert (found["dispatch"], found["save"], found["other"]) == (5, 2, 0.5)
    assert sum(found.values()) == worker.time.now


def test_an_error_ends_its_part():
    worker = Worker()
    with pytest.raises(OSError, match="disk full"):
        worker.save(6)
    worker.time.now += 1
    assert (worker.clock.read()["save"], worker.clock.read()["other"]) == (6, 1)


def test_drawing_items_counts_and_using_them_does_not():
    worker = Worker()

    def items():
        for item in range(3):
            worker.time.now += 1
            yield item

    for _ in worker.clock.each(items(), "data"):
        worker.time.now += 10
    assert (worker.clock.read()["data"], worker.clock.read()["other"]) == (3, 30)
