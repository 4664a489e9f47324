"""Every named schedule, and a user's own, runs as it is written and computes what plain `jax.jit` does."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxpp_flax.engine.jit import MpmdFunction, mpmd_jit_with_loop
from jaxpp_flax.engine.program.program import Program, Run
from jaxpp_flax.schedules import (
    CustomSchedule,
    Schedule,
    Task,
    ZeroBubble,
    by_name,
    names,
    read_csv,
    write_csv,
)
from jaxpp_flax.schedules.task import backward as whole
from jaxpp_flax.schedules.task import backward_input, backward_weight
from jaxpp_flax.schedules.task import forward as fwd
from tests.engine.toys import chain, mesh_of, sgd_step
from tests.helpers import batch_of, slow, tree_allclose

# The bound of issue 5. The sums of a step are taken in another order, which moves a few units in the last place.
RTOL = 1e-5


def step(params: Any, batch: Any, schedule: Schedule | None) -> Any:
    return sgd_step(schedule)(params, batch)


@functools.cache
def pipelined(num_ranks: int) -> MpmdFunction:
    """One function for all schedules, so that they share the executables of equal tasks."""
    return mpmd_jit_with_loop(step, mesh_of(num_ranks), static_argnums=2)


@functools.cache
def expected(num_stages: int, num_microbatches: int) -> Any:
    plain = jax.jit(step, static_argnums=2)
    return jax.tree.map(np.asarray, plain(chain(num_stages), batch_of(num_microbatches), None))


def tasks_run(program: Program) -> list[list[Any]]:
    """Each rank's tasks of the loop, in the order in which the program runs them."""
    ranks: list[list[Any]] = [[] for _ in range(program.num_ranks)]
    for instruction in program.instructions:
        if not isinstance(instruction, Run):
            continue
        made = program.tasks[instruction.task]
        if made.stage is None or made.kind is None:
            continue
        ranks[instruction.rank].append(Task(made.kind, made.stage, instruction.microbatch))
    return ranks


def check(schedule: Schedule, num_microbatches: int) -> None:
    """The results are those of `jax.jit`, and what ran is the schedule, task by task."""
    params, batch = chain(schedule.num_stages), batch_of(num_microbatches)
    compiled = pipelined(schedule.num_ranks).compile(params, batch, schedule)
    actual = jax.tree.map(np.asarray, compiled(params, batch))
    tree_allclose(actual, expected(schedule.num_stages, num_microbatches), rtol=RTOL)
    assert tasks_run(compiled.program) == schedule.tasks(num_microbatches)


def named(name: str) -> Schedule:
    """On three ranks with a stage each, or, where it can, on two with two stages each."""
    several = name in names(num_stages=4, num_ranks=2)
    return by_name(name, 4, 2) if several else by_name(name, 3)


@pytest.mark.parametrize("name", names())
def test_named_schedules(name: str):
    check(named(name), 5)


# Fewer microbatches than stages: the shortest orders of the split backward.
@pytest.mark.parametrize(
    ("name", "microbatches"),
    [
        (name, count) if (name, count) in (("zero_bubble_h2", 1), ("dualpipe_v", 2)) else slow(name, count)
        for name in names()
        if named(name).splits_backward
        for count in (1, 2)
    ],
)
def test_split_backward_with_few_microbatches(name: str, microbatches: int):
    check(named(name), microbatches)


def test_a_schedule_from_lists_of_tasks():
    """Weight gradients late and in another order than their inputs' gradients, microbatches out of order."""
    first = [fwd(0, 1), fwd(0, 0), fwd(0, 2), whole(0, 1), whole(0, 2), whole(0, 0)]
    second = [fwd(1, 1), None, fwd(1, 0), fwd(1, 2)]
    second += [backward_input(1, m) for m in (1, 2, 0)] + [backward_weight(1, m) for m in (0, 2, 1)]
    third = [task for m in (1, 0, 2) for task in (fwd(2, m), backward_input(2, m))]
    third += [backward_weight(2, m) for m in (2, 1, 0)]
    check(CustomSchedule([first, second, third]), 3)


def test_a_placement_of_ones_own():
    """Three stages on two ranks: the first and the last on rank 1, the last fused."""
    middle = [task for m in range(3) for task in (fwd(1, m), whole(1, m))]
    outer = [task for m in range(3) for task in (fwd(0, m), fwd(2, m), whole(2, m), whole(0, m))]
    schedule = CustomSchedule([middle, outer])
    assert [schedule.rank_of(stage) for stage in range(3)] == [1, 0, 1]
    check(schedule, 3)


def test_a_schedule_from_a_file(tmp_path: Path):
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0F1,,,0I0,0I1,0W0,0W1\n,1F0,1F1,,1I0,,1I1,1W1,1W0\n,,2F0,2I0,2F1,2I1,2W0,2W1\n")
    schedule = read_csv(path)
    assert schedule.tasks(2)[1][-2:] == [backward_weight(1, 1), backward_weight(1, 0)]
    write_csv(ZeroBubble(3), path, num_microbatches=5)
    check(read_csv(path), 5)
