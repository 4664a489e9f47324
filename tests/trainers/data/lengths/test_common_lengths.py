"""Processes that group examples of their own draw batches of the same shapes, and each of their examples once."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpp_flax import Microbatches, group_by_length, treduce
from jaxpp_flax.trainers import BatchError
from jaxpp_flax.trainers.data.lengths import common_lengths
from tests.trainers.data.lengths.test_group_by_length import LENGTHS, rows_of, texts


class Peers:
    """Threads in place of processes: each waits until all have given their lengths."""

    def __init__(self, count):
        self.barrier = threading.Barrier(count, timeout=30)
        self.count, self.given, self.here = count, {}, threading.local()

    def exchange(self, group, name, value, **_):
        self.given[self.here.index] = value
        self.barrier.wait()
        values = [self.given[index] for index in range(self.count)]
        self.barrier.wait()
        return values

    def run(self, function, *lists):
        def one(index, *arguments):
            self.here.index = index
            return function(*arguments)

        with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(self.count) as pool:
            patch.setattr(common_lengths, "exchange_values", self.exchange)
            return [*pool.map(one, range(self.count), *lists)]


def groups_of(sizes, count=3):
    return group_by_length(texts(sizes), lengths=LENGTHS, tokens=32, num_microbatches=count, own_examples=True)


def shapes_of(batches):
    return [[microbatch["tokens"].shape for microbatch in batch] for batch in batches]


@settings(max_examples=30, deadline=None)
@given(
    shares=st.lists(st.lists(st.integers(1, 16), min_size=1, max_size=40), min_size=2, max_size=3),
    count=st.integers(1, 4),
    drawn=st.integers(0, 4),
)
def test_the_shapes_are_common_and_the_examples_are_each_ones_own(shares, count, drawn):
    def draw(sizes):
        """All batches; and those that another pass gives, which goes on from the state after some of them."""
        one = iter(groups_of(sizes, count))
        begin = [batch for _ in range(drawn) if (batch := next(one, None)) is not None]
        state, rest = json.loads(json.dumps(one.get_state())), list(one)
        other = iter(groups_of(sizes, count))
        other.set_state(state)
        return [*begin, *rest], rest, list(other)

    drawn_by_each = Peers(len(shares)).run(draw, shares)
    shapes = [shapes_of(batches) for batches, _, _ in drawn_by_each]
    assert all(of_one == shapes[0] for of_one in shapes)
    assert all(len(of_batch) == count for of_batch in shapes[0])
    for sizes, (batches, rest, resumed) in zip(shares, drawn_by_each, strict=True):
        assert sorted(rows_of(batches)) == sorted(text.tolist() for text in texts(sizes))
        assert all(batch.own_rows for batch in batches)
        assert rows_of(resumed) == rows_of(rest)


def test_equal_shares_are_grouped_as_one_process_groups_them():
    """But with the longest microbatches first."""
    sizes = [3, 15, 7, 2, 16, 8, 4, 1, 9, 3, 3, 2, 4, 1, 1, 1]
    batches = Peers(2).run(list, [groups_of(sizes)] * 2)
    alone = list(group_by_length(texts(sizes), lengths=LENGTHS, tokens=32, num_microbatches=3))
    assert [rows_of(of_one) == rows_of(batches[0]) for of_one in batches] == [True, True]
    assert shapes_of(batches[0]) == [sorted(shapes, key=lambda shape: -shape[1]) for shapes in shapes_of(alone)]


def test_a_short_share_waits_at_most_for_its_place():
    """One process has short texts alone, the other long ones: the short ones are padded, and few of them wait."""

    def most_waiting(sizes):
        one, most = iter(groups_of(sizes)), 0
        for _ in one:
            state = one.get_state()
            most = max(most, sum(map(len, state["waiting"])) + sum(len(numbers) for _, numbers in state["full"]))
        return most

    waiting, _ = Peers(2).run(most_waiting, [[4] * 200, [16] * 40])
    assert waiting <= 3 * 8 + 7  # three full microbatches of the shortest length, and one that is not full


def test_what_is_refused():
    with pytest.raises(BatchError, match="no example in process 0"):
        list(groups_of([]))
    with pytest.raises(ValueError, match="own_rows=True"):
        treduce(lambda x: x.sum(), Microbatches([texts([2])[0]], own_rows=True))
