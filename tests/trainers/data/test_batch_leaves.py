"""Batches of other libraries: what is taken, and what is refused with the conversion that works."""

from __future__ import annotations

import collections
import dataclasses
import re
import types
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import FrozenDict

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.trainers import BatchError
from jaxpp_flax.trainers.data.batch import batch_size, split_batch
from jaxpp_flax.trainers.data.batch_leaves import check_leaf

X = np.arange(32, dtype=np.float32).reshape(8, 4)


class BatchEncoding(collections.UserDict):
    """As of a tokenizer."""


class ModelOutput(collections.OrderedDict):
    """As of a model of transformers."""


class Rows(list):
    """As of a loader."""


@dataclasses.dataclass
class Example:
    x: Any


class Attrs:
    __attrs_attrs__ = ()  # as the decorator of attrs leaves it


class Table:
    """As of pandas, polars and pyarrow: a shape, and no dtype."""

    shape = X.shape

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return X


def of_library(name: str, dtype: Any) -> Any:
    """A tensor as of another library, with a dtype of its own."""
    return type("Tensor", (), {"__module__": f"{name}.tensors", "shape": X.shape, "dtype": dtype})()


NAMED = collections.namedtuple("NAMED", "x")

TAKEN = {
    "dict": {"x": X},
    "with None": {"x": X, "mask": None},
    "OrderedDict": collections.OrderedDict(x=X),
    "defaultdict": collections.defaultdict(list, x=X),
    "FrozenDict": FrozenDict(x=X),
    "named tuple": NAMED(X),
    "tuple": (X, {"y": X}),
    "bfloat16": {"x": X.astype(ml_dtypes.bfloat16)},
    "int4": {"x": X.astype(ml_dtypes.int4)},
    "keys": {"x": jax.random.split(jax.random.key(0), 8)},
    "bool": {"x": X > 3},
    "complex": {"x": X.astype(complex)},
}

REFUSED = [
    ("UserDict", BatchEncoding(x=X), "BatchEncoding", "dict(batch)"),
    ("inner UserDict", {"inputs": BatchEncoding(x=X)}, "batch['inputs'] is a BatchEncoding", "dict(batch['inputs'])"),
    ("subclass of OrderedDict", ModelOutput(x=X), "ModelOutput", "dict(batch)"),
    ("mapping proxy", types.MappingProxyType({"x": X}), "mappingproxy", "dict(batch)"),
    ("ChainMap", collections.ChainMap({"x": X}), "ChainMap", "dict(batch)"),
    ("subclass of list", Rows([X]), "Rows", "list(batch)"),
    ("dataclass", Example(X), "Example", "jax.tree_util.register_dataclass(Example)"),
    ("attrs", {"x": X, "y": Attrs()}, "batch['y'] is an Attrs", "attrs.asdict(batch['y'], recurse=False)"),
    ("namespace", types.SimpleNamespace(x=X), "SimpleNamespace", "vars(batch)"),
    ("table", {"x": Table()}, "batch['x'] is a Table", "np.asarray"),
    ("torch", {"x": of_library("torch", object())}, "batch['x'] is a torch Tensor", "tensor.float().numpy()"),
    ("tensorflow", {"x": of_library("tensorflow", object())}, "tensorflow Tensor", "as_numpy_iterator()"),
    ("polars", {"x": of_library("polars", types.SimpleNamespace)}, "polars Tensor", "series.to_numpy()"),
    ("text", {"x": X, "text": "once"}, "batch['text'] is a str", "Leave texts out"),
    ("texts", {"x": X, "text": ["once"] * 8}, "batch['text'][0] is a str", "Leave texts out"),
    ("bytes", {"x": X, "text": b"once"}, "batch['text'] is a bytes", "Leave texts out"),
    ("array of texts", {"x": X, "text": np.array(["once"] * 8)}, "dtype <U4", "Leave it out"),
    ("array of objects", {"x": X, "y": np.array([None] * 8)}, "dtype object", "Leave it out"),
    ("dates", {"x": X, "y": np.zeros(8, "datetime64[s]")}, "datetime64[s]", "astype"),
    ("fields", np.zeros(8, [("x", "f4")]), "batch is a structured array", "leaf.dtype.names"),
    ("mask", {"x": np.ma.masked_array(X, X > 3)}, "masked array", "leaf.filled(value)"),
    ("numbers", {"x": X, "y": [1, 2, 3]}, "a list of 3 numbers", "np.asarray"),
    ("equal lists", {"x": X, "y": [[1, 2], [3, 4]]}, "a list of 2 lists", "np.asarray"),
    ("ragged lists", {"x": X, "y": [[1, 2], [3]]}, "different lengths (1, 2)", "padding=True"),
    ("set", {"x": X, "y": {1, 2}}, "batch['y'] is a set", "Leave it out"),
    ("function", {"x": X, "y": print}, "batch['y'] is a builtin", "Leave it out"),
]  # fmt: skip


@pytest.mark.parametrize("batch", TAKEN.values(), ids=TAKEN)
def test_what_jax_takes_is_taken(batch: Any):
    assert batch_size(batch) == 8
    jax.tree.map(jnp.asarray, split_batch(batch, 2))


@pytest.mark.parametrize(("batch", "what", "remedy"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_what_jax_does_not_take_is_refused_with_a_remedy(batch: Any, what: str, remedy: str):
    with pytest.raises(BatchError) as caught:
        batch_size(batch)
    assert what in str(caught.value)
    assert remedy in str(caught.value)


def test_the_remedies_work():
    assert batch_size(dict(BatchEncoding(x=X))) == batch_size(vars(types.SimpleNamespace(x=X))) == 8
    assert split_batch({"x": np.asarray(Table())}, 2)["x"].shape == (2, 4, 4)
    registered = dataclasses.make_dataclass("Registered", ["x"])
    jax.tree_util.register_dataclass(registered, ["x"], [])
    assert split_batch(registered(X), 2).x.shape == (2, 4, 4)


def test_a_series_with_a_dtype_of_numpy_is_an_array():
    """Such as of pandas: NumPy's own functions would give it back as a series."""

    class Series(Table):
        dtype = X.dtype

    check_leaf((), Series())
    assert isinstance(split_batch(Series(), 2), np.ndarray)


@pytest.mark.parametrize("call", ["train_step", "compile", "fit", "evaluate", "predict"])
def test_every_call_refuses_a_user_dict(call: str):
    trained = PipelineTrainer(
        nnx.Linear(4, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1), lambda model, batch: model(batch["x"]).mean(),
        num_stages=1, num_microbatches=2, logging=False,
    )  # fmt: skip
    batch: Any = BatchEncoding(x=X)
    with pytest.raises((BatchError, TypeError), match=re.escape("dict(batch)")):
        getattr(trained, call)([batch] if call in ("fit", "evaluate") else batch)
