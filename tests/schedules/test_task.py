"""The table of dependencies, and the fast loops that follow it."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from jaxpp_flax.schedules.progress import advance
from jaxpp_flax.schedules.task import Task, TaskKind, needs, results
from tests.schedules.helpers import costs_for, schedules


def test_the_table_in_full():
    """Three stages, one microbatch: the first stage, one between, the last one."""
    cells = {
        f"{stage}{kind.value}": [f"{n.stage}{n.kind.value}" for n in needs(Task(kind, stage, 0), 3)]
        for stage in range(3)
        for kind in TaskKind
    }
    assert cells == {
        "0F": [], "0B": ["0F", "1B"], "0I": ["0F", "1B"], "0W": ["0I"],
        "1F": ["0F"], "1B": ["1F", "2B"], "1I": ["1F", "2B"], "1W": ["1I"],
        "2F": ["1F"], "2B": ["2F"], "2I": ["2F"], "2W": ["2I"],
        "0F+B": ["1B"], "1F+B": ["0F", "2B"], "2F+B": ["1F"],
    }  # fmt: skip


def shuffled(data, lists, exchanges):
    """The lists after some exchanges of tasks that stand close: often legal still, often a deadlock."""
    generator = random.Random(data.draw(st.integers(0, 2**16)))
    lists = [list(tasks) for tasks in lists]
    for _ in range(exchanges):
        tasks = generator.choice(lists)
        at = generator.randrange(len(tasks))
        other = min(at + generator.randrange(4), len(tasks) - 1)
        tasks[at], tasks[other] = tasks[other], tasks[at]
    return lists


def run_by_table(lists, num_stages, table, delay):
    """(start, end) of every task that can run, and where each stuck rank stands, from the table alone."""
    made, times = {}, {}
    position, free = [0] * len(lists), [0.0] * len(lists)
    progress = True
    while progress:
        progress = False
        for rank, tasks in enumerate(lists):
            while position[rank] < len(tasks):
                task = tasks[position[rank]]
                wanted = needs(task, num_stages)
                if not all(need in made for need in wanted):
                    break
                arrivals = [
                    made[need][0] + (delay(made[need][1], rank, need) if made[need][1] != rank else 0.0)
                    for need in wanted
                ]
                start = max([free[rank], *arrivals])
                free[rank] = start + table.duration(task)
                times[task] = start, free[rank]
                made |= dict.fromkeys(results(task), (free[rank], rank))
                position[rank] += 1
                progress = True
    stuck = {rank: position[rank] for rank, tasks in enumerate(lists) if position[rank] < len(tasks)}
    return times, stuck, set(made)


@given(st.data(), schedules(max_ranks=4, max_per_rank=2), st.integers(1, 5), st.integers(0, 12))
def test_the_simulator_keeps_to_the_table(data, schedule, microbatches, exchanges):
    num_stages = schedule.num_stages
    table = data.draw(costs_for(num_stages)).table(num_stages)
    lists = shuffled(data, schedule.tasks(microbatches), exchanges)

    def delay(source, target, result):
        return 0.5 + table.sent_bytes(result)

    times, stuck, made = run_by_table(lists, num_stages, table, delay)
    got = {}
    blocked = advance(
        lists,
        num_stages,
        lambda rank, task, start, end: got.update({task: (start, end)}),
        table=table,
        delay=delay,
    )
    assert got == times
    assert {b.rank: b.position for b in blocked} == stuck
    for b in blocked:
        assert b.task == lists[b.rank][b.position]
        assert b.awaits in needs(b.task, num_stages)
        assert b.awaits not in made
