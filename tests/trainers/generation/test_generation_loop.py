"""The order of calls: groups take turns, few calls are under way, and a group that has ended begins no more."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxpp_flax.trainers.generation.generation_loop import Turns, take_turns
from jaxpp_flax.trainers.generation.prompts import Lengths, make_groups, read_prompts, tokens_of_calls


def lengths(prompts: Any, new: int, **options: Any) -> Lengths:
    given = {"pads": False, "most": None, "prefill": 1, "cache": None, **options}
    return Lengths.of(max(map(len, prompts)), new, **given)


def turns_of(prompts: Any, count: int, new: int, samples: int = 1, **options: Any) -> list[Turns]:
    slots = lengths(prompts, new, **options)
    groups = make_groups(read_prompts(prompts), count, slots, samples=samples)
    return [Turns(group["tokens"][::samples], *tokens_of_calls(group, slots)) for group in groups]


def test_groups_take_turns_and_an_ended_one_stops_a_few_calls_later():
    groups = turns_of([[1], [2], [3]], 3, 10)
    order: list[int] = []

    def step(state: Any, carried: Any, tokens: Any, places: Any) -> Any:
        (number,) = tokens[0] if isinstance(tokens, np.ndarray) else tokens
        order.append(number)
        has_ended = np.bool_(number == 2 and order.count(2) == 2)  # this group ends in its second call
        return ("cache", order.count(number)), [number], has_ended

    carried: list[Any] = [("cache", 0)] * 3
    take_turns(groups, {(1, True): step, (1, False): step}, None, carried, most_under_way=4)
    assert order[:6] == [1, 2, 3, 1, 2, 3]
    # Its end is seen once four later calls have begun, of which one is its own. The caches are free.
    assert carried == [(None, 10), (None, 3), (None, 10)]


PREFILLS = {
    "token by token, from slot 0": ({"prefill": 2}, [[[5, 6]], [[7, 8]], [[9]]], 3),
    "padded to a power of two, in one call": ({"pads": True, "prefill": None}, [[[0, 0, 0, 5, 6, 7, 8, 9]]], 1),
    "padded to a multiple": ({"pads": True, "prefill": 2}, [[[0, 5]], [[6, 7]], [[8, 9]]], 3),
    "padded to what the cache has": (
        {"pads": True, "prefill": None, "most": 4, "cache": 9},
        [[[0, 0, 5]], [[6, 7, 8, 9]]],
        2,
    ),
}


@pytest.mark.parametrize("case", PREFILLS)
def test_prompts_come_from_the_host_and_later_tokens_from_the_call_before(case: str):
    options, prompts, count = PREFILLS[case]
    given: list[Any] = []
    repeated: list[Any] = []

    def step(state: Any, carried: Any, tokens: Any, places: Any) -> Any:
        given.append(tokens.tolist() if isinstance(tokens, np.ndarray) else tokens)
        return carried, f"chosen {len(given)}", np.bool_(False)

    turns = turns_of([[5, 6, 7, 8, 9]], 1, 3, samples=2, **options)
    steps = {(taken, of): step for taken in range(9) for of in (True, False)}
    take_turns(turns, steps, None, [(None, None)], 2, lambda cache: repeated.append(len(given)))
    assert given == [*prompts, f"chosen {count}", f"chosen {count + 1}"]
    assert repeated == [count], "the cache is repeated once, after the prompt"


def test_the_last_sequence_stands_again_where_a_group_is_not_full():
    prompts = [[1], [2, 2], [3], [4, 4, 4]]
    groups = make_groups(read_prompts(prompts), 3, lengths(prompts, 2), multiple=2)
    assert [group["sequences"].tolist() for group in groups] == [[0, 2], [1, 3]]
    (group,) = make_groups(read_prompts(prompts[:3]), 1, lengths(prompts[:3], 2), multiple=2)
    assert group["sequences"].tolist() == [0, 2, 1, 1]
    assert group["limits"].tolist() == [3, 3, 4, 4]
    assert group["tokens"].tolist() == [[1, 0, 0, 0], [3, 0, 0, 0], [2, 2, 0, 0], [2, 2, 0, 0]]
