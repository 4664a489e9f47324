"""An assignment and its residuals under a limit: found together, and never a longer step than either alone."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpp_flax.assignment.limited import LimitedStep, balance_within
from jaxpp_flax.assignment.memory import Held, MemoryModel, live_counts
from jaxpp_flax.assignment.simulated_step import StepTime
from jaxpp_flax.planning import Hardware
from jaxpp_flax.schedules import by_name
from jaxpp_flax.schedules.residuals import ResidualPlan


def step_of(limit: float, *, parameters=(4, 4, 4, 4, 4, 4), activations=(8, 8, 8, 8, 8, 8), name="1f1b", ranks=3):
    """Six blocks on three stages; a forward takes 1 second, and a copy of 8 bytes to the host takes 1 second."""
    schedule = by_name(name, 3 if ranks == 3 else 2 * ranks, ranks)
    held = [Held(kind="parameters", nbytes=float(n), blocks=(block,)) for block, n in enumerate(parameters)]
    held += [Held(kind="activations", nbytes=float(n), blocks=(block,)) for block, n in enumerate(activations)]
    count = len(parameters)
    time = StepTime(schedule=schedule, num_microbatches=8, forward=[1.0] * count, backward=[2.0] * count)
    memory = MemoryModel(
        held=held, num_blocks=count, rank_of=tuple(map(schedule.rank_of, range(schedule.num_stages))),
        live=live_counts(schedule, 8), limits=(limit,) * schedule.num_ranks,
    )  # fmt: skip
    card = Hardware(flops=1.0, host_bandwidth=8.0)
    return LimitedStep(time=time, seconds=1.0, memory=memory, sent=[0.0] + [1.0] * (count - 1), hardware=card)


@pytest.mark.parametrize(("name", "ranks"), [("1f1b", 3), ("gpipe", 3), ("interleaved_1f1b", 2)])
def test_the_model_counts_the_bytes_of_the_assignment(name, ranks):
    step = replace(step_of(1e9, name=name, ranks=ranks), sent=[0.0] * 6)
    count = step.time.schedule.num_stages
    for sizes in [s for s in itertools.product((1, 2, 3), repeat=count) if sum(s) == 6]:
        model = step.model(sizes)
        assert list(model.predict(ResidualPlan.keep(count)).peak_bytes) == step.memory.rank_bytes(sizes)
        assert model.predict(ResidualPlan.keep(count)).seconds == step.time(sizes)


def test_what_a_compiled_step_held_besides_counts_in_both_models():
    step = step_of(1e9)
    step = replace(step, memory=replace(step.memory, left_out=(5.0, 0.0, 7.0)), sent=[0.0] * 6)
    predicted = step.model([2, 2, 2]).predict(ResidualPlan.keep(3)).peak_bytes
    assert list(predicted) == step.memory.rank_bytes([2, 2, 2]) == [8.0 + 48.0 + 5.0, 8.0 + 32.0, 8.0 + 16.0 + 7.0]
    assert step.model([2, 2, 2]).bytes_by_kind(0, ResidualPlan.keep(3))["other arrays"] == 5.0


def test_gathers_and_the_update_count_in_both_models():
    """Two blocks of a stage gather 3 bytes each; the update fetches 5 bytes of each block, or 7 at one time."""
    step = step_of(1e9, activations=(0.5,) * 6)
    extra = [
        Held(kind=kind, nbytes=n, blocks=(b,)) for b in range(6) for kind, n in (("gathered", 3.0), ("streamed", 5.0))
    ]
    memory = replace(step.memory, held=[*step.memory.held, *extra], fsdp="step", stream_window=7.0)
    step = replace(step, memory=memory, sent=[0.0] * 6)
    keep = ResidualPlan.keep(3)
    predicted = step.model([2, 2, 2]).predict(keep).peak_bytes
    # Parameters 8; three, two or one microbatch of 1 byte in flight. On the last rank the update holds more.
    in_the_loop = [8.0 + 1.0 * live + 6.0 for live in (3, 2, 1)]
    assert list(predicted) == [max(loop, 8.0 + 7.0) for loop in in_the_loop]
    # For the search of an assignment, all that is gathered counts beside the update.
    assert all(a <= b for a, b in zip(predicted, memory.rank_bytes([2, 2, 2]), strict=True))
    assert memory.rank_bytes([2, 2, 2]) == [8.0 + 6.0 + 7.0] * 3
    assert memory.stage_bytes(0, 0, 2) == 8.0 + 6.0 + 7.0


def test_without_need_all_residuals_stay():
    found, choice = balance_within(step_of(1e9), [2, 2, 2])
    assert (found.sizes, found.exact, choice.residuals.is_kept, choice.excess) == ((2, 2, 2), True, True, 0.0)


def test_residuals_change_where_moving_blocks_would_take_longer():
    # Rank 0 holds 8 + 3 x 16 bytes. To keep all residuals it would have one block only, and another rank three.
    found, choice = balance_within(step_of(50.0), [2, 2, 2])
    assert found.sizes == (2, 2, 2)
    assert not choice.residuals.of(0).is_kept
    assert max(choice.prediction.peak_bytes) <= 50.0
    assert choice.prediction.seconds < step_of(50.0).time([1, 3, 2])


def test_blocks_move_where_parameters_are_in_the_way():
    found, choice = balance_within(step_of(40.0, parameters=(30, 30, 1, 1, 1, 1), activations=(1,) * 6), [2, 2, 2])
    assert found.sizes[0] == 1
    assert choice.excess == 0


@settings(max_examples=20)
@given(st.lists(st.integers(1, 9), min_size=6, max_size=6), st.floats(20, 150))
def test_the_step_is_no_longer_than_the_best_assignment_that_keeps_all(parameters, limit):
    step = step_of(limit, parameters=parameters)
    found, choice = balance_within(step, [2, 2, 2])
    every = [s for s in itertools.product((1, 2, 3, 4), repeat=3) if sum(s) == 6]
    kept = [step.time(sizes) for sizes in every if step.memory.excess(sizes) <= 0]
    if kept:
        assert choice.excess == 0
        assert choice.prediction.seconds <= min(kept) * (1 + 1e-9)
    if choice.excess == 0:
        assert max(choice.prediction.peak_bytes) <= limit * (1 + 1e-9)
        assert step.choose(found.sizes).prediction == choice.prediction
    elif found.exact:  # then nothing fits at all
        assert all(step.choose(sizes).excess > 0 for sizes in every)
