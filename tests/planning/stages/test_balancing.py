"""Balancing: no other assignment is better, with one stage on each rank or several."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpp_flax.planning.stages.balancing import balance, rank_loads
from jaxpp_flax.planning.stages.step_time import StepTime
from jaxpp_flax.schedules import Costs, by_name, simulate


def assignments(count: int, num_stages: int) -> list[tuple[int, ...]]:
    """Every way to cut `count` blocks into stages, as sizes."""
    cuts = itertools.combinations(range(1, count), num_stages - 1)
    return [tuple(b - a for a, b in itertools.pairwise((0, *cut, count))) for cut in cuts]


def brute_force(costs, rank_of):
    """The least slowest rank of all assignments."""
    return min(max(rank_loads(costs, sizes, rank_of)) for sizes in assignments(len(costs), len(rank_of)))


# The ranks of stages as schedules deal them: one each, in turn, and V-shaped.
DEALT = [(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3), (0, 1, 0, 1), (0, 1, 2, 0, 1, 2), (0, 1, 1, 0), (0, 1, 0, 1, 0, 1)]
costs_of_blocks = st.lists(st.integers(0, 9), min_size=6, max_size=9)


@given(costs_of_blocks, st.sampled_from(DEALT))
def test_no_other_assignment_is_better(costs, rank_of):
    found = balance(costs, rank_of)
    # Each layer ends in exactly one stage: the sizes are positive, one for each stage, and add up.
    assert len(found) == len(rank_of)
    assert min(found) >= 1
    assert sum(found) == len(costs)
    assert max(rank_loads(costs, found, rank_of)) == brute_force(costs, rank_of)


def test_among_equals_fewer_bytes_are_sent_then_the_rest_is_even():
    # The last block alone is the slowest; of the cuts before it, those with the fewest bytes are taken.
    assert balance([1, 1, 1, 1, 1, 1, 9], [0, 1, 2]) == (3, 3, 1)
    assert balance([1, 1, 1, 1, 1, 1, 9], [0, 1, 2], sent=[0, 8, 8, 8, 2, 8, 8]) == (4, 2, 1)


# Forward costs of twelve blocks that grow, of what follows the last of them, and of a model with a large head.
GROWING = [*(7.0 + 2.0 * i for i in range(12)), 0.1]
LARGE_HEAD = [*[3.0] * 12, 20.0]
EVEN = (2, 2, 2, 2, 1, 1, 1, 2)  # what follows the last block stays with it


def makespan(schedule, forward, sizes, num_microbatches):
    """The simulated step, from the definition."""
    ends = list(itertools.accumulate(sizes))
    of_stages = [sum(forward[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
    costs = Costs(forward=of_stages, backward_input=of_stages, backward_weight=of_stages)
    return simulate(schedule, costs, num_microbatches=num_microbatches).makespan


def balanced_for(schedule, forward, num_microbatches, **options):
    step = StepTime(
        schedule=schedule,
        num_microbatches=num_microbatches,
        forward=forward,
        backward=[2 * cost for cost in forward],
    )
    rank_of = [schedule.rank_of(stage) for stage in range(schedule.num_stages)]
    return balance([3 * cost for cost in forward], rank_of, step=step, **options), step


SEVERAL_ON_A_RANK = ["interleaved_1f1b", "interleaved_gpipe", "kimi_k2", "circular", "zbv", "dualpipe_v"]


@pytest.mark.parametrize("name", SEVERAL_ON_A_RANK)
def test_with_several_stages_on_a_rank_the_simulated_step_decides(name):
    """Each schedule with one kind of costs or the other, and so few tasks that all 84 assignments can be tried."""
    schedule, even = by_name(name, 4, 2), (3, 3, 2, 2)
    forward = [*GROWING[:9], 0.1] if SEVERAL_ON_A_RANK.index(name) % 2 else LARGE_HEAD[-10:]
    found, step = balanced_for(schedule, forward, 4, even=even)
    chosen = makespan(schedule, forward, found, 4)
    assert chosen == pytest.approx(step(found))
    assert chosen <= makespan(schedule, forward, even, 4) * (1 + 1e-9)
    assert chosen == pytest.approx(min(step(sizes) for sizes in assignments(len(forward), 4)))


@pytest.mark.slow
@pytest.mark.parametrize("forward", [GROWING, LARGE_HEAD], ids=["growing", "large_head"])
@pytest.mark.parametrize("name", SEVERAL_ON_A_RANK)
def test_with_many_microbatches_the_search_finds_more_than_its_starts(name, forward):
    """A local search: it must at least find more than the starts that need no simulation."""
    schedule = by_name(name, 8, 4)
    found, step = balanced_for(schedule, forward, 64, even=EVEN)
    loads = balance(forward, [schedule.rank_of(stage) for stage in range(8)])
    for start in (EVEN, loads):
        assert step(found) <= makespan(schedule, forward, start, 64) * (1 + 1e-9)


def test_the_fastest_slowest_rank_may_make_a_slower_step_than_even_stages():
    # Why the step is simulated: here the loads alone mislead.
    schedule = by_name("interleaved_1f1b", 8, 4)
    by_load = balance(GROWING, [stage % 4 for stage in range(8)])
    by_step, step = balanced_for(schedule, GROWING, 64, even=EVEN)
    even_load = max(rank_loads(GROWING, EVEN, [stage % 4 for stage in range(8)]))
    assert max(rank_loads(GROWING, by_load, [stage % 4 for stage in range(8)])) < even_load
    assert step(by_load) > step(EVEN)
    assert step(by_step) < 0.95 * step(EVEN)


def test_with_one_microbatch_nothing_is_better_than_even():
    # Every assignment makes the same step of a single microbatch.
    found, _ = balanced_for(by_name("interleaved_1f1b", 8, 4), GROWING, 1, even=EVEN)
    assert found == EVEN


@pytest.mark.slow
@pytest.mark.parametrize("name", ["interleaved_1f1b", "zbv"])
def test_a_large_model_is_searched_with_few_simulations(name):
    schedule = by_name(name, 16, 8)
    forward = [3.0 + (7 * i) % 5 for i in range(99)] + [60.0]
    found, step = balanced_for(schedule, forward, 64)
    calls = []

    class Counted(StepTime):
        def __call__(self, sizes):
            calls.append(sizes)
            return super().__call__(sizes)

    counted = Counted(schedule=schedule, num_microbatches=64, forward=forward, backward=step.backward)
    again = balance([3 * cost for cost in forward], [schedule.rank_of(s) for s in range(16)], step=counted)
    assert again == found  # the search is bounded by counts, not by a clock
    assert len(calls) <= counted.tries + 20  # and the starts
    even = tuple(7 if stage < 4 else 6 for stage in range(16))
    assert step(found) < 0.9 * step(even)


@pytest.mark.parametrize("num_ranks", [4, 8])
def test_a_large_model_is_balanced_in_bounded_time(num_ranks):
    costs = [3.0 + (7 * i) % 5 for i in range(96)] + [60.0]
    rank_of = [stage % num_ranks for stage in range(2 * num_ranks)]
    found = balance(costs, rank_of)
    lower = sum(costs) / num_ranks
    assert max(rank_loads(costs, found, rank_of)) <= 1.05 * lower  # of a case with many small blocks: nearly even
    assert sum(found) == len(costs)
