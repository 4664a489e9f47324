"""The timeline of a measured step; its numbers are in tests/planning/test_profile.py."""

from __future__ import annotations

import numpy as np

from jaxpp_flax.engine.program.program import HOST_MEMORY, Program, ProgramTask, Run, Transfer, Wait
from jaxpp_flax.engine.runtime.profile import Times, timed, timeline
from jaxpp_flax.engine.tracing.ir import Graph
from jaxpp_flax.schedules.task import Task, TaskKind

_F = TaskKind.FORWARD


def test_work_overlaps_as_it_may():
    """Two microbatches on two ranks: a task waits for its rank, and for what is sent to it."""
    first, second = (ProgramTask(f"fwd_{rank}", rank, Graph((), (), ()), stage=rank, kind=_F) for rank in range(2))
    instructions = (
        Run(0, 0, 0, (0,), (1,)),
        Transfer(0, 1, (1,), (2,)),
        Run(1, 0, 1, (2,), (3,)),
        Run(0, 1, 0, (0,), (4,)),
        Transfer(0, 1, (4,), (5,)),
        Run(1, 1, 1, (5,), (6,)),
    )
    program = Program(instructions, (first, second), ({0: 0},), (), {}, 7, 2)
    # Measured one after the other, by clocks that say the same.
    lasted = [2.0, 0.5, 3.0, 2.0, 0.5, 3.0]
    times = {number: (100.0 + 10 * number, 100.0 + 10 * number + seconds) for number, seconds in enumerate(lasted)}
    found = {(timing.rank, timing.task): (timing.start, timing.end) for timing in timeline(program, times)}
    assert found == {
        (0, Task(_F, 0, 0)): (0.0, 2.0),
        (0, Task(_F, 0, 1)): (2.0, 4.0),
        (1, Task(_F, 1, 0)): (2.5, 5.5),
        (1, Task(_F, 1, 1)): (5.5, 8.5),
    }


def test_a_rank_that_waits_for_an_offload_runs_nothing_meanwhile():
    task = ProgramTask("fwd_0", 0, Graph((), (), ()), stage=0, kind=_F)
    instructions = (
        Run(0, 0, 0, (0,), (1,)),
        Transfer(0, 0, (1,), (2,), HOST_MEMORY),
        Wait(0, (1,), (2,)),
        Run(0, 1, 0, (0,), (3,)),
    )
    program = Program(instructions, (task,), ({0: 0},), (), {}, 4, 1)
    times = {0: (0.0, 1.0), 1: (10.0, 14.0), 3: (20.0, 21.0)}
    assert [(timing.start, timing.end) for timing in timeline(program, times)] == [(0.0, 1.0), (5.0, 6.0)]


def test_a_clock_that_is_late_makes_no_time_negative():
    program = Program((Transfer(0, 1, (0,), (1,)),), (), ({0: 0},), (), {}, 2, 2)
    assert timeline(program, {0: (5.0, 4.0)}) == []


def test_a_process_that_only_passes_a_transfer_by_says_nothing_of_its_time():
    """With three processes or more, one that comes there last would make each transfer as short as nothing."""
    program = Program((Transfer(0, 1, (0,), (1,)),), (), ({0: 0},), (), {}, 2, 3)
    here: dict[str, Times] = {"sender": {}, "bystander": {}}
    for name, environment in (("sender", [np.zeros(2), None]), ("bystander", [None, None])):
        (step,) = timed(program, [lambda _: None], here[name])
        assert step is not None
        step(environment)
    assert [*here["sender"]] == [0]
    assert not here["bystander"]
