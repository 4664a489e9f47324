"""Where data goes on: counted in examples, so that the size of batches may change, or the change is refused."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp_flax.trainers import DataPositionError
from jaxpp_flax.trainers.data.position import DataPosition
from jaxpp_flax.trainers.data.stream import Batches
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
    position = DataPosition.from_json(source.position().to_json())
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
    position = source.position()
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
    assert rest.position().batch_size == 8


def test_a_refused_batch_leaves_the_place_as_it_was():
    """The look whether a smaller batch is the last moves no iterator, which counts its own batches from then on."""
    data, before = WithState(4), after(WithState(8), 2)
    source = Batches(data, steps=9, position=before)
    with pytest.raises(DataPositionError, match="gives batches of 4"):
        next(source)
    assert source.position() == before
    assert data.at == 3
    drawn = source.drawn_from(data)
    assert drawn is not None
    assert (drawn.batches, drawn.examples, drawn.batch_size) == (3, 12, 4)


def test_positions_of_older_checkpoints_count_batches():
    old = {"batches": 2, "epoch": 0, "in_epoch": 2, "iterator": None}
    assert next(Batches(in_batches(4), steps=1, position=DataPosition.from_json(old)))[0] == 8


@pytest.mark.parametrize("data", [in_batches(8), WithState(8)], ids=["list", "with_state"])
def test_passes_that_are_done_are_not_begun_again(data: object):
    """A run that has begun its second pass has done the first: nothing is left, and nothing is drawn."""
    position = DataPosition(batches=4, epoch=1, in_epoch=1, examples=8, batch_size=8)
    source = Batches(data, epochs=1, position=position)  # type: ignore[arg-type]
    assert list(zip(range(9), source, strict=False)) == []
    assert source.position() == position


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
    assert next(Batches(WithState(8), steps=1, position=source.position()))[0] == 16


def test_data_without_a_state_may_have_other_batches_than_data_with_one():
    assert next(Batches(in_batches(4), steps=1, position=after(WithState(8), 2)))[0] == 16


def in_use(data: object, count: int, **options: object) -> object:
    source = Batches(data, steps=count, **options)  # type: ignore[arg-type]
    assert len(list(source)) == count
    return source.drawn_from(data)


def test_an_iterator_in_use_stands_after_all_that_it_has_given():
    data = iter(in_batches(4))
    drawn = in_use(data, 2)
    source = Batches(data, steps=2, drawn=drawn)  # type: ignore[arg-type]
    assert [batch[0] for batch in source] == [8, 12]
    assert next(Batches(in_batches(4), steps=1, position=source.position()))[0] == 16


@pytest.mark.parametrize("given", [2, 4])
def test_an_iterator_in_use_goes_on_by_examples(given: int):
    """The run used two batches of 8 before; this iterator has given batches of 4."""
    data, position = iter(in_batches(4)), after(in_batches(8), 2)
    drawn = in_use(data, given)
    assert next(Batches(data, steps=1, position=position, drawn=drawn))[0] == 16  # type: ignore[arg-type]


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
    assert next(Batches(data, steps=1, position=position, drawn=source.drawn_from(data)))[0] == 12


# ---------------------------------------------------------------------- the order of later passes


class Shuffles:
    """Shuffles each pass anew, at its first draw; the order depends on the passes before."""

    def __init__(self, seed: int | None = 0):
        self.random = np.random.default_rng(seed)

    def __iter__(self) -> Iterator[np.ndarray]:
        yield from self.random.permutation(24).reshape(6, 4)


class CountsPasses(Shuffles):
    """Begins each pass with an iterator that has a state; the order depends on the number of passes before."""

    passes = 0

    def __iter__(self) -> WithState:
        self.passes += 1
        made = WithState(4)
        made.data = list(np.random.default_rng(self.passes).permutation(24).reshape(6, 4))
        return made


class Shrinks(Shuffles):
    """Passes of several lengths."""

    def __iter__(self) -> Iterator[np.ndarray]:
        order = self.random.permutation(24).reshape(6, 4)
        yield from order[: self.random.integers(2, 7)]


class Ordered:
    """Batches that are no list, in the same order in each pass."""

    def __init__(self, *batches: np.ndarray) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter(self.batches)


@pytest.mark.parametrize("count", [1, 5, 6, 7, 12, 15])
@pytest.mark.parametrize("kind", [Shuffles, CountsPasses, Shrinks])
def test_later_passes_are_those_of_an_uninterrupted_run(kind: type[Shuffles], count: int):
    undisturbed = list(Batches(kind(), steps=30))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed = list(Batches(kind(), steps=30 - count, position=after(kind(), count)))
    np.testing.assert_array_equal(resumed, undisturbed[count:])


def test_an_order_that_changes_from_run_to_run_is_told():
    position = after(Shuffles(seed=1), 2)
    with pytest.warns(UserWarning, match="does not draw the order of the run before: up to batch 2 of pass 1 it"):
        next(Batches(Shuffles(seed=2), steps=1, position=position))
    with pytest.warns(UserWarning, match="up to batch 1 of pass 2 it has drawn other batches"):
        next(Batches(Shuffles(seed=2), steps=1, position=after(Shuffles(seed=1), 7)))
    same, used = after(Shuffles(seed=1), 2), Shuffles(seed=1)
    list(used)  # the loader goes on from a pass that the run before did not make
    with pytest.warns(UserWarning, match="does not draw the order of the run before"):
        next(Batches(used, steps=1, position=same))


def test_another_order_is_told_though_the_last_batch_is_the_same():
    first, second, third = np.arange(12).reshape(3, 4)
    with pytest.warns(UserWarning, match="up to batch 3 of pass 1 it has drawn other batches"):
        next(Batches(Ordered(second, first, third), steps=1, position=after(Ordered(first, second, third), 3)))


class ShuffledList(list[np.ndarray]):
    """A list whose passes have an order of their own."""

    def __init__(self, seed: int):
        super().__init__(in_batches(4))
        self.random = np.random.default_rng(seed)

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter([self[i] for i in self.random.permutation(len(self))])


@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_that_the_program_has_shuffled_is_told(kind: type, count: int):
    data = in_batches(4)
    position, text = after(kind(data), count), f"up to batch 2 of pass {1 + count // 6}"
    with pytest.warns(UserWarning, match=text):
        next(Batches(kind(data[::-1]), steps=1, position=position))


@pytest.mark.parametrize("count", [2, 8])
def test_a_list_of_a_class_of_its_own_may_shuffle(count: int):
    undisturbed, position = list(Batches(ShuffledList(0), steps=12)), after(ShuffledList(0), count)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed = list(Batches(ShuffledList(0), steps=12 - count, position=position))
    np.testing.assert_array_equal(resumed, undisturbed[count:])
    with pytest.warns(UserWarning, match=r"the data \(a ShuffledList\) does not draw the order"):
        next(Batches(ShuffledList(1), steps=1, position=position))


def of_older_checkpoint(data: object) -> DataPosition:
    return replace(after(data, 2), order=None)


@pytest.mark.parametrize("make", [np.asarray, jnp.asarray, list])
@pytest.mark.parametrize("before", [lambda data: after(data, 8), of_older_checkpoint])
def test_a_list_as_before_is_not_told(make: Callable[..., Any], before: Callable[..., DataPosition]):
    data, display = [make(batch) for batch in in_batches(4)], Lines()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        next(Batches(list(data), steps=1, position=before(data), display=display))
    assert display.shown == []


class Lines(Display):
    def __init__(self) -> None:
        super().__init__(False)
        self.shown: list[str] = []

    def message(self, text: str) -> None:
        self.shown.append(text)


@pytest.mark.parametrize("count", [2, 7])
def test_what_cannot_be_known_is_told(count: int):
    display = Lines()
    list(Batches(CountsPasses(), steps=8, position=after(CountsPasses(), count), display=display))
    told = [line for line in display.shown if "in this order cannot be known" in line]
    assert len(told) == 1, "once"
    assert f"pass {2} over the data (a CountsPasses)" in told[0]
    display.shown.clear()
    position = after((jnp.asarray(batch) for batch in in_batches(4)), 2)
    next(Batches((jnp.asarray(batch) for batch in in_batches(4)), steps=1, position=position, display=display))
    assert "that its order is that of the run before cannot be known" in display.shown[0]


def test_passes_before_are_refused_if_no_batch_is_to_be_drawn_again():
    with pytest.raises(DataPositionError, match=r"written in pass 2 .* a Shuffles may depend on the passes before"):
        next(Batches(Shuffles(), steps=1, position=after(Shuffles(), 7), resume_data="refuse"))
    rest = Batches(CountsPasses(), steps=1, position=after(CountsPasses(), 7), resume_data="refuse")
    np.testing.assert_array_equal(next(rest), list(Batches(CountsPasses(), steps=8))[7])


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
    for _ in range(3):
        next(source)
    before, now = source.position_after(2), source.position()
    assert before is not None
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
        source.position().to_json()


def test_a_pass_that_was_used_up_by_an_earlier_loop_is_no_empty_data():
    """The loop drew nothing itself, from an iterator that had given its whole pass."""
    position = DataPosition(batches=0, epoch=0, in_epoch=6, examples=24, batch_size=4)
    assert [batch[0] for batch in Batches(in_batches(4), steps=1, position=position)] == [0]
