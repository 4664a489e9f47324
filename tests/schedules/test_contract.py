"""What the engine relies on: legal tasks in order for the four basic schedules and their kin."""

import itertools

import pytest

from jaxpp_flax.schedules import (
    Circular,
    CustomSchedule,
    Eager1F1B,
    FusedTask,
    GPipe,
    Interleaved1F1B,
    InterleavedGPipe,
    KimiK2,
    ScheduleError,
    Std1F1B,
    Task,
    TaskKind,
    ZeroBubble,
    ZeroBubbleH2,
    by_name,
    merge_order,
    names,
    validate,
)
from jaxpp_flax.schedules.task import backward, backward_input, backward_weight, forward, fused
from tests.schedules.helpers import shape_of


def test_tasks_print_as_jaxpp_does():
    printed = [repr(Task(kind, 2, 0)) for kind in TaskKind]
    assert printed == ["fwd_2__0", "bwd_2__0", "bwd_i_2__0", "bwd_w_2__0", "FusedTask(fwd_2__0, bwd_2__0)"]


def test_a_fused_task_is_a_kind_made_of_its_two_halves():
    assert FusedTask(forward(3, 0), backward(3, 0)) == fused(3, 0) == Task(TaskKind.FUSED, 3, 0)
    for halves in ((forward(3, 1), backward(3, 0)), (forward(3, 0), backward_input(3, 0))):
        with pytest.raises(ScheduleError, match="the forward and the whole backward of one microbatch"):
            FusedTask(*halves)


@pytest.mark.parametrize("cls", [GPipe, Std1F1B, Eager1F1B])
def test_one_stage_per_rank_is_legal(cls):
    for stages, microbatches in itertools.product([1, 2, 3, 4, 6], [1, 2, 3, 5, 8]):
        schedule = cls(stages)
        lists = schedule.tasks(microbatches)
        validate(schedule, microbatches)
        validate(lists, microbatches)
        if cls is Std1F1B:
            bounds = [schedule.max_live_microbatches(stage, microbatches) for stage in range(stages)]
            assert bounds == [min(microbatches, stages - stage) for stage in range(stages)]
        assert {task.kind is TaskKind.FUSED for task in lists[-1]} == {cls is not GPipe}


@pytest.mark.parametrize("cls", [Interleaved1F1B, KimiK2, InterleavedGPipe])
def test_interleaved_is_legal_for_any_number_of_microbatches(cls):
    for ranks, per_rank in ((1, 1), (1, 3), (2, 2), (2, 4), (4, 2), (3, 4)):
        for microbatches in (1, 2, 3, 4, 5, 7, 8, 11, 16):
            schedule = cls(ranks * per_rank, ranks)
            validate(schedule, microbatches)
            fuses = any(t.kind is TaskKind.FUSED for tasks in schedule.tasks(microbatches) for t in tasks)
            assert fuses == schedule.fuses_last_stage


@pytest.mark.parametrize("name", names())
def test_merged_order_keeps_every_ranks_order_and_the_dependencies(name):
    schedule = by_name(name, 4, 2 if name in names(4, 2) else 4)
    lists = schedule.tasks(5)
    order = merge_order(lists)
    assert order == merge_order(lists)
    for rank, tasks in enumerate(lists):
        assert [task for r, task in order if r == rank] == tasks
    place = {task.cell[: task.cell.find("+")] if "+" in task.cell else task.cell: i
             for i, (_, task) in enumerate(order)}  # fmt: skip
    for m in range(5):
        for stage in range(3):
            assert place[f"{stage}F{m}"] < place[f"{stage + 1}F{m}"]


def test_equality():
    assert Interleaved1F1B(8, 4) == Interleaved1F1B(num_stages=8, num_ranks=4)
    assert Std1F1B(num_stages=4) == Std1F1B(4) != GPipe(4)
    assert hash(Std1F1B(4)) == hash(Std1F1B(4))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Interleaved1F1B(7, 4), "num_stages=7 .* num_ranks=4. Use 4 or 8 stages"),
        (lambda: Std1F1B(0), "num_stages must be at least 1, got 0"),
        (lambda: Std1F1B(2.5), "whole number, got 2.5"),
        (lambda: Std1F1B(2).tasks(0), "num_microbatches must be at least 1, got 0"),
        (lambda: by_name("1f1", 4), "Did you mean '1f1b'.*interleaved_1f1b"),
        (lambda: by_name("1f1b", 4, latency=1.0), "'1f1b' has no option 'latency'"),
        (lambda: by_name("1f1b", 8, 4), "one stage on each rank, got num_stages=8"),
    ],
)
def test_bad_counts_are_refused_with_a_remedy(make, text):
    with pytest.raises(ValueError, match=text):
        make()


@pytest.mark.parametrize(
    ("lists", "text"),
    [
        ([[forward(0, 0), backward(0, 0)], [backward(1, 0), forward(1, 0)]],
         ">1B0<.*waits for 1F0, which this rank runs later"),
        ([[forward(0, 0)]], "missing: 0B0"),
        ([[], []], "at least one task"),
        ([[forward(0, 0), forward(0, 0), backward(0, 0)]], "0F0 is there twice"),
        ([[forward(0, 0), None, backward(0, 0)]], "position 1: None is not a Task"),
        ([[forward(0, 0), backward(0, 0), forward(1, 0)], [backward(1, 0)]],
         "1B0: stage 1 belongs to rank 0. A stage.s weights live on one rank"),
        ([[forward(0, 0), backward(0, 0)], [backward(1, 0)]], "missing: 1F0"),
        ([[forward(0, 1), backward(0, 1)]], "1 microbatches, numbered from 0"),
        ([[fused(0, 0)], [fused(1, 0)]], r"only the last stage \(1\) can be fused"),
    ],
)  # fmt: skip
def test_a_faulty_list_is_shown(lists, text):
    with pytest.raises(ScheduleError, match=text):
        validate(lists, 1)


def test_a_deadlock_shows_where_each_rank_stands():
    """The second rank runs its third weight gradient before the input gradient that it needs."""
    ahead, split = [forward(1, m) for m in range(3)], [(backward_input(1, m), backward_weight(1, m)) for m in range(3)]
    lists = [
        [*(forward(0, m) for m in range(3)), *(backward(0, m) for m in range(3))],
        [*ahead, *split[0], *split[1], *reversed(split[2])],
        [make(2, m) for m in range(3) for make in (forward, backward_input, backward_weight)],
    ]
    with pytest.raises(ScheduleError) as error:
        validate(lists, 3)
    assert str(error.value).splitlines()[:4] == [
        "deadlock: no rank can go on.",
        "  rank 0 |    0F0 0F1 0F2 0B0 0B1 >0B2<      waits for 1I2, on rank 1",
        "  rank 1 | .. 1F2 1I0 1W0 1I1 1W1 >1W2< 1I2  waits for 1I2, which this rank runs later",
        "  rank 2 | .. 2I1 2W1 2F2 2I2 2W2            has run all its tasks",
    ]


def test_one_order_has_one_schedule_whatever_its_name():
    listed = [str(by_name(name, 3, 3).tasks(8)) for name in names(3, 3)]
    assert len(set(listed)) == len(listed)
    for name, other in (
        ("latency_hiding_1f1b", "eager_1f1b"),
        ("LatencyHiding1F1B", "eager_1f1b"),
        ("interleaved_1f1b", "eager_1f1b"),
        ("interleaved_gpipe", "gpipe"),
        ("circular", "gpipe"),
    ):
        assert by_name(name, 3) == by_name(name, 3, 3) == by_name(other, 3)
    assert by_name("latency_hiding_1f1b", 3, latency=2.5).tasks(9) != by_name("eager_1f1b", 3).tasks(9)
    assert type(by_name("circular", 6, 3)) is Circular


def test_schedules_are_equal_when_they_run_alike():
    """The engine compiles a step once for equal schedules, so schedules that differ must not be equal."""
    listed = [by_name(name, *shape_of(name, 3, 2)) for name in names()]
    for i, one in enumerate(listed):
        for j, other in enumerate(listed):
            assert (one == other) is (i == j), (one, other)
    assert ZeroBubbleH2(3, latency=0.5) == ZeroBubbleH2(3, latency=0.5)
    assert hash(ZeroBubbleH2(3, latency=0.5)) == hash(ZeroBubbleH2(3, latency=0.5))
    assert CustomSchedule(ZeroBubble(2).tasks(3)) != CustomSchedule(ZeroBubble(2).tasks(4))
