"""The order of calls: groups take turns, few calls are under way, and a group that has ended begins no more."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxpp_flax.trainers.generation.generation_loop import take_turns
from jaxpp_flax.trainers.generation.prompts import make_groups, read_prompts, tokens_of_calls


def test_groups_take_turns_and_an_ended_one_stops_a_few_calls_later():
    groups = make_groups(read_prompts([[1], [2], [3]]), 3, max_new_tokens=10)
    order: list[int] = []

    def step(state: Any, carried: Any, tokens: Any) -> Any:
        (number,) = tokens[0] if isinstance(tokens, np.ndarray) else tokens
        order.append(number)
        has_ended = np.bool_(number == 2 and order.count(2) == 2)  # this group ends in its second call
        return ("cache", order.count(number)), [number], has_ended

    carried: list[Any] = [("cache", 0)] * 3
    take_turns(groups, [tokens_of_calls(group, 1) for group in groups], {1: step}, None, carried, most_under_way=4)
    assert order[:6] == [1, 2, 3, 1, 2, 3]
    # Its end is seen once four later calls have begun, of which one is its own. The caches are free.
    assert carried == [(None, 10), (None, 3), (None, 10)]


def test_prompts_come_from_the_host_and_later_tokens_from_the_call_before():
    (group,) = make_groups(read_prompts([[5, 6, 7, 8, 9]]), 1, max_new_tokens=3)
    given: list[Any] = []

    def step(state: Any, carried: Any, tokens: Any) -> Any:
        given.append(tokens.tolist() if isinstance(tokens, np.ndarray) else tokens)
        return carried, f"chosen {len(given)}", np.bool_(False)

    calls = tokens_of_calls(group, 2)
    take_turns([group], [calls], dict.fromkeys((1, 2), step), None, [(None, None)], 2)
    assert calls == [2, 2, 1, 1, 1]
    assert given == [[[5, 6]], [[7, 8]], [[9]], "chosen 3", "chosen 4"]


def test_the_last_sequence_stands_again_where_a_group_is_not_full():
    groups = make_groups(read_prompts([[1], [2, 2], [3], [4, 4, 4]]), 3, max_new_tokens=2, multiple=2)
    assert [group["sequences"].tolist() for group in groups] == [[0, 2], [1, 3]]
    (group,) = make_groups(read_prompts([[1], [2, 2], [3]]), 1, max_new_tokens=2, multiple=2)
    assert group["sequences"].tolist() == [0, 2, 1, 1]
    assert group["limits"].tolist() == [3, 3, 4, 4]
    assert group["tokens"].tolist() == [[1, 0, 0, 0], [3, 0, 0, 0], [2, 2, 0, 0], [2, 2, 0, 0]]
