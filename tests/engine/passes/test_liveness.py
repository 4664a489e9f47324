"""Liveness: what is donated, and what is freed."""

from __future__ import annotations

from collections import Counter

import jax
import numpy as np
import pytest

from jaxpp_flax.engine.passes.liveness import donate_and_free
from jaxpp_flax.engine.program.program import Free, ProgramTask, Run, Transfer
from jaxpp_flax.engine.tracing.ir import Graph, Value
from jaxpp_flax.schedules import Std1F1B
from tests.engine.toys import built, by_hand, chain, identity, sgd_step
from tests.helpers import batch_of

ONE = ProgramTask("one", 0, identity((2,)))


@pytest.mark.parametrize("given", [False, True])
def test_an_argument_is_donated_only_if_it_is_given_away(given: bool):
    program = donate_and_free(by_hand([Run(0, -1, 0, (0,), (1,))], [ONE], [1], 2), [given], keep_received=False)
    assert program.tasks[0].donate == (frozenset({0}) if given else frozenset())


def test_an_input_is_donated_only_if_every_run_allows_it():
    twice = [Run(0, 0, 0, (0,), (1,)), Run(0, 1, 0, (1,), (2,)), Run(0, 2, 0, (2,), (3,))]
    assert donate_and_free(by_hand(twice, [ONE], [3], 4), [True], keep_received=False).tasks[0].donate == {0}
    assert (
        donate_and_free(by_hand(twice, [ONE], [3, 2], 4), [True], keep_received=False).tasks[0].donate == frozenset()
    ), "value 2 is a result"


def test_only_what_may_be_donated_is():
    program = by_hand([Run(0, -1, 0, (0,), (1,)), Run(1, -1, 0, (1,), (2,))], [ONE, ONE], [2], 3)
    found = donate_and_free(program, [True], keep_received=False, donatable=[frozenset(), frozenset({0})]).tasks
    assert [task.donate for task in found] == [frozenset(), {0}]


def test_what_was_sent_is_not_donated():
    other = ProgramTask("other", 0, identity((2,)))
    program = by_hand(
        [Run(0, -1, 0, (0,), (1,)), Transfer(0, 1, (1,), (2,)), Run(1, -1, 0, (1,), (3,))], [ONE, other], [3], 4
    )
    assert donate_and_free(program, [False], keep_received=False).tasks[1].donate == frozenset()


@pytest.mark.parametrize("keep", [False, True])
def test_what_was_received_is_kept_where_the_runtime_watches_it(keep: bool):
    received = ProgramTask("received", 1, identity((2,)))
    program = by_hand([Transfer(0, 1, (0,), (1,)), Run(0, -1, 1, (1,), (2,))], [received], [2], 3)
    donated = donate_and_free(program, [False], keep_received=keep).tasks[0].donate
    assert donated == (frozenset() if keep else {0})


def test_only_an_output_of_the_same_type_takes_over_memory():
    narrow = Value(jax.core.ShapedArray((2,), np.dtype("float32")))
    wide = Value(jax.core.ShapedArray((3,), np.dtype("float32")))
    task = ProgramTask("cast", 0, Graph((narrow,), (wide,), ()))
    program = donate_and_free(by_hand([Run(0, -1, 0, (0,), (1,))], [task], [1], 2), [True], keep_received=False)
    assert program.tasks[0].donate == frozenset()
    assert program.instructions[1] == Free(0, (program.arguments[0][0],), (program.arguments[0][0],))


def test_every_value_that_is_no_result_ends_where_it_is_read_last():
    """A donation or one free, right behind the last reader; what the caller keeps stays."""
    program = built(sgd_step(Std1F1B(3)), 3, chain(3), batch_of(4), donated=[True] * 6 + [False] * 2).program
    kept = {*program.returned, *program.indices.values(), *(v for a in program.arguments[6:] for v in a.values())}
    freed = Counter(v for i in program.instructions if isinstance(i, Free) for v in i.values)
    assert set(freed.values()) == {1}
    assert program.donated.isdisjoint(freed)
    assert {*freed, *program.donated} == set(program.ranks) - kept
    last: list[int] = []
    for instruction in program.instructions:
        if isinstance(instruction, Free):
            assert set(instruction.values) <= set(last)
        else:
            last = [*instruction.reads(), *instruction.writes()]


def test_what_nobody_reads_is_freed_at_once():
    program = donate_and_free(
        by_hand([Run(0, -1, 0, (0,), (1,)), Run(0, -1, 0, (0,), (2,))], [ONE], [2], 3), [False], keep_received=False
    )
    assert isinstance(program.instructions[1], Free)
    assert program.instructions[1].values == program.instructions[0].writes()
