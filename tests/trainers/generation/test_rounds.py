"""The order of calls: groups take turns, few calls are under way, and a group that has ended begins no more."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxpp_flax.trainers.generation.prompts import Prompts
from jaxpp_flax.trainers.generation.rounds import GroupRun, run_in_turn


def test_groups_take_turns_and_an_ended_one_stops_a_few_calls_later():
    groups = Prompts.of([[1], [2], [3]]).groups(3, max_new_tokens=10)
    order: list[int] = []

    def step(state: Any, carried: Any, tokens: Any, fixed: int) -> Any:
        order.append(fixed)
        return carried, tokens, np.bool_(fixed == 1 and order.count(1) == 2)  # group 1 ends in its second call

    runs = [GroupRun(group, group.calls(1), (None, None), i) for i, group in enumerate(groups)]
    run_in_turn(runs, {1: step}, None, most_under_way=4)
    assert order[:6] == [0, 1, 2, 0, 1, 2]
    # Its end is seen once four later calls have begun, of which one is its own.
    assert [order.count(i) for i in range(3)] == [10, 3, 10]


def test_prompts_come_from_the_host_and_later_tokens_from_the_call_before():
    (group,) = Prompts.of([[5, 6, 7, 8, 9]]).groups(1, max_new_tokens=3)
    given: list[Any] = []

    def step(state: Any, carried: Any, tokens: Any, fixed: Any) -> Any:
        given.append(tokens.tolist() if isinstance(tokens, np.ndarray) else tokens)
        return carried, f"chosen {len(given)}", np.bool_(False)

    calls = group.calls(2)
    run_in_turn([GroupRun(group, calls, (None, None), None)], dict.fromkeys((1, 2), step), None, 2)
    assert calls == [2, 2, 1, 1, 1]
    assert given == [[[5, 6]], [[7, 8]], [[9]], "chosen 3", "chosen 4"]
