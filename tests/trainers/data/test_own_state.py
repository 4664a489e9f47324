"""Data with a state of its own: a loader or dataset has it, as torchdata's and Hugging Face's, or an iterator."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from jaxpp_flax.trainers.data.stream import Batches
from tests.trainers.data.test_position import after


def order(number: int) -> np.ndarray:
    return np.random.default_rng(number).permutation(24).reshape(6, 4)


class Loader:
    """As torchdata's: `state_dict` is of the newest iterator, and the next one begins at a loaded state. It counts its
    passes. The iterator has the methods too, but cannot go back."""

    def __init__(self) -> None:
        self.passes, self.loaded, self.iterator = -1, None, None

    def __iter__(self) -> LoaderIterator:
        self.passes, at = self.loaded or (self.passes + 1, 0)
        self.loaded, self.iterator = None, LoaderIterator(self, at)
        return self.iterator

    def state_dict(self) -> dict[str, Any]:
        return {"pass": self.passes, "at": self.iterator.at if self.iterator else 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = (state["pass"], state["at"])


class LoaderIterator(Iterator[np.ndarray]):
    def __init__(self, loader: Loader, at: int):
        self.order, self.at = order(loader.passes), at

    def __next__(self) -> np.ndarray:
        if self.at == 6:
            raise StopIteration
        self.at += 1
        return self.order[self.at - 1]

    def state_dict(self) -> Any:
        raise AssertionError("the loader's is to be asked")

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError("the loader's is to be asked")


class Dataset:
    """As Hugging Face's: each pass of the loaded state's epoch begins at that state; `set_epoch` shuffles anew."""

    def __init__(self) -> None:
        self.epoch, self.at, self.loaded = 0, 0, None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[np.ndarray]:
        begin = self.loaded["at"] if self.loaded and self.loaded["epoch"] == self.epoch else 0
        for self.at in range(begin + 1, 7):
            yield order(self.epoch)[self.at - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


class Iterates(Iterator[np.ndarray]):
    """An endless iterator."""

    at = 0

    def __next__(self) -> np.ndarray:
        self.at += 1
        return order(self.at)[0]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("count", [2, 6, 8, 13])
@pytest.mark.parametrize("kind", [Loader, Dataset, Iterates])
def test_it_goes_on_at_its_state_and_later_passes_are_whole(kind: Callable[[], Any], count: int):
    undisturbed = list(Batches(kind(), steps=20))
    position = after(kind(), count)
    assert position.iterator is not None
    assert position.order is None, "the state is enough: no batch is hashed"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed = list(Batches(kind(), steps=20 - count, position=position, resume_data="refuse"))
    np.testing.assert_array_equal(resumed, undisturbed[count:])


def test_a_pass_that_the_user_has_set_is_kept():
    data = Dataset()
    data.set_epoch(5)
    np.testing.assert_array_equal(list(Batches(data)), order(5))


@pytest.mark.filterwarnings("ignore")  # of torch
@pytest.mark.parametrize("workers", [0, 2])
def test_torchdata(workers: int):
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    torch = pytest.importorskip("torch")

    def make() -> Any:
        generator = torch.Generator()
        generator.manual_seed(0)
        return loaders.StatefulDataLoader(
            list(np.arange(24)), batch_size=4, shuffle=True, collate_fn=np.stack, generator=generator,
            num_workers=workers,
        )  # fmt: skip

    position = after(make(), 2)
    assert position.iterator is not None
    undisturbed = list(Batches(make(), steps=6))
    np.testing.assert_array_equal(list(Batches(make(), steps=4, position=position)), undisturbed[2:])


@pytest.mark.parametrize("count", [2, 6, 8])
def test_hugging_face(count: int):
    datasets = pytest.importorskip("datasets")

    def make() -> Any:
        made = datasets.Dataset.from_dict({"x": list(range(24))}).to_iterable_dataset(num_shards=3)
        return made.shuffle(seed=0, buffer_size=1).batch(4).with_format("numpy")

    undisturbed = [batch["x"] for batch in Batches(make(), steps=15)]
    resumed = [batch["x"] for batch in Batches(make(), steps=15 - count, position=after(make(), count))]
    np.testing.assert_array_equal(resumed, undisturbed[count:])
