"""The data of an evaluation: one set of batches, or several by name."""

from __future__ import annotations

import numpy as np
import pytest

from jaxpp_flax.trainers import Evaluate
from jaxpp_flax.trainers.data.evaluation_sets import evaluation_sets


def test_one_set_and_several():
    batches = [{"x": np.zeros(2)}]
    assert evaluation_sets("data", batches) == {None: batches}
    assert evaluation_sets("data", {"a": batches, "b": iter([])}).keys() == {"a", "b"}


class Table(list):
    """Has a shape and no dtype, as `datasets.Dataset`."""

    shape = (1, 2)


def test_a_set_may_have_a_shape():
    assert evaluation_sets("data", {"a": Table(), "b": Table()}) == {"a": [], "b": []}


@pytest.mark.parametrize("data", [iter([]), {"a": [], "b": iter([])}])
def test_an_iterator_cannot_be_evaluated_again(data: object):
    with pytest.raises(ValueError, match="every=2 needs Evaluate: data that can be iterated again, but"):
        Evaluate(data, every=2)  # type: ignore[arg-type]
    Evaluate(data)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ({"x": np.zeros(2)}, TypeError, "data is a dict of 'x': one batch"),
        ({"x": np.zeros(2), "step": 3}, TypeError, "data is a dict of 'x', 'step': one batch"),
        ({"a": {"x": np.zeros(2)}}, TypeError, r"data\['a'\] is a dict of 'x': one batch"),
        ({}, ValueError, "data is an empty mapping"),
        ({"a/b": []}, ValueError, "a set of the name 'a/b'"),
        ({3: []}, ValueError, "a set of the name 3"),
        ({"a": None}, TypeError, r"data\['a'\] is a NoneType, which cannot be iterated"),
    ],
)
def test_what_is_no_set_is_refused(data: object, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        evaluation_sets("data", data)
