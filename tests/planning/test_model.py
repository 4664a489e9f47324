"""The model of a step: predicted bytes by the order of tasks, predicted seconds by the simulator."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpp_flax.planning.model import Hardware, StageLoad, StepModel, arrivals, walk_rank
from jaxpp_flax.schedules import GPipe, ScheduleError, Std1F1B, ZeroBubble, simulate
from jaxpp_flax.schedules.memory import StageBytes
from jaxpp_flax.schedules.residuals import KEEP, ResidualPlan, StageResiduals, host_copies
from tests.schedules.helpers import schedules

CARD = Hardware(flops=1.0, host_bandwidth=4.0)


@st.composite
def models(draw: st.DrawFn, max_ranks: int = 4, max_per_rank: int = 2, max_microbatches: int = 6) -> StepModel:
    schedule = draw(schedules(max_ranks, max_per_rank))
    number = st.integers(1, 4).map(float)
    load = st.builds(
        lambda f, r, i, p: StageLoad(
            forward=f, backward=2 * f, residual_bytes=4 * r, input_bytes=i, fixed_bytes={"parameters": p},
            gathered={"tied": 2.0, f"own {p}": p} if i < 3 else {},
        ),
        number, number, number, number,
    )  # fmt: skip
    stages = draw(st.lists(load, min_size=schedule.num_stages, max_size=schedule.num_stages))
    hardware = Hardware(flops=1.0, host_bandwidth=draw(st.sampled_from([1.0, 4.0, 100.0])), gather_bandwidth=8.0)
    count, fsdp = draw(st.integers(1, max_microbatches)), draw(st.sampled_from(["step", "microbatch"]))
    return StepModel(schedule=schedule, num_microbatches=count, stages=stages, hardware=hardware, fsdp=fsdp)


def test_a_step_by_hand():
    """1F1B on two ranks: rank 0 runs F0 F1 B0 F2 B1 F3 B2 B3 and holds two microbatches, of 10 bytes each."""
    load = StageLoad(forward=1.0, backward=2.0, residual_bytes=10.0, input_bytes=1.0, fixed_bytes={"parameters": 5.0})
    model = StepModel(schedule=Std1F1B(2), num_microbatches=4, stages=[load] * 2, hardware=CARD)
    kept = model.predict(ResidualPlan.keep(2))
    assert (kept.seconds, kept.peak_bytes, kept.host_bytes) == (15.0, (25.0, 15.0), (0.0, 0.0))
    assert (kept.moved, kept.recomputation) == (0.0, 0.0)
    again = model.predict(ResidualPlan([StageResiduals(recompute=True), KEEP]))
    # Two inputs of 1 byte; the backward makes the residuals of its own microbatch in place of its input.
    assert again.peak_bytes == (5.0 + 1.0 + 10.0, 15.0)
    assert (again.moved, again.recomputation) == (0.0, 4.0)
    assert again.seconds > kept.seconds
    plan = ResidualPlan([StageResiduals(recompute=True), KEEP])
    assert model.bytes_by_kind(0, plan) == {"parameters": 5.0, "residuals": 2.0, "workspace": 9.0}


def test_the_bytes_that_move_by_hand():
    load = StageLoad(forward=1.0, backward=2.0, residual_bytes=8.0, input_bytes=1.0)
    model = StepModel(schedule=Std1F1B(2), num_microbatches=4, stages=[load] * 2, hardware=CARD)
    plan = ResidualPlan([StageResiduals(offload=1.0), KEEP])
    found = model.predict(plan)
    # Rank 0 runs F0 F1 B0 F2 B1 F3 B2 B3: the values of microbatches 1 and 2 have the time to leave and come back.
    moved = 8.0 * len(host_copies(model.tasks[0], plan))
    assert moved
    assert (found.moved, found.recomputation) == (moved, 0.0)


@given(st.data())
def test_the_order_of_tasks_bounds_the_bytes_of_every_simulation(data: st.DataObject):
    model = data.draw(models())
    option = st.builds(
        StageResiduals,
        recompute=st.booleans(),
        offload=st.sampled_from([0.0, 0.5, 1.0]),
    )
    count = model.schedule.num_stages
    stages = data.draw(st.lists(option, min_size=count, max_size=count))
    window = data.draw(st.integers(1, 3))
    plan = ResidualPlan(stages, fetch_ahead=window, offload_within=data.draw(st.sampled_from([None, window])))
    predicted = model.predict(plan)
    step = simulate(
        model.schedule, model.costs, num_microbatches=model.num_microbatches,
        residuals=plan, host_link=model.hardware.host_link, gathers=model.gathers,
    )  # fmt: skip
    assert predicted.seconds == step.makespan
    for rank, (held, at_one_time) in enumerate(zip(predicted.peak_bytes, step.peak_memory, strict=True)):
        assert held >= model.rank_fixed[rank] + at_one_time - 1e-9
    kept = model.predict(ResidualPlan.keep(count))
    count = model.num_microbatches
    steady = simulate(model.schedule, model.costs, num_microbatches=count, gathers=model.gathers).peak_memory
    assert kept.peak_bytes == tuple(f + peak for f, peak in zip(model.rank_fixed, steady, strict=True))
    if plan.offload_within is None:  # tasks that wait for offloads may wait longer than the copies of a slow link
        assert all(a <= b for a, b in zip(predicted.peak_bytes, kept.peak_bytes, strict=True)) or any(
            stage.recompute for stage in stages
        )


def test_arrays_between_stages_by_hand():
    """1F1B on two ranks: rank 0 runs F0 F1 B0 F2 B1 F3 B2 B3; a gradient comes before the F in front of its B."""
    load = StageLoad(forward=1.0, backward=2.0, residual_bytes=10.0, sent_bytes=4.0)
    last = StageLoad(forward=1.0, backward=2.0, residual_bytes=10.0)
    model = StepModel(schedule=Std1F1B(2), num_microbatches=4, stages=[load, last], hardware=CARD)
    keep = ResidualPlan.keep(2)
    assert model.predict(keep).peak_bytes == (24.0, 14.0)
    assert model.bytes_by_kind(0, keep)["arrays between stages"] == 4.0


def test_gathers_by_hand():
    """1F1B on two ranks: rank 0 holds two microbatches of 10 bytes, and 6 gathered bytes, which take 2 seconds."""
    load = StageLoad(forward=1.0, backward=2.0, residual_bytes=10.0, gathered={"w": 6.0})
    card = Hardware(flops=1.0, host_bandwidth=4.0, gather_bandwidth=3.0)
    fields = {"schedule": Std1F1B(2), "num_microbatches": 4, "stages": [load] * 2, "hardware": card}
    keep = ResidualPlan.keep(2)
    once = StepModel(**fields, fsdp="step")
    assert once.predict(keep).seconds == 15.0 + 2.0 + 2.0  # the reduction after the loop
    assert once.predict(keep).peak_bytes == (26.0, 16.0)
    assert once.bytes_by_kind(0, keep) == {"residuals": 20.0, "gathered parameters": 6.0}
    each = StepModel(**fields)
    # On rank 0 an F takes 1 + 2 and a B 2 + 4; on rank 1 a fused task gathers and reduces once, and takes 3 + 4:
    # F0 ends at 3, B0 runs from 10 to 16, F2 to 19, B1 to 25, F3 to 28, its fused task to 35, B3 to 41.
    assert (each.predict(keep).seconds, each.predict(keep).peak_bytes) == (41.0, (20.0, 10.0))


def test_the_window_of_the_update_by_hand():
    load = StageLoad(
        forward=1.0, backward=2.0, residual_bytes=1.0, fixed_bytes={"parameters": 5.0}, streamed=(4.0, 4.0, 4.0)
    )
    fields = {"schedule": Std1F1B(2), "num_microbatches": 4, "stages": [load] * 2, "hardware": CARD}
    keep = ResidualPlan.keep(2)
    # All of the state at one time; two parameters' share a window; one parameter's does not fit a window.
    for window, held in ((100.0, 12.0), (8.0, 8.0), (1.0, 4.0)):
        model = StepModel(**fields, stream_window=window)
        assert model.predict(keep).peak_bytes == (5.0 + held, 5.0 + held)
        assert model.bytes_by_kind(0, keep) == {"parameters": 5.0, "optimizer state from the host": held}
    large = replace(load, residual_bytes=30.0)
    assert StepModel(**{**fields, "stages": [large] * 2}).predict(keep).peak_bytes == (65.0, 35.0)


def test_no_task_starts_before_the_offload_that_it_waits_for():
    load = StageLoad(forward=1.0, backward=2.0, residual_bytes=12.0)
    model = StepModel(schedule=Std1F1B(4), num_microbatches=8, stages=[load] * 4, hardware=CARD)
    stages = [StageResiduals(offload=1.0), KEEP, KEEP, KEEP]
    for within in (1, 2):
        plan = ResidualPlan(stages, fetch_ahead=2, offload_within=within)
        step = simulate(model.schedule, model.costs, num_microbatches=8, residuals=plan, host_link=CARD.host_link)
        position = {(e.task.stage, e.task.microbatch): n for n, e in enumerate(step.events[0]) if "fwd" in repr(e.task)}
        for copy in step.host_events[0]:
            after = position[copy.stage, copy.microbatch] + 1 + within
            assert copy.offload_end <= step.events[0][after].start


@pytest.mark.parametrize("wrong", [{"flops": 0.0}, {"host_bandwidth": -1.0}, {"link_latency": -1.0}, {"flops": True}])
def test_hardware_that_cannot_be_is_refused(wrong: dict[str, float]):
    name, value = next(iter(wrong.items()))
    with pytest.raises(ScheduleError, match=f"Hardware: {name}={value!r}; it must be a number"):
        Hardware(**{"flops": 1.0, "host_bandwidth": 1.0, **wrong})


def test_loads_for_other_stages_are_refused():
    load = StageLoad(forward=1.0, backward=2.0, residual_bytes=1.0)
    with pytest.raises(ScheduleError, match="StepModel has 2 loads, but the schedule has 3 stages"):
        StepModel(schedule=Std1F1B(3), num_microbatches=4, stages=[load] * 2, hardware=CARD)


def test_an_offload_needs_a_task_beside_it():
    with pytest.raises(ScheduleError, match="offload_within=0: it must be a whole number of at least 1"):
        ResidualPlan([KEEP], offload_within=0)


@pytest.mark.parametrize("wrong", [{"fetch_ahead": 1.5}, {"offload_within": 1.5}, {"offload_within": True}])
def test_numbers_of_tasks_are_whole(wrong: dict[str, Any]):
    with pytest.raises(ScheduleError, match="whole number of at least 1"):
        ResidualPlan([KEEP], **wrong)


@pytest.mark.parametrize("entry", ["keep", True, None])
def test_an_entry_that_is_no_stage_is_refused(entry: Any):
    with pytest.raises(ScheduleError, match="entry 1 of the ResidualPlan is"):
        ResidualPlan([KEEP, entry])


@pytest.mark.parametrize("wrong", [{"fixed_bytes": {"parameters": -1.0}}, {"streamed": [math.nan]}])
def test_bytes_that_cannot_be_are_refused(wrong: dict[str, Any]):
    with pytest.raises(ScheduleError, match="give a finite number of at least 0"):
        StageLoad(forward=1.0, backward=2.0, residual_bytes=1.0, **wrong)


def test_a_step_without_microbatches_is_refused():
    load = StageLoad(forward=1.0, backward=2.0, residual_bytes=1.0)
    with pytest.raises(ScheduleError, match="num_microbatches=0"):
        StepModel(schedule=Std1F1B(2), num_microbatches=0, stages=[load] * 2, hardware=CARD)


def test_a_split_backward_by_hand():
    """Rank 1 of two runs F I F I W W: at its second F it holds a microbatch, and what the first W reads."""
    stage = StageBytes(activation=8.0, saved=8.0, kept=3.0, received=2.0, passing=1.0)
    tasks = ZeroBubble(2).tasks(2)
    assert [task.kind.value for task in tasks[1]] == ["F", "I", "F", "I", "W", "W"]
    alone = walk_rank(tasks[1], [stage] * 2)
    assert (alone.peak, alone.live, alone.at_peak) == (
        3.0 + 8.0 + 1.0,
        0.0,
        {"residuals": 11.0, "arrays between stages": 1.0},
    )
    # The second input arrives before the first I; when its F starts, it is a residual.
    beside = walk_rank(tasks[1], [stage] * 2, arrivals=arrivals(tasks)[1])
    assert (beside.peak, beside.live) == (12.0, 0.0)


def test_what_moves_to_the_host_by_hand():
    """GPipe on a rank: F0 F1 F2 F3, then the backwards; each microbatch's 4 bytes leave and come back."""
    stages = [StageBytes(activation=4.0, saved=4.0)] * 2
    tasks, plan = GPipe(2).tasks(4)[0], ResidualPlan([StageResiduals(offload=1.0), KEEP], offload_within=1)
    memory = walk_rank(tasks, stages, copies=host_copies(tasks, plan))
    # In front of F2, microbatch 0 has left; in front of F3 it comes back, and microbatch 1 has left.
    assert (memory.peak, memory.live) == (12.0, 0.0)
    assert walk_rank(tasks, stages).peak == 16.0


def test_a_stage_that_recomputes_holds_its_activation_in_its_backward():
    again = StageBytes(activation=8.0, saved=1.0)
    assert walk_rank(Std1F1B(3).tasks(4)[0], [again] * 3).peak == 1.0 * 3 + 7.0
