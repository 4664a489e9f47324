"""The measured step, where ranks wait for each other; its numbers are in tests/planning/test_profile.py."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from jaxpp_flax.engine.program.program import Program, Transfer
from jaxpp_flax.engine.runtime.measuring import profile


def measure(first: Callable[[list[Any]], None], second: Callable[[list[Any]], None]) -> None:
    """Two ranks send to each other: rank 0 runs `first`, then rank 1 runs `second`."""
    transfers = (Transfer(0, 1, (0,), (1,)), Transfer(1, 0, (1,), (2,)))
    program = Program(transfers, (), (), (), {}, 3, 2)
    profile.run_profiled(program, [first, second], [None] * 3, range(2))


def test_what_does_not_arrive_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(profile, "_WAIT_SECONDS", 0.01)
    hold = threading.Event()
    try:
        with pytest.raises(RuntimeError) as error:
            measure(lambda _: hold.wait(60) and None, lambda _: None)
    finally:
        hold.set()
    text = r"transfer 0 .* did not arrive within 0 s: .* Measure a smaller batch"
    with pytest.raises(TimeoutError, match=text):
        raise error.value.__cause__ or error.value


def test_the_failure_of_another_rank_is_the_cause():
    reason = ValueError("of the other rank")

    def fail(_: list[Any]) -> None:
        raise reason

    for steps in ((fail, lambda _: None), (lambda _: None, fail)):
        with pytest.raises(RuntimeError, match=r"a task failed .* its error is above") as error:
            measure(*steps)
        assert error.value.__cause__ is reason


def test_transfers_of_several_processes_begin_in_one_order():
    """This process has rank 1 of three: those between the others come in their places."""
    begun: list[int] = []
    ends = [(0, 2), (1, 2), (2, 0), (0, 1), (2, 0)]
    transfers = tuple(
        Transfer(source, target, (number,), (number + 5,)) for number, (source, target) in enumerate(ends)
    )
    program = Program(transfers, (), (), (), {}, 10, 3)
    steps = [lambda _, number=number: begun.append(number) for number in range(5)]
    profile.run_profiled(program, steps, [None] * 10, [1], range(5))
    assert begun == list(range(5))
