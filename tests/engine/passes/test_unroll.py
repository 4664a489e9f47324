"""Unrolling: programs, interpreted one instruction at a time on NumPy arrays, with and without liveness."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp_flax.engine.passes.unroll import unroll
from jaxpp_flax.engine.program.program import Program, Run, Transfer
from jaxpp_flax.engine.tracing.markers import mark_stage_end
from jaxpp_flax.engine.tracing.treduce import treduce
from jaxpp_flax.schedules import GPipe, Interleaved1F1B, Schedule, Std1F1B, ZeroBubble
from tests.engine.toys import built, chain, sgd_step
from tests.helpers import DIM, batch_of, tree_allclose

MICROBATCHES = 4
SCHEDULES = [GPipe(3), Std1F1B(3), ZeroBubble(3), Interleaved1F1B(4, 2)]
each_schedule = pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: type(s).__name__)


def arguments(schedule: Schedule) -> list[Any]:
    return jax.tree.leaves((chain(schedule.num_stages), batch_of(MICROBATCHES)))


def interpret(program: Program, arguments: Sequence[Any]) -> list[Any]:
    """Run a program; what is freed or donated is really gone, and every rank reads its own values alone."""
    arrays: dict[int, Any] = {}
    owner: dict[int, int] = {}
    for ranks, array in zip(program.arguments, arguments, strict=True):
        for rank, value in ranks.items():
            arrays[value], owner[value] = array, rank
    for (rank, microbatch), value in program.indices.items():
        arrays[value], owner[value] = np.int32(microbatch), rank
    for instruction in program.instructions:
        if isinstance(instruction, Run):
            task = program.tasks[instruction.task]
            assert {owner[v] for v in instruction.inputs} <= {instruction.rank}
            results = task.graph.run(*(arrays[v] for v in instruction.inputs))
            for position in task.donate:
                del arrays[instruction.inputs[position]]
            for value, result in zip(instruction.outputs, results, strict=True):
                assert value not in arrays
                arrays[value], owner[value] = result, instruction.rank
        elif isinstance(instruction, Transfer):
            for sent, received in zip(instruction.sent, instruction.received, strict=True):
                assert owner[sent] == instruction.source
                assert received not in arrays
                arrays[received], owner[received] = arrays[sent], instruction.target
        else:
            for value in instruction.values:
                assert owner[value] == instruction.rank
                del arrays[value]
    return [arrays[next(iter(result.values()))] for result in program.results]


@each_schedule
@pytest.mark.parametrize("donate", [False, True], ids=["kept", "donated"])
def test_a_program_computes_what_the_step_does(schedule: Schedule, donate: bool):
    values = arguments(schedule)
    given = [donate] * (2 * schedule.num_stages) + [False] * 2
    step = sgd_step(schedule)
    made = built(step, schedule.num_ranks, chain(schedule.num_stages), batch_of(MICROBATCHES), donated=given)
    expected = jax.tree.leaves(jax.jit(step)(chain(schedule.num_stages), batch_of(MICROBATCHES)))
    for program in (made.program, unroll(made.placed, schedule.num_ranks, made.settings.specs)):
        program.verify()
        # float32, with operations fused in one and not in the other
        tree_allclose(list(map(np.asarray, interpret(program, values))), list(map(np.asarray, expected)), rtol=1e-5)


@each_schedule
def test_every_rank_runs_its_schedule(schedule: Schedule):
    """Each scheduled task once, in the rank's own order; a fused task is one run."""
    made = built(sgd_step(schedule), schedule.num_ranks, chain(schedule.num_stages), batch_of(MICROBATCHES))
    for rank, tasks in enumerate(schedule.tasks(MICROBATCHES)):
        ran = [
            (made.program.tasks[i.task].stage, i.microbatch)
            for i in made.program.instructions
            if isinstance(i, Run) and i.rank == rank and i.microbatch >= 0
        ]
        wanted = [(task.stage, task.microbatch) for task in tasks]
        assert ran == wanted


def test_every_edge_between_ranks_is_one_transfer():
    made = built(sgd_step(Std1F1B(3)), 3, chain(3), batch_of(MICROBATCHES))
    pairs = Counter((i.source, i.target) for i in made.program.instructions if isinstance(i, Transfer))
    assert pairs == {(0, 1): 4, (1, 2): 4, (2, 1): 4, (1, 0): 4}
    assert all(len(i.sent) == len(i.received) == 1 for i in made.program.instructions if isinstance(i, Transfer))


def test_a_skip_goes_directly_to_its_user():
    def loss(params: Any, mb: Any) -> jax.Array:
        x = skip = jnp.tanh(mb["x"] @ params[0]["w"])
        x = jnp.tanh(mark_stage_end(x) @ params[1]["w"])
        x = mark_stage_end(x) @ params[2]["w"]
        return ((x + skip - mb["y"]) ** 2).mean()

    made = built(sgd_step(Std1F1B(3), loss), 3, chain(3), batch_of(MICROBATCHES))
    pairs = Counter((i.source, i.target) for i in made.program.instructions if isinstance(i, Transfer))
    assert pairs[0, 2] == MICROBATCHES


def test_the_last_microbatch_passes_no_carry_on():
    """Its next value is a result of the step, which goes to the stage that reads the leaf once, behind the loop."""

    def step(params: Any, mean: Any, batch: Any) -> Any:
        def body(mean: Any, mb: Any) -> Any:
            def loss(params: Any) -> Any:
                x = jnp.tanh(mb["x"] @ params[0]["w"])
                x = mark_stage_end(x) @ params[1]["w"] - mean
                return jnp.mean((x - mb["y"]) ** 2)

            return 0.9 * mean + 0.1 * mb["x"].mean(0) @ params[0]["w"], jax.value_and_grad(loss)(params)

        return treduce(body, batch, GPipe(2), init=mean)

    arguments = chain(2), np.zeros(DIM, np.float32), batch_of(MICROBATCHES)
    made = built(step, 2, *arguments)
    sent = Counter((i.source, i.target) for i in made.program.instructions if isinstance(i, Transfer) for _ in i.sent)
    assert sent == {(0, 1): MICROBATCHES + (MICROBATCHES - 1) + 1, (1, 0): MICROBATCHES}
    results = interpret(made.program, jax.tree.leaves(arguments))
    expected = jax.tree.leaves(jax.jit(step)(*arguments))
    tree_allclose(list(map(np.asarray, results)), list(map(np.asarray, expected)), rtol=1e-5)  # as above


def test_instructions_grow_linearly_and_tasks_do_not():
    sizes = []
    for microbatches in (4, 8, 12):
        program = built(sgd_step(Std1F1B(3)), 3, chain(3), batch_of(microbatches)).program
        runs = sum(isinstance(i, (Run, Transfer)) for i in program.instructions)
        sizes.append((len(program.tasks), runs))
    assert sizes[0][0] == sizes[1][0] == sizes[2][0]
    assert sizes[2][1] - sizes[1][1] == sizes[1][1] - sizes[0][1]
