"""Which values a transfer within one device may hand over instead of copying them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp_flax._compat import copy_arrays
from jaxpp_flax.api import MpmdMesh, mpmd_jit_with_loop
from jaxpp_flax.engine.passes.liveness import donate_and_free
from jaxpp_flax.engine.program.program import Free, Program, ProgramTask, Run, Transfer
from jaxpp_flax.engine.runtime import instruction_loop
from jaxpp_flax.engine.runtime.shared_buffers import handed_over
from jaxpp_flax.schedules import GPipe, Std1F1B, ZeroBubble
from tests.engine.toys import by_hand, chain, identity, made, mesh_of, sgd_step
from tests.helpers import batch_of

HERE, THERE = ProgramTask("here", 0, made((2,))), ProgramTask("there", 1, made((2,)))


def fits(program: Program) -> list[frozenset[int]]:
    numbers = [number for number, i in enumerate(program.instructions) if isinstance(i, Transfer)]
    return [handed_over(program, number) for number in numbers]


def test_a_value_that_its_maker_forgets_moves_and_may_be_donated():
    program = donate_and_free(
        by_hand(
            [Run(0, -1, 0, (0,), (1,)), Transfer(0, 1, (1,), (2,)), Run(1, -1, 1, (2,), (3,))], [HERE, THERE], [3], 4
        ),
        [False],
    )
    assert program.tasks[1].donate == {0}
    assert fits(program) == [{0}]


def kept_and_sent(*after: Run | Transfer, results: list[int], size: int) -> Program:
    """Value 1 is made on rank 0, sent to rank 1 as value 2, and read on rank 0 once more."""
    again = replace(HERE, name="again")
    program = [Run(0, -1, 0, (0,), (1,)), Transfer(0, 1, (1,), (2,)), *after, Run(2, -1, 0, (1,), (3,))]
    return donate_and_free(by_hand(program, [HERE, THERE, again], results, size), [False])


def test_a_value_that_both_read_is_copied():
    program = kept_and_sent(Run(1, -1, 1, (2,), (4,)), results=[3, 4], size=5)
    assert program.tasks[1].donate == {0}
    assert fits(program) == [frozenset()]


def test_a_value_that_is_returned_is_copied_unless_it_moves():
    assert fits(kept_and_sent(results=[3, 2], size=4)) == [frozenset()]
    moved = donate_and_free(by_hand([Run(0, -1, 0, (0,), (1,)), Transfer(0, 1, (1,), (2,))], [HERE], [2], 3), [False])
    assert fits(moved) == [{0}]


def test_the_callers_arrays_never_move():
    program = by_hand([Transfer(0, 1, (0,), (1,)), Run(0, -1, 1, (1,), (2,))], [THERE], [2], 3)
    kept = donate_and_free(program, [False])
    assert kept.tasks[0].donate == {0}
    assert fits(kept) == [frozenset()]
    given = donate_and_free(program, [True])
    assert any(isinstance(i, Free) and i.delete for i in given.instructions)
    assert fits(given) == [frozenset()]


def test_a_result_that_is_an_argument_as_it_came_does_not_move():
    program = donate_and_free(
        by_hand(
            [Run(0, -1, 0, (0,), (1,)), Transfer(0, 1, (1,), (2,)), Run(1, -1, 1, (2,), (3,))],
            [ProgramTask("same", 0, identity((2,))), THERE], [3], 4,
        ),
        [False],
    )  # fmt: skip
    assert fits(program) == [frozenset()]


def test_a_value_that_two_ranks_get_is_copied_once():
    third = ProgramTask("third", 2, made((2,)))
    reader = replace(THERE, name="reader")
    program = donate_and_free(
        by_hand(
            [
                Run(0, -1, 0, (0,), (1,)),
                Transfer(0, 1, (1,), (2,)),
                Transfer(0, 2, (1,), (3,)),  # the last use on rank 0, while rank 1 still has to read it
                Run(2, -1, 2, (3,), (4,)),
                Run(1, -1, 1, (2,), (5,)),
            ],
            [HERE, reader, third], [4, 5], 6,
        ),
        [False],
    )  # fmt: skip
    assert (program.tasks[1].donate, program.tasks[2].donate) == ({0}, {0})
    assert fits(program) == [frozenset(), {0}]


@pytest.mark.parametrize("make", [GPipe, Std1F1B, ZeroBubble])
def test_all_ranks_on_one_device_copy_less_and_compute_the_same(make: Any, monkeypatch: pytest.MonkeyPatch):
    copied: list[int] = []

    def counting(arrays: Any, shardings: Any) -> Any:
        copied.append(len(arrays))
        return copy_arrays(arrays, shardings)

    monkeypatch.setattr(instruction_loop, "copy_arrays", counting)
    step = sgd_step(make(3))
    params, batch = chain(3), batch_of(4)
    apart = mpmd_jit_with_loop(step, mesh_of(3), donate_argnums=0)
    device = jax.devices()[0]
    together = mpmd_jit_with_loop(
        step, MpmdMesh(jax.sharding.Mesh(np.array([device] * 3), ("stage",)), "stage"), donate_argnums=0
    )
    counts: list[int] = []
    states: list[Any] = []
    for function in (apart, together):
        state = jax.tree.map(jnp.array, params)
        function.compile(state, batch)  # places the microbatches' indices
        copied.clear()
        for _ in range(3):
            state, losses, _ = function(state, batch)
        counts.append(sum(copied))
        states.append(jax.tree.map(np.asarray, (state, losses)))
    jax.tree.map(np.testing.assert_array_equal, *states)
    sent = sum(len(i.sent) for i in together.compile(state, batch).program.instructions if isinstance(i, Transfer))
    assert counts[0] == 3 * sent
    # Gradients move. An activation that both stages keep is copied, since the later one's backward donates it.
    assert counts[1] <= counts[0] / 2
    jax.tree.map(np.asarray, batch)  # the caller's arrays live on
