"""Where data goes on: counted in examples, so that the size of batches may change, or the change is refused."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jaxpp_flax.trainers import DataPositionError
from jaxpp_flax.trainers.data.position import DataPosition
from jaxpp_flax.trainers.data.stream import Batches, TrainingData
from jaxpp_flax.trainers.progress import Display


def in_batches(size: int, examples: int = 24) -> list[np.ndarray]:
    return [np.arange(begin, min(begin + size, examples)) for begin in range(0, examples, size)]


class WithState:
    """Batches whose iterator has a state of its own, which counts batches."""

    def __init__(self, size: int):
        self.data, self.at = in_batches(size, 54), 0

    def __iter__(self) -> Iterator[np.ndarray]:
        return self

    def __next__(self) -> np.ndarray:
        if self.at == len(self.data):
            raise StopIteration
        self.at += 1
        return self.data[self.at - 1]

    def get_state(self) -> int:
        return self.at

    def set_state(self, state: int) -> None:
        self.at = state


def after(data: object, count: int) -> DataPosition:
    source = Batches(data, steps=100)  # type: ignore[arg-type]
    for _ in range(count):
        next(source)
    position = DataPosition.from_json(source.position.to_json())
    assert position is not None
    return position


@pytest.mark.parametrize(
    ("before", "count", "now"), [(8, 2, 4), (4, 2, 8), (4, 4, 16), (8, 3, 8), (8, 1, 8), (8, 4, 4), (8, 5, 8)]
)
def test_no_example_is_skipped_or_drawn_again(before: int, count: int, now: int):
    used = before * count % 24 if count > 3 else before * count
    rest = next(Batches(in_batches(now), steps=1, position=after(in_batches(before), count)))
    assert rest[0] == used % 24


def test_positions_go_on_in_the_new_size():
    source = Batches(in_batches(4), steps=3, position=after(in_batches(8), 2))
    next(source)
    position = source.position
    assert (position.in_epoch, position.examples, position.batch_size) == (5, 20, 4)


def test_batches_that_do_not_end_there_are_refused():
    with pytest.raises(
        DataPositionError, match=r"after 12 examples .* in batches of 4\. Batches of 8 do not end there"
    ):
        next(Batches(in_batches(8), steps=1, position=after(in_batches(4), 3)))


@pytest.mark.parametrize("now", [4, 16])
def test_a_state_that_counts_other_batches_is_refused(now: int):
    with pytest.raises(DataPositionError, match=f"batches of 8 examples, and this data gives batches of {now}"):
        next(Batches(WithState(now), steps=1, position=after(WithState(8), 1)))


def test_the_smaller_rest_of_a_pass_is_no_change():
    """Of 54 examples the seventh batch has six; the size is still the full one."""
    rest = Batches(WithState(8), steps=3, position=after(WithState(8), 6), epochs=1)
    assert [len(batch) for batch in rest] == [6]
    assert rest.position.batch_size == 8


def test_a_refused_batch_leaves_the_place_as_it_was():
    """The look whether a smaller batch is the last moves no iterator, which counts its own batches from then on."""
    data, before = WithState(4), after(WithState(8), 2)
    source = Batches(data, steps=9, position=before)
    with pytest.raises(DataPositionError, match="gives batches of 4"):
        next(source)
    assert source.position == before
    assert data.at == 3
    drawn = source.at
    assert (drawn.in_epoch, drawn.examples, drawn.batch_size) == (3, 12, 4)


def test_positions_of_older_checkpoints_count_batches():
    old = {"batches": 2, "epoch": 0, "in_epoch": 2, "iterator": None}
    assert next(Batches(in_batches(4), steps=1, position=DataPosition.from_json(old)))[0] == 8


@pytest.mark.parametrize("data", [in_batches(8), WithState(8)], ids=["list", "with_state"])
def test_passes_that_are_done_are_not_begun_again(data: object):
    """A run that has begun its second pass has done the first: nothing is left, and nothing is drawn."""
    position = DataPosition(batches=4, epoch=1, in_epoch=1, examples=8, batch_size=8)
    source = Batches(data, epochs=1, position=position)  # type: ignore[arg-type]
    assert list(zip(range(9), source, strict=False)) == []
    assert source.position == position


class Interrupted(WithState):
    """Ctrl-C comes when the third batch is drawn, after the iterator has moved on."""

    def __next__(self) -> np.ndarray:
        batch = super().__next__()
        if self.at == 3:
            raise KeyboardInterrupt
        return batch


def test_a_batch_that_was_never_given_is_drawn_again():
    source = Batches(Interrupted(8), steps=9)
    next(source), next(source)
    with pytest.raises(KeyboardInterrupt):
        next(source)
    assert next(Batches(WithState(8), steps=1, position=source.position))[0] == 16


def test_data_without_a_state_may_have_other_batches_than_data_with_one():
    assert next(Batches(in_batches(4), steps=1, position=after(WithState(8), 2)))[0] == 16


def in_use(data: object, count: int, **options: object) -> object:
    source = Batches(data, steps=count, **options)  # type: ignore[arg-type]
    assert len(list(source)) == count
    return source.at


def test_an_iterator_in_use_stands_after_all_that_it_has_given():
    data = iter(in_batches(4))
    drawn = in_use(data, 2)
    source = Batches(data, steps=2, at=drawn)  # type: ignore[arg-type]
    assert [batch[0] for batch in source] == [8, 12]
    assert next(Batches(in_batches(4), steps=1, position=source.position))[0] == 16


@pytest.mark.parametrize("given", [2, 4])
def test_an_iterator_in_use_goes_on_by_examples(given: int):
    """The run used two batches of 8 before; this iterator has given batches of 4."""
    data, position = iter(in_batches(4)), after(in_batches(8), 2)
    drawn = in_use(data, given)
    assert next(Batches(data, steps=1, position=position, at=drawn))[0] == 16  # type: ignore[arg-type]


class OnceInterrupted:
    """An iterator without a state; Ctrl-C comes once, after two batches."""

    def __init__(self) -> None:
        self.rest, self.pending = iter(in_batches(4)), True

    def __iter__(self) -> Iterator[np.ndarray]:
        return self

    def __next__(self) -> np.ndarray:
        batch = next(self.rest)
        if batch[0] == 4 and self.pending:
            self.rest, self.pending = iter(in_batches(4)[1:]), False
            raise KeyboardInterrupt
        return batch


def test_a_search_that_was_interrupted_goes_on_where_it_stands():
    data, position = OnceInterrupted(), after(in_batches(4), 3)
    source = Batches(data, steps=1, position=position)
    with pytest.raises(KeyboardInterrupt):
        next(source)
    assert next(Batches(data, steps=1, position=position, at=source.at))[0] == 12


class Live(WithState):
    """Its state is an object that each draw changes, and that it takes as its own."""

    def __init__(self, size: int):
        super().__init__(size)
        self.live = {"at": [0], "order": np.zeros(1, int)}

    @property
    def at(self) -> int:
        return self.live["at"][0] if hasattr(self, "live") else 0

    @at.setter
    def at(self, value: int) -> None:
        if hasattr(self, "live"):
            self.live["at"][0] = value
            self.live["order"][0] = value

    def get_state(self) -> dict:
        return self.live

    def set_state(self, state: dict) -> None:
        self.live = state


def test_a_state_is_copied_when_it_is_taken_and_given():
    source = Batches(Live(4), steps=5)
    assert len([next(source) for _ in range(2)]) == 2
    before = source.position
    next(source)
    now = source.position
    assert [position.iterator["at"] for position in (before, now)] == [[2], [3]]
    assert before.iterator["order"][0] == 2
    resumed = Batches(Live(4), steps=2, position=before)
    assert [batch[0] for batch in resumed] == [8, 12]
    assert before.iterator["at"] == [2], "the iterator has a copy of its own"


def test_a_last_smaller_batch_is_found_without_a_loss():
    """To see whether a batch is the last one, the iterator is asked for the next one, and goes back."""
    position = after(Live(20), 2)
    assert next(Batches(Live(20), steps=1, position=position)).tolist() == [*range(40, 54)]


def test_a_state_that_cannot_be_copied_is_refused_by_a_checkpoint_alone():
    class Locked(WithState):
        def get_state(self):  # pyright: ignore[reportIncompatibleMethodOverride]
            return threading.Lock()

    source = Batches(Locked(4), steps=2)
    assert len(list(source)) == 2
    with pytest.raises(DataPositionError, match="get_state returned a lock"):
        source.position.to_json()


def test_an_iterator_that_takes_the_methods_of_its_class_away_has_no_state():
    class Stateless(WithState):
        get_state = set_state = None  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]

    position = after(Stateless(4), 2)
    assert position.iterator is None
    assert next(Batches(Stateless(4), steps=1, position=position))[0] == 8


def test_a_pass_that_was_used_up_by_an_earlier_loop_is_no_empty_data():
    """The loop drew nothing itself, from an iterator that had given its whole pass."""
    position = DataPosition(batches=0, epoch=0, in_epoch=6, examples=24, batch_size=4)
    assert [batch[0] for batch in Batches(in_batches(4), steps=1, position=position)] == [0]


def test_a_deleted_trainer_takes_its_step_with_it():
    """The data refers to the step in memory, and so to the state: no circle of references keeps either.

    Nor does anything keep the iterator that a loop has made: the processes of a loader live as long as it does.
    """

    class Held:
        step = 0

    class Loader:
        def __iter__(self) -> WithState:
            return WithState(4)

    def used() -> tuple[TrainingData, weakref.ref[Any], weakref.ref[Held]]:
        held = Held()
        data = TrainingData(lambda: held.step, Display.silent())
        batches = data.batches(Loader(), steps=3)
        data.begin(batches)
        next(batches)
        data.end(batches)
        return data, weakref.ref(batches.iterator), weakref.ref(held)

    gc.disable()
    try:
        data, iterator, held = used()
        assert iterator() is None
        del data
        assert held() is None
    finally:
        gc.enable()
