"""Who stands still, by what all processes wait for."""

from __future__ import annotations

import pytest

from jaxpp_flax.processes.beats import AwaitedValue, Beat
from jaxpp_flax.processes.verdicts import Judge, Patience


def sent(on: int, run: int, number: int, seconds: float = 70.0) -> AwaitedValue:
    """A value of the global order."""
    return AwaitedValue(f"value {number}", on=on, run=run, number=number, seconds=seconds)


def at_barrier(name: str, seconds: float) -> Beat:
    loader = AwaitedValue("the next batch of the data", seconds=500.0)  # of another thread
    return Beat(barrier=f"{name} (1)", came=seconds, waits=(AwaitedValue(name, seconds=seconds), loader))


CASES = {
    "two that wait for each other: the earlier value is the cause": (
        {0: Beat(), 1: Beat(waits=(sent(2, 7, 30),)), 2: Beat(waits=(sent(1, 7, 12),))},
        1,
    ),
    "an earlier run comes first": (
        {0: Beat(waits=(sent(2, 7, 3),)), 1: Beat(), 2: Beat(waits=(sent(1, 6, 12),))},
        1,
    ),
    "it waits for a value outside of the order itself": (
        {0: Beat(), 1: Beat(waits=(AwaitedValue("where the data stands", on=0),)), 2: Beat(waits=(sent(1, 7, 12),))},
        0,
    ),
    "two of one rank: the one that began less holds the other in a collective": (
        {0: Beat(waits=(sent(1, 7, 12), sent(2, 7, 12))), 1: Beat(runs=7), 2: Beat(runs=6)},
        2,
    ),
    "one has not come to the barrier": (
        {0: at_barrier("trainer.save", 70.0), 1: at_barrier("trainer.save", 65.0), 2: Beat()},
        2,
    ),
    "nobody waits for another one": ({0: Beat(), 1: Beat(waits=(AwaitedValue("the next batch of the data"),))}, None),
}


@pytest.mark.parametrize("name", CASES)
def test_the_one_that_the_others_wait_for_is_named(name: str):
    beats, guilty = CASES[name]
    judge = Judge(Patience(silence=18.0, interval=1.0, report=60.0, stuck=65.0))
    judge.hear(beats, 0.0)
    found, failure = judge.notice(), judge.failure(0.0)
    assert (None if found is None else found[0]) == guilty
    assert (None if failure is None else failure.process) == guilty
    patient = Judge(Patience(silence=18.0, interval=1.0, report=80.0))
    patient.hear(beats, 0.0)
    assert patient.notice() is None
    assert patient.failure(0.0) is None


def test_of_processes_in_one_collective_all_are_named():
    judge = Judge(Patience(silence=18.0, interval=1.0, report=60.0))
    waits = (sent(0, 7, 12), sent(1, 7, 12))
    judge.hear({0: Beat(runs=7, seconds=71.0), 1: Beat(runs=7, seconds=70.0), 2: Beat(waits=waits)}, 0.0)
    guilty, _, text = judge.notice() or (None, 0.0, "")
    assert guilty == 0
    assert text.endswith("If it is in a collective, process 1 may be what it waits for.")
