"""Defaults and lists of schedules are JaxPP's; `tests/facts` compares names and parameters."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest

import jaxpp_flax.api as jaxpp

FWD, BWD, BWD_I, BWD_W = jaxpp.TaskType


def test_defaults_are_those_of_jaxpp():
    for function in (jaxpp.treduce, jaxpp.treduce_i):
        defaults = inspect.signature(function).parameters
        assert defaults["operation"].default == (jaxpp.Concat(), jaxpp.Add)
        assert defaults["axis"].default == 0
    for function in (jaxpp.mpmd_jit_with_loop, jaxpp.mpmd_jit_by_yield):
        parameters = inspect.signature(function).parameters.values()
        assert all(not p.default for p in parameters if p.kind is p.KEYWORD_ONLY)
    assert inspect.signature(jaxpp.collect_task_times_ms).parameters["enabled"].default is True
    assert inspect.signature(jaxpp.cross_mpmd_stack).parameters["axis"].default == 0
    assert jaxpp.Concat().axis == 0


def test_schedules_take_the_number_of_ranks_by_position_and_by_name():
    for schedule in (
        jaxpp.Interleaved1F1B(8, 4),
        jaxpp.Interleaved1F1B(num_stages=8, mpmd_dim=4),
        jaxpp.Interleaved1F1B(8, 4, True),
        jaxpp.Interleaved1F1B(num_stages=8, mpmd_dim=4, fuse_steady_state=True),
        jaxpp.KimiK2(8, 4, False),
        jaxpp.InterleavedGPipe(8, 4),
        jaxpp.DualPipeV(8, 4),
        jaxpp.DualPipeV(num_stages=8, mpmd_dim=4),
    ):
        assert isinstance(schedule, jaxpp.BaseSchedule)
        assert (schedule.num_stages, schedule.mpmd_dim) == (8, 4)
    assert jaxpp.Interleaved1F1B(8, 4, True).fuse_steady_state
    assert jaxpp.Interleaved1F1B(8, 4, True) != jaxpp.Interleaved1F1B(8, 4)
    for one_each in (jaxpp.Std1F1B, jaxpp.Eager1F1B, jaxpp.GPipe):
        assert one_each(4, mpmd_dim=4).mpmd_dim == one_each(num_stages=4).mpmd_dim == 4
        with pytest.raises(ValueError, match=r"num_stages=8 and num_ranks=4. Use 4 stages, or Interleaved1F1B"):
            one_each(8, 4)


def rows(schedule: jaxpp.BaseSchedule, microbatches: int) -> list[str]:
    """A line for each rank, fused tasks as their parts: `f0.1` is stage 0's forward of microbatch 1."""
    letters = {FWD: "f", BWD: "b", BWD_I: "i", BWD_W: "w"}
    lists: Any = schedule.tasks(microbatches)
    return [
        " ".join(
            f"{letters[part.fwd_or_bwd]}{part.stage_id}.{part.mubatch_idx}"
            for task in tasks
            for part in (task if isinstance(task, jaxpp.FusedTask) else (task,))
        )
        for tasks in lists
    ]


# As JaxPP 26.05 lists them, without idle steps and with fused tasks as their parts.
LISTS = {
    jaxpp.Std1F1B(2): ["f0.0 f0.1 b0.0 f0.2 b0.1 b0.2", "f1.0 b1.0 f1.1 b1.1 f1.2 b1.2"],
    jaxpp.Eager1F1B(2): ["f0.0 f0.1 f0.2 b0.0 b0.1 b0.2", "f1.0 b1.0 f1.1 b1.1 f1.2 b1.2"],
    jaxpp.GPipe(2): ["f0.0 f0.1 f0.2 b0.0 b0.1 b0.2", "f1.0 f1.1 f1.2 b1.0 b1.1 b1.2"],
    jaxpp.ZeroBubble(2): [
        "f0.0 f0.1 i0.0 w0.0 f0.2 i0.1 w0.1 i0.2 w0.2",
        "f1.0 i1.0 f1.1 i1.1 w1.0 f1.2 i1.2 w1.1 w1.2",
    ],
    jaxpp.Interleaved1F1B(4, 2): [
        "f0.0 f0.1 f0.2 f2.0 f2.1 f2.2 b2.0 b2.1 b2.2 b0.0 b0.1 b0.2",
        "f1.0 f1.1 f1.2 f3.0 b3.0 f3.1 b3.1 f3.2 b3.2 b1.0 b1.1 b1.2",
    ],
    jaxpp.KimiK2(4, 2): [
        "f0.0 f0.1 f0.2 f2.0 f2.1 f2.2 b2.0 b2.1 b2.2 b0.0 b0.1 b0.2",
        "f1.0 f1.1 f1.2 f3.0 f3.1 b3.0 f3.2 b3.1 b3.2 b1.0 b1.1 b1.2",
    ],
    jaxpp.DualPipeV(4, 2): [
        "f0.0 f0.1 f0.2 f3.0 i3.0 w3.0 f3.1 f0.3 i3.1 w3.1 f3.2 i0.0 "
        "w0.0 i3.2 w3.2 f3.3 i0.1 w0.1 i3.3 w3.3 i0.2 w0.2 i0.3 w0.3",
        "f1.0 f2.0 f1.1 f2.1 f1.2 i2.0 w2.0 f2.2 i1.0 w1.0 f1.3 i2.1 "
        "w2.1 f2.3 i1.1 w1.1 i2.2 w2.2 i1.2 w1.2 i2.3 i1.3 w1.3 w2.3",
    ],
}


@pytest.mark.parametrize("schedule", LISTS, ids=lambda schedule: type(schedule).__name__)
def test_lists_of_two_ranks_are_those_of_jaxpp(schedule: jaxpp.BaseSchedule):
    assert rows(schedule, 4 if isinstance(schedule, jaxpp.DualPipeV) else 3) == LISTS[schedule]


def test_interleaved_gpipe_runs_each_task_once():
    assert rows(jaxpp.InterleavedGPipe(4, 2), 2) == [
        "f0.0 f0.1 f2.0 f2.1 b2.0 b2.1 b0.0 b0.1",
        "f1.0 f1.1 f3.0 f3.1 b3.0 b3.1 b1.0 b1.1",
    ]


def test_a_schedule_written_for_the_first_versions():
    """Its tasks have no latency; its class has to become a frozen dataclass, as in JaxPP since October 2025."""

    @dataclasses.dataclass(frozen=True)
    class OneAtATime(jaxpp.BaseSchedule):
        def tasks(self, n_mubatches: int) -> jaxpp.ScheduleTasks:
            kinds = (FWD, BWD)
            stages = range(self.num_stages)
            return jaxpp.ScheduleTasks(
                [[jaxpp.Task(stage, m, kind) for m in range(n_mubatches) for kind in kinds] for stage in stages]
            )

    (first, _) = OneAtATime(2).tasks(1)
    assert first == [jaxpp.Task.make(0, 0, FWD), jaxpp.Task.make(0, 0, BWD)]
    assert [task.latency for task in first if isinstance(task, jaxpp.Task)] == [1, 2]
    assert jaxpp.Task(0, 0, FWD, 0).latency == 0


def test_a_misspelt_name():
    with pytest.raises(AttributeError, match=r"has no attribute 'treduc'\. Did you mean 'treduce'"):
        _ = jaxpp.treduc
