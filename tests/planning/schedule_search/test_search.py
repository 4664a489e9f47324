"""The search: legal, within its limits, never worse than a named schedule, near the optimum."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpp_flax.planning import search
from jaxpp_flax.planning.schedule_search.greedy import construct, rules
from jaxpp_flax.planning.schedule_search.problem import Problem, evaluate, lower_bound
from jaxpp_flax.schedules import Costs, ScheduleError, Transfer, simulate, validate
from tests.schedules.helpers import brute_force, costs_for


@settings(max_examples=25)
@given(st.data(), st.integers(1, 4), st.integers(1, 2), st.integers(1, 6), st.booleans())
def test_found_schedules_keep_their_promises(data, ranks, per_rank, microbatches, split):
    costs = data.draw(costs_for(ranks * per_rank))
    latency = data.draw(st.sampled_from([0.0, 0.5]))
    stages = costs.table(ranks * per_rank).stages
    alone = [sum(stage.activation for stage in stages[r::ranks]) for r in range(ranks)]
    limit = data.draw(st.sampled_from([None, 10.0]))
    limit = None if limit is None else max(limit, 2 * max(alone))
    found = search(ranks, microbatches, per_rank, costs, latency, limit, split_backward=split, evaluations=200)
    lists = found.schedule.tasks(microbatches)
    validate(lists, microbatches)
    assert found.schedule.splits_backward <= split
    assert found.lower_bound <= found.makespan + 1e-9
    if limit is not None:
        assert max(found.peak_memory) <= limit + 1e-9
    assert all(found.makespan <= named.makespan + 1e-9 for named in found.named if named.fits)
    times = brute_force(lists, costs, Transfer.of(latency))
    assert found.makespan == pytest.approx(max(end for _, end in times.values()))


def make(ranks, microbatches, costs=None, limit=float("inf"), splits=True, latency=0.0):
    return Problem.make(
        tuple(range(ranks)),
        microbatches,
        splits=splits,
        costs=costs or Costs(),
        transfer=Transfer.of(latency),
        limits=[limit] * ranks,
    )


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("limit", [2.0, 3.0, float("inf")])
def test_greedy_rules_keep_the_limit_and_evaluate_as_the_simulator(splits, limit):
    problem = make(3, 5, Costs(forward=[1, 2, 1.5]), limit, splits, latency=0.25)
    made = 0
    for rule in rules(problem):
        words = construct(problem, rule)
        if words is None:
            continue
        made += 1
        assert all(problem.fits(rank, word) for rank, word in enumerate(words))
        found = evaluate(problem, words)
        assert found is not None
        step = simulate(problem.tasks(words), Costs(forward=[1, 2, 1.5]), 0.25)
        assert step.makespan == pytest.approx(found[0])
        assert step.makespan >= lower_bound(problem) - 1e-9
    assert made


def test_better_than_the_named_where_memory_is_short_or_stages_uneven():
    short = search(4, 8, memory_limit=5, costs=Costs(backward_input=1.2, backward_weight=0.8))
    uneven = search(4, 8, 2, Costs(forward=[1, 1.4, 0.7, 1.2, 0.8, 1.3, 0.9, 1.1]))
    for found in (short, uneven):
        assert found.best_named is not None
        assert found.makespan < found.best_named.makespan
        assert "best named" in found.summary()


def test_equal_arguments_give_equal_schedules():
    costs = Costs(forward=[1, 1.4, 0.7])
    first, second = (search(3, 6, costs=costs, memory_limit=2.5, evaluations=500) for _ in range(2))
    assert first.schedule == second.schedule


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"num_ranks": 0, "num_microbatches": 4}, "num_ranks must be at least 1"),
        ({"num_ranks": 2, "num_microbatches": 4, "memory_limit": 0.5}, "Raise it to 1 or more"),
        ({"num_ranks": 2, "num_microbatches": 4, "memory_limit": [1, 1, 1]}, "3 numbers for 2 ranks"),
        ({"num_ranks": 2, "num_microbatches": 4, "costs": Costs(forward=[1, 2, 3])}, "3 numbers for 2 stages"),
    ],
)
def test_bad_arguments_are_refused(arguments, text):
    with pytest.raises(ScheduleError, match=text):
        search(**arguments)
