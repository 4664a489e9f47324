"""Attributes of a model that a call changes in place: a list, a dictionary, a set, a plain object."""

from __future__ import annotations

import dataclasses
import functools
import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.trainers import Training
from jaxpp_flax.trainers.errors import ModelError
from jaxpp_flax.trainers.state.in_place import Contents

BATCH = np.ones((8, 4), np.float32)


class Counter:
    def __init__(self) -> None:
        self.calls = 1


class Slotted:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 1


class Model(nnx.Module):
    def __init__(self, **attributes: Any):
        self.layer = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        for name, value in attributes.items():
            setattr(self, name, nnx.static(value))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layer(x)


def squares(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(model(x) ** 2)


def trainer_of(model: Model, loss: Any, num_microbatches: int = 1, **options: Any) -> PipelineTrainer:
    return PipelineTrainer(
        model, optax.sgd(0.1), loss, num_stages=1, num_microbatches=num_microbatches, logging=False, **options
    )


def append(model: Any) -> Any:
    model.py.append(1)
    return len(model.py)


def count_in_a_dict(model: Any) -> Any:
    model.py["calls"] += 1
    return model.py["calls"]


def count_in_a_tuple(model: Any) -> Any:
    model.py[0].add(len(model.py[0]))
    return len(model.py[0])


def count_in_an_object(model: Any) -> Any:
    model.py.calls += 1
    return model.py.calls


def hold_an_array(model: Any) -> Any:
    before = model.py.get("sum", 0.0)
    model.py["sum"] = model.layer.bias[...].sum()
    return before


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize(
    ("value", "change", "text"),
    [
        ([1], append, "py from [1] to [1, 1]"),
        ({"calls": 1}, count_in_a_dict, "py/calls from 1 to 2"),
        (({0},), count_in_a_tuple, "py/0 from {0} to {0, 1}"),
        (Counter(), count_in_an_object, "py/calls from 1 to 2"),
        (SimpleNamespace(calls=1), count_in_an_object, "py/calls from 1 to 2"),
        (Slotted(), count_in_an_object, "py/calls from 1 to 2"),
        ({}, hold_an_array, "py/sum from None to "),
    ],
    ids=["list", "dict", "set", "object", "namespace", "slots", "array"],
)
def test_a_change_in_place_is_refused_and_the_users_object_stays(
    value: Any, change: Any, text: str, num_microbatches: int
):
    model = Model(py=value)
    contents = Contents(model)
    trainer = trainer_of(model, lambda model, x: squares(model, x) * change(model), num_microbatches)
    with pytest.raises(ModelError, match=re.escape(f"changes the attribute {text}")):
        trainer.train_step(BATCH)
    assert contents.change() is None
    assert model.py is value


def test_the_function_after_update_changes_nothing_in_place():
    model = Model(py=[1])

    def after_update(model: Any, metrics: Any) -> None:
        model.py.append(1)

    with pytest.raises(ModelError, match=re.escape("after_update changes the attribute py from [1] to [1, 1]")):
        trainer_of(model, squares, training=Training(after_update=after_update)).train_step(BATCH)
    assert model.py == [1]


def test_an_evaluation_leaves_the_users_object_as_it_is():
    model = Model(py=[1])
    trainer = trainer_of(model, lambda model, x, training: squares(model, x) * (1 if training else append(model)))
    trainer.train_step(BATCH)
    first = trainer.evaluate([BATCH])["loss"]
    assert model.py == [1]
    assert first == pytest.approx(trainer.evaluate([BATCH, BATCH])["loss"])


class Guarded:
    """An object whose attribute cannot be set from outside."""

    def __init__(self) -> None:
        self.__dict__["calls"] = 1

    @property
    def calls(self) -> int:
        return self.__dict__["calls"]

    def count(self) -> None:
        self.__dict__["calls"] += 1
        self.__dict__["new"] = 1


def test_an_object_that_refuses_to_be_set_is_put_back():
    contents = Contents(Model(py=(guarded := Guarded())))
    guarded.count()
    assert contents.change() == ("py/calls", 1, 2)
    contents.restore()
    assert vars(guarded) == {"calls": 1}


@dataclasses.dataclass
class Config:
    width: int = 4
    sizes: Any = (1, 2)
    kernel: Any = None
    parent: Any = None

    @functools.cached_property
    def scale(self) -> float:
        return 1 / self.width


def test_attributes_that_calls_read_and_caches_that_they_fill_are_accepted():
    config = Config(sizes=[1, {"a": 2}], kernel=np.ones(10), parent=Counter())
    config.parent.child = config  # objects that refer to one another
    model = Model(
        config=config, function=jnp.tanh, partial=functools.partial(jnp.sum, axis=0), kind=nnx.Linear, cache={},
        dtype=jnp.bfloat16, other=jnp.dtype("float32"), precision=jax.lax.Precision.HIGHEST, last={},
        mesh=jax.make_mesh((1,), ("data",)), words=[str(i) for i in range(1_000)],
    )  # fmt: skip

    def loss(model: Any, x: jax.Array) -> jax.Array:
        mask = model.cache.setdefault(x.shape[1], np.tri(x.shape[1]))
        model.last["inputs"] = x  # kept to look at, and never read
        return squares(model, model.function(x) @ mask) * model.config.scale

    trainer = trainer_of(model, loss, 2)
    trainer.train_step(BATCH)
    assert (model.cache, model.last) == ({}, {}), "no values of a trace are left"
    assert model.config is config
    assert trainer.gather_model().config is config


def test_arrays_are_not_copied_and_not_compared():
    held = np.zeros(3)
    model = Model(config=Config(kernel=held))
    contents = Contents(model)
    held += 1
    assert contents.change() is None
    contents.restore()
    assert model.config.kernel is held
