"""Liveness: what is donated, what is freed, and which slots are used again."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxpp_flax.engine.passes.liveness import allocate_slots
from jaxpp_flax.engine.program.program import Free, ProgramTask, Run, Transfer
from jaxpp_flax.engine.tracing.ir import Graph, Value
from jaxpp_flax.schedules import Std1F1B
from tests.engine.toys import built, by_hand, chain, identity, sgd_step
from tests.helpers import batch_of

ONE = ProgramTask("one", 0, identity((2,)))


@pytest.mark.parametrize("given", [False, True])
def test_an_argument_is_donated_only_if_it_is_given_away(given: bool):
    program = allocate_slots(by_hand([Run(0, -1, 0, (0,), (1,))], [ONE], [1], 2), [given])
    assert program.tasks[0].donate == (frozenset({0}) if given else frozenset())


def test_an_input_is_donated_only_if_every_run_allows_it():
    twice = [Run(0, 0, 0, (0,), (1,)), Run(0, 1, 0, (1,), (2,)), Run(0, 2, 0, (2,), (3,))]
    assert allocate_slots(by_hand(twice, [ONE], [3], 4), [True]).tasks[0].donate == {0}
    assert allocate_slots(by_hand(twice, [ONE], [3, 2], 4), [True]).tasks[0].donate == frozenset(), "slot 2 is a result"


def test_only_what_may_be_donated_is():
    program = by_hand([Run(0, -1, 0, (0,), (1,)), Run(1, -1, 0, (1,), (2,))], [ONE, ONE], [2], 3)
    found = allocate_slots(program, [True], donatable=[frozenset(), frozenset({0})]).tasks
    assert [task.donate for task in found] == [frozenset(), {0}]


def test_what_was_sent_is_not_donated():
    other = ProgramTask("other", 0, identity((2,)))
    program = by_hand(
        [Run(0, -1, 0, (0,), (1,)), Transfer(0, 1, (1,), (2,)), Run(1, -1, 0, (1,), (3,))], [ONE, other], [3], 4
    )
    assert allocate_slots(program, [False]).tasks[1].donate == frozenset()


def test_only_an_output_of_the_same_type_takes_over_memory():
    narrow = Value(jax.core.ShapedArray((2,), np.dtype("float32")))
    wide = Value(jax.core.ShapedArray((3,), np.dtype("float32")))
    task = ProgramTask("cast", 0, Graph((narrow,), (wide,), ()))
    program = allocate_slots(by_hand([Run(0, -1, 0, (0,), (1,))], [task], [1], 2), [True])
    assert program.tasks[0].donate == frozenset()
    assert program.instructions[1] == Free(0, (program.arguments[0][0],), (program.arguments[0][0],))


def test_slots_are_used_again_on_their_rank_alone():
    runs = [Run(0, m, 0, (m,), (m + 1,)) for m in range(9)]
    assert allocate_slots(by_hand(runs, [ONE], [9], 10), [True]).num_slots == 2
    program = built(sgd_step(Std1F1B(3)), 3, chain(3), batch_of(4)).program
    home: dict[int, int] = dict(program.preset())
    for i in program.instructions:
        rank = i.target if isinstance(i, Transfer) else i.rank
        for slot in i.writes():
            assert home.setdefault(slot, rank) == rank


def test_what_nobody_reads_is_freed_at_once():
    program = allocate_slots(by_hand([Run(0, -1, 0, (0,), (1,)), Run(0, -1, 0, (0,), (2,))], [ONE], [2], 3), [False])
    assert isinstance(program.instructions[1], Free)
    assert program.instructions[1].slots == program.instructions[0].writes()
