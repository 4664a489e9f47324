"""The order of the data: later passes, and whether a resumed run draws the batches that the run before drew."""

from __future__ import annotations

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
from tests.trainers.data.test_position import WithState, after, in_batches


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
    text = r"the data \(an Ordered\) .* up to batch 3 of pass 1 it has drawn other batches.* Shuffle with a fixed seed"
    with pytest.warns(UserWarning, match=text):
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
        super().__init__(messages=False, progress=False)
        self.shown: list[str] = []

    def message(self, text: str) -> None:
        self.shown.append(text)


@pytest.mark.parametrize("count", [2, 7])
def test_what_cannot_be_known_is_told(count: int):
    display = Lines()
    list(Batches(CountsPasses(), steps=8, position=after(CountsPasses(), count), display=display))
    told = [line for line in display.shown if "earlier passes were not drawn again" in line]
    assert len(told) == 1, "once"
    assert "pass 2 over the data (a CountsPasses)" in told[0]
    assert told[0].endswith("Let each pass depend on a seed and its number only.")


PARTS = "each process reads a part. Give an iterator"
OLDER = "the checkpoint does not tell. Give an iterator"
NO_ARRAYS = "they are no NumPy arrays. Give NumPy arrays, or an iterator"


@pytest.mark.parametrize(
    ("make", "processes", "older", "why"),
    [(jnp.asarray, 1, False, NO_ARRAYS), (np.asarray, 2, False, PARTS), (np.asarray, 1, True, OLDER)],
)
def test_why_an_order_is_not_known_is_told(
    make: Callable[..., Any], processes: int, older: bool, why: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("jax.process_count", lambda: processes)
    data, display = Ordered(*map(make, in_batches(4))), Lines()
    position = replace(after(data, 8), **({"order": None} if older else {}))
    next(Batches(data, steps=1, position=position, display=display))
    assert display.shown == [
        "the data (an Ordered) was drawn again up to batch 2 of pass 2. Whether these are the batches of the run "
        f"before is not known: {why} with get_state and set_state."
    ]


def test_passes_before_are_refused_if_no_batch_is_to_be_drawn_again():
    with pytest.raises(DataPositionError, match=r"written in pass 2 .* a Shuffles may depend on the passes before"):
        next(Batches(Shuffles(), steps=1, position=after(Shuffles(), 7), resume_data="refuse"))
    rest = Batches(CountsPasses(), steps=1, position=after(CountsPasses(), 7), resume_data="refuse")
    np.testing.assert_array_equal(next(rest), list(Batches(CountsPasses(), steps=8))[7])
