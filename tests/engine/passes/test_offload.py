"""Offloads and fetches in a program."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.extend.core
import jax.numpy as jnp
import pytest

from jaxpp_flax.engine.passes.offload import offload
from jaxpp_flax.engine.program.program import HOST_MEMORY, Free, Program, Run, Transfer, Wait
from jaxpp_flax.engine.tracing.ir import Graph, Value
from jaxpp_flax.engine.tracing.markers import mark_stage_end
from jaxpp_flax.schedules import GPipe, Interleaved1F1B, Std1F1B
from jaxpp_flax.schedules.residuals import ResidualPlan, StageResiduals, host_copies
from tests.engine.toys import built, chain, gradients, sgd_step
from tests.helpers import batch_of

OFFLOAD = StageResiduals(offload=1.0)


def program_of(schedule: Any, plan: ResidualPlan | None, step: Any = None) -> Program:
    arguments = chain(schedule.num_stages), batch_of(4)
    return built((step or sgd_step)(schedule), schedule.num_ranks, *arguments, residuals=plan).program


def moves(program: Program, rank: int) -> list[tuple[int, Transfer]]:
    return [
        (number, i)
        for number, i in enumerate(program.instructions)
        if isinstance(i, Transfer) and i.memory is not None and i.source == rank
    ]


@pytest.mark.parametrize("schedule", [GPipe(2), Std1F1B(3), Interleaved1F1B(4, 2)], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_copies_stand_where_the_simulator_has_them(schedule: Any, share: float):
    plan = ResidualPlan([StageResiduals(offload=share)] * schedule.num_stages, fetch_ahead=2)
    program = program_of(schedule, plan)
    for rank, tasks in enumerate(schedule.tasks(4)):
        expected = [(c.offload_after, "offload") for c in host_copies(tasks, plan)]
        expected += [(c.fetch_before - 1, "fetch") for c in host_copies(tasks, plan)]
        found: list[tuple[int, str]] = []
        position = -1
        for i in program.instructions:
            if isinstance(i, Run) and i.rank == rank and program.tasks[i.task].stage is not None:
                position += 1
            elif isinstance(i, Transfer) and i.memory is not None and i.source == rank:
                found.append((position, i.verb))
        assert sorted(found) == sorted(expected)


@pytest.mark.parametrize("schedule", [GPipe(2), Interleaved1F1B(4, 2)], ids=lambda s: type(s).__name__)
def test_waits_stand_where_the_simulator_has_them_and_device_copies_end_there(schedule: Any):
    plan = ResidualPlan([OFFLOAD] * schedule.num_stages, offload_within=1)
    program = program_of(schedule, plan)
    for rank, tasks in enumerate(schedule.tasks(4)):
        position, found = -1, []
        for number, i in enumerate(program.instructions):
            if isinstance(i, Run) and i.rank == rank and program.tasks[i.task].stage is not None:
                position += 1
            elif isinstance(i, Wait) and i.rank == rank:
                found.append(position + 1)
                assert program.instructions[number + 1] == Free(rank, i.sent)
        expected = [copy.gone_before for copy in host_copies(tasks, plan)]
        assert found
        assert sorted(found) == sorted(c for c in expected if c is not None)


def test_the_device_copy_is_freed_right_after_the_offload_and_parameters_stay():
    program = program_of(GPipe(2), ResidualPlan([OFFLOAD, OFFLOAD]))
    arguments = {value for ranks in program.arguments for value in ranks.values()}
    for rank in range(2):
        for number, move in moves(program, rank):
            assert arguments.isdisjoint(move.sent)
            assert program.instructions[number + 1] == Free(rank, move.sent)
    # A fetched value is donated to the backward as the kept one was.
    kept = program_of(GPipe(2), None)
    assert [t.donate for t in program.tasks] == [t.donate for t in kept.tasks]
    assert "offload v" in program.as_text()
    assert f"to {HOST_MEMORY} as v" in program.as_text()


def test_a_value_that_another_stage_of_the_rank_reads_stays():
    """A skip connection from stage 0 to stage 2, both on rank 0."""

    def loss(params: Any, mb: Any) -> Any:
        x = skip = jnp.tanh(mb["x"] @ params[0]["w"])
        x = mark_stage_end(jnp.sin(skip))
        x = mark_stage_end(jnp.tanh(x @ params[1]["w"]))
        x = mark_stage_end(jnp.tanh(x @ params[2]["w"]) * skip)
        return jnp.mean((x @ params[3]["w"] - mb["y"]) ** 2)

    schedule = Interleaved1F1B(4, 2)
    plan = ResidualPlan([OFFLOAD] * 4)
    program = program_of(schedule, plan, lambda schedule: gradients(schedule, loss))
    forward = next(t for t in program.tasks if t.name == "fwd_0")
    later = next(t for t in program.tasks if t.name == "fwd_2")
    (shared,) = set(forward.graph.outputs) & set(later.graph.inputs)
    position = forward.graph.outputs.index(shared)
    made = [(n, i.outputs[position]) for n, i in enumerate(program.instructions)
             if isinstance(i, Run) and program.tasks[i.task] is forward]  # fmt: skip
    for number, value in made:
        after = program.instructions[number + 1 :]
        reader = next(n for n, i in enumerate(after) if isinstance(i, Run) and program.tasks[i.task] is later)
        assert all(value not in i.sent for i in after[:reader] if isinstance(i, Transfer) and i.memory is not None)
    assert moves(program, 0)


def test_a_value_that_is_no_array_is_refused():
    unrolled = program_of(GPipe(2), None)
    tasks = list(unrolled.tasks)
    number, forward = next((n, t) for n, t in enumerate(tasks) if t.name == "fwd_0")
    strange = tuple(Value(jax.extend.core.AbstractToken()) for _ in forward.graph.outputs)
    tasks[number] = replace(forward, graph=Graph(forward.graph.inputs, strange, ()))
    plain = replace(
        unrolled, tasks=tuple(tasks), instructions=tuple(i for i in unrolled.instructions if not isinstance(i, Free))
    )
    with pytest.raises(TypeError, match=r"offloads stage 0, whose backward reads AbstractToken\(\): only arrays"):
        offload(plain, ResidualPlan([OFFLOAD, StageResiduals()]))
