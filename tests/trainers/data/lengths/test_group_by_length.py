"""Batches grouped by length: every example once, no microbatch above its budget, and a position that can be kept."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpp_flax import group_by_length
from jaxpp_flax.trainers import BatchError, DataPositionError
from jaxpp_flax.trainers.data.stream import Batches

LENGTHS = (4, 8, 16)


def texts(sizes):
    """Examples whose tokens tell which example they are of, and the place in it; none is 0, the padding."""
    return [1 + 100 * number + np.arange(size) for number, size in enumerate(sizes)]


def rows_of(batches):
    """The rows that hold tokens, as lists; fail where the mask and the padding do not agree."""
    rows = []
    for microbatch in (microbatch for batch in batches for microbatch in batch):
        tokens, mask = microbatch["tokens"], microbatch["mask"]
        assert mask.dtype == bool
        assert mask.shape == tokens.shape
        assert (mask == (tokens != 0)).all()
        rows += [row[of].tolist() for row, of in zip(tokens, mask, strict=True) if of.any()]
    return rows


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 16), max_size=60),
    tokens=st.integers(16, 70),
    count=st.integers(1, 4),
    steep=st.sampled_from([None, lambda n: n * (1 + n / 4)]),
)
def test_every_example_is_there_once_and_no_microbatch_is_above_the_budget(sizes, tokens, count, steep):
    groups = group_by_length(texts(sizes), lengths=LENGTHS, tokens=tokens, num_microbatches=count, cost=steep)
    batches = list(groups)
    assert sorted(rows_of(batches)) == sorted(text.tolist() for text in texts(sizes))
    assert all(len(batch) == count for batch in batches)
    microbatches = [microbatch for batch in batches for microbatch in batch]
    assert {microbatch["tokens"].shape for microbatch in microbatches} <= set(groups.shapes)
    assert all(microbatch["tokens"].size <= tokens for microbatch in microbatches)
    for microbatch in microbatches:  # padded to the next length, not to one above it
        longest, length = microbatch["mask"].sum(1).max(), microbatch["tokens"].shape[1]
        assert longest == 0 or longest > max([0, *(shorter for shorter in LENGTHS if shorter < length)])
    assert [rows_of([batch]) for batch in groups] == [rows_of([batch]) for batch in batches]


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(1, 16), max_size=40), count=st.integers(1, 3), drawn=st.integers(0, 6))
def test_a_pass_goes_on_from_its_state(sizes, count, drawn):
    groups = group_by_length(texts(sizes), lengths=LENGTHS, tokens=32, num_microbatches=count)
    one = iter(groups)
    for _ in range(drawn):
        next(one, None)
    state = json.loads(json.dumps(one.get_state()))
    other = iter(groups)
    other.set_state(state)
    assert [rows_of([batch]) for batch in other] == [rows_of([batch]) for batch in one]


def test_microbatches_cost_about_the_same():
    cost = lambda length: length * (1 + length / 512)  # noqa: E731
    groups = group_by_length([], lengths=(512, 1024, 2048), tokens=16384, num_microbatches=2, cost=cost)
    costs = [rows * cost(length) for rows, length in groups.shapes]
    # Rows are whole: a microbatch lacks less than one row of its length.
    assert all(max(costs) - of < cost(length) for of, (_, length) in zip(costs, groups.shapes, strict=True))
    assert [rows for rows, _ in groups.shapes] == [32, 10, 3]


def test_rows_are_a_multiple_of_the_data_parallel_devices():
    groups = group_by_length([], lengths=LENGTHS, tokens=56, num_microbatches=2, divisible_by=2)
    assert groups.shapes == ((8, 4), (4, 8), (2, 16))  # the last has room for 2 rows alone: all cost 32


def test_leaves_without_tokens_are_stacked_and_others_get_their_own_padding():
    examples = [{"x": np.ones((2, 3), np.float32), "label": np.int32(7), "box": np.arange(2.0)}]
    groups = group_by_length(examples, lengths=[4], tokens=8, num_microbatches=1, pad={"x": -1}, mask="real")
    ((microbatch,),) = groups
    assert sorted(microbatch) == ["box", "label", "real", "x"]
    assert microbatch["x"].shape == (2, 4, 3)
    assert microbatch["x"][0, :, 0].tolist() == [1, 1, -1, -1]
    assert microbatch["label"].tolist() == [7, 0]
    assert microbatch["box"].tolist() == [[0, 1], [0, 0]]
    assert microbatch["real"].tolist() == [[True, True, False, False], [False] * 4]


def test_a_long_example_is_cut_where_the_user_asks_for_it():
    groups = group_by_length(texts([20]), lengths=LENGTHS, tokens=16, num_microbatches=1, too_long="cut")
    assert rows_of(groups) == [texts([20])[0][:16].tolist()]


@pytest.mark.parametrize(
    ("examples", "options", "text"),
    [
        (texts([3, 20]), {}, r"example 1 has 20 tokens, more than the last of lengths=\(4, 8, 16\).*too_long=\"cut\""),
        ([{"x": np.zeros(3)}, {"y": np.zeros(3)}], {}, r"example 1 has the leaves \['y'\]"),
        ([np.zeros(3), np.zeros((3, 2))], {}, r"example 1 has float64\[3, 2\] at 'tokens'"),
        ([{"x": np.zeros(3), "y": np.zeros(2)}], {}, "example 0 has leaves of several lengths: .*pad="),
        ([{"label": 3}], {}, r"of \['label'\] no leaf of an example has an axis of tokens"),
        ([{"mask": np.zeros(3)}], {}, "leaf 'mask' of their own"),
        ([np.zeros(3)], {"pad": {"ids": 0}}, "pad names 'ids'"),
    ],
)
def test_an_example_that_fits_no_batch_is_named(examples, options, text):
    groups = group_by_length(examples, lengths=LENGTHS, tokens=32, num_microbatches=1, **options)
    with pytest.raises(BatchError, match=text):
        list(groups)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tokens": 15}, "tokens=15: a microbatch of 1 row of length 16 has 16 tokens"),
        ({"tokens": 31, "divisible_by": 2}, "a microbatch of 2 rows of length 16"),
        ({"lengths": ()}, "lengths is empty"),
        ({"lengths": (4, 0)}, "lengths=0"),
        ({"cost": lambda _: 0}, r"cost\(4\) returned 0.0"),
        ({"too_long": "drop"}, "too_long='drop'"),
        ({"num_microbatches": 0}, "num_microbatches=0"),
    ],
)
def test_arguments_that_make_no_batch_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        group_by_length([], **{"lengths": LENGTHS, "tokens": 32, "num_microbatches": 2, **options})


def test_a_state_of_other_lengths_is_refused():
    state = iter(group_by_length([], lengths=(4, 16), tokens=32, num_microbatches=1)).get_state()
    groups = group_by_length([], lengths=LENGTHS, tokens=32, num_microbatches=1)
    with pytest.raises(DataPositionError, match=r"\(rows, length\) in \[\(8, 4\), \(2, 16\)\]"):
        iter(groups).set_state(state)


def test_examples_that_run_once_have_no_state_and_are_drawn_again():
    groups = group_by_length(iter(texts([3, 5])), lengths=LENGTHS, tokens=16, num_microbatches=2)
    assert not hasattr(iter(groups), "get_state")
    assert sorted(rows_of(groups)) == [text.tolist() for text in texts([3, 5])]
    assert list(groups) == []


@pytest.mark.parametrize("drawn", [1, 2, 3, 4])
def test_the_trainer_finds_its_position_again(drawn):
    sizes = [1 + (7 * n) % 16 for n in range(40)]
    groups = group_by_length(texts(sizes), lengths=LENGTHS, tokens=32, num_microbatches=3)
    source = Batches(groups, epochs=2)
    for _ in range(drawn):
        next(source)
    position = type(source.position).from_json(json.loads(json.dumps(source.position.to_json())))
    again = Batches(groups, epochs=2, position=position)
    assert [rows_of([batch]) for batch in again] == [rows_of([batch]) for batch in source]


def test_later_passes_are_told_to_the_examples():
    told = []

    class Shuffled(list):
        def set_epoch(self, epoch):
            told.append(epoch)

    groups = group_by_length(Shuffled(texts([3] * 8)), lengths=LENGTHS, tokens=16, num_microbatches=1)
    assert len(list(Batches(groups, epochs=2))) == 4
    assert told == [1]
