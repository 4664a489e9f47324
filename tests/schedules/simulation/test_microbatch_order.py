"""The order of microbatches by cost: never slower than the given order, by a simulation written once more here."""

import time
from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpp_flax.schedules import Costs, Link, ScheduleError, Transfer, by_name, names, order_by_cost, simulate
from jaxpp_flax.schedules.task import needs, results

TRANSFER = Transfer(Link(0.25), {(1, 2): Link(0.5, bandwidth=2.0)})
KINDS = [
    Costs(forward=time, backward_input=[time, 2 * time, time, time], backward_weight=time / 2, sent=time)
    for time in (1.0, 1.5, 4.0)
]
SCHEDULES = ["1f1b", "eager_1f1b", "zero_bubble", "zbv", "interleaved_1f1b", "gpipe"]


def schedule_named(name):
    return by_name(name, 4, 2 if name in ("zbv", "interleaved_1f1b") else None)


def seconds(schedule, costs, transfer):
    """The end of the last task: each starts after the one before it on its rank, and after what it reads."""
    lists, tables = schedule.tasks(len(costs)), [each.table(schedule.num_stages) for each in costs]
    places = {
        result: (r, i) for r, tasks in enumerate(lists) for i, task in enumerate(tasks) for result in results(task)
    }

    @lru_cache(None)
    def end(rank, place):
        task = lists[rank][place]
        table = tables[task.microbatch]
        starts = [end(rank, place - 1) if place else 0.0]
        for need in needs(task, schedule.num_stages):
            source, _ = places[need]
            starts.append(end(*places[need]) + (source != rank and transfer.time(source, rank, table.sent_bytes(need))))
        return max(starts) + table.duration(task)

    return max(end(rank, len(tasks) - 1) for rank, tasks in enumerate(lists) if tasks)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(SCHEDULES),
    st.sampled_from([4, 8, 12]).flatmap(lambda n: st.lists(st.sampled_from(KINDS), min_size=n, max_size=n)),
)
def test_the_order_is_a_permutation_that_is_not_slower(name, costs):
    schedule = schedule_named(name)
    order = order_by_cost(schedule, costs, TRANSFER)
    assert sorted(order.order) == list(range(len(costs)))
    assert order.given == pytest.approx(seconds(schedule, costs, TRANSFER))
    assert order.chosen == pytest.approx(seconds(schedule, [costs[n] for n in order.order], TRANSFER))
    assert order.chosen <= order.given
    assert order.gain >= 1


@settings(max_examples=20, deadline=None)
@given(st.permutations([KINDS[0]] * 5 + [KINDS[1]] * 2 + [KINDS[2]]))
def test_microbatches_in_any_order_run_as_one_unless_theirs_is_better(costs):
    schedule = schedule_named("1f1b")
    order, of_sorted = order_by_cost(schedule, costs), order_by_cost(schedule, sorted(costs, key=KINDS.index))
    in_order = [KINDS.index(costs[n]) for n in order.order]
    sorted_kinds = sorted(map(KINDS.index, costs))
    assert order.is_given or in_order == [sorted_kinds[n] for n in of_sorted.order] or of_sorted.is_given


@pytest.mark.parametrize("name", [name for name in names(4) if name != "zbv"])
def test_equal_microbatches_keep_their_order_and_take_the_time_of_the_simulator(name):
    schedule = schedule_named(name)
    order = order_by_cost(schedule, [KINDS[1]] * 8, TRANSFER)
    assert order.is_given
    assert order.gain == 1
    simulated = simulate(schedule, KINDS[1], TRANSFER, num_microbatches=8)
    assert order.chosen == order.given == pytest.approx(simulated.makespan)


def test_long_microbatches_among_short_ones_gain():
    costs = [KINDS[2] if n in (1, 6, 11) else KINDS[0] for n in range(16)]
    assert order_by_cost(schedule_named("1f1b"), costs).gain > 1.2


def test_costs_of_another_number_of_stages_are_refused():
    with pytest.raises(ScheduleError, match="4 numbers for 2 stages"):
        order_by_cost(by_name("1f1b", 2), KINDS)


def test_an_order_is_chosen_in_some_milliseconds():
    schedule = by_name("1f1b", 8)
    kinds = [Costs(forward=time, backward_input=time, backward_weight=time) for time in (1.0, 1.4, 2.0, 3.0)]
    order_by_cost(schedule, kinds * 4)  # the order of the tasks is made once
    begin = time.process_time()
    for first in range(4):
        order_by_cost(schedule, (kinds[first:] + kinds[:first]) * 4)
    # It takes 4 ms; a search of all orders, or of all pairs with the simulator of events, would take a second.
    assert (time.process_time() - begin) / 4 < 0.05
