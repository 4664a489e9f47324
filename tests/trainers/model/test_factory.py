"""Functions that make a model: the arguments they get, and those that are refused."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.trainers.errors import ModelError
from jaxpp_flax.trainers.model.factory import call_factory
from tests.trainers import models as m

OUTSIDE = nnx.Rngs(0)


def reads(rngs: nnx.Rngs) -> nnx.Module:
    model = m.Layers(rngs=rngs)
    return m.Layers(2, 4 if float(model.layers[0].kernel.sum()) > 0 else 8, rngs=rngs)


def prints(rngs: nnx.Rngs) -> nnx.Module:
    jax.debug.print("{}", rngs.params())
    return m.Layers(rngs=rngs)


REFUSED: list[tuple[Any, type[Exception], str]] = [
    (
        lambda: m.Layers(rngs=OUTSIDE),
        ModelError,
        r"the factory '<lambda>' changes an object that was made outside of it: .*or take them from `rngs`",
    ),
    (reads, ModelError, r"the factory 'reads' reads the value of an array.*Compute .* with NumPy"),
    (prints, ModelError, r"the factory 'prints' has side effects in its trace: Debug"),
    (lambda rngs: None, TypeError, r"must return an nnx.Module, got NoneType\. Return it"),
    (lambda rngs: jnp.ones(3), TypeError, r"must return an nnx.Module, got \w+"),
    (
        lambda rngs: m.LinenModel(2),
        TypeError,
        r"got LinenModel\. Pass a Linen module itself, with variables=lambda key: module.init\(key, x\)",
    ),
    (lambda rngs, size: None, TypeError, r"needs the arguments \['size'\], but it is called with rngs"),
    (lambda: nnx.Dropout(0.1, rngs=nnx.Rngs(0)), ModelError, "the model Dropout has no param"),
]


def test_what_a_factory_must_not_do():
    for factory, error, message in REFUSED:
        live = len(jax.live_arrays())
        with pytest.raises(error, match=message):
            make(factory)
        assert len(jax.live_arrays()) <= live, "nothing was placed"


def make(model: Any, **options: Any) -> PipelineTrainer:
    options = {"num_stages": 2, "num_microbatches": 2, "logging": False, **options}
    return PipelineTrainer(model, optax.adam(0.1), m.squared_error, **options)


def test_variables_of_a_factory_and_other_arguments_are_refused():
    with pytest.raises(TypeError, match="variables= are for Linen models, but a factory, which holds its own"):
        make(lambda rngs: m.Layers(rngs=rngs), variables={"params": {}})
    with pytest.raises(ModelError, match=r"must return the collections of `module.init`, with 'params'; got \['x'\]"):
        make(nn.Dense(3), variables=lambda key: {"x": key})
    with pytest.raises(TypeError, match=r"must be an instance of .*class Layers\. Pass a function .*`lambda rngs: Lay"):
        make(m.Layers)


def test_an_optimizer_that_reads_values_is_refused():
    def init(params: Any) -> Any:
        return float(sum(jnp.sum(leaf) for leaf in jax.tree.leaves(params)))

    tx = optax.GradientTransformation(init, optax.sgd(0.1).update)
    with pytest.raises(ModelError, match=r"the optimizer's `init` reads the values .* Use only jax.numpy"):
        PipelineTrainer(
            lambda rngs: m.Layers(rngs=rngs), tx, m.squared_error, num_stages=2, num_microbatches=2, logging=False
        )


def test_a_factory_gets_streams_by_name_by_position_or_not_at_all():
    def by_name(*, rngs: Any) -> Any:
        return rngs

    def by_position(streams: Any, width: int = 4) -> Any:
        return streams

    assert [call_factory(f, "rngs", lambda: 7) for f in (by_name, by_position, lambda: 7, lambda *a: 7)] == [7] * 4
    assert call_factory(functools.partial(m.Layers, 2), "rngs", lambda: nnx.Rngs(1)).layers[0] is not None


def test_a_module_that_exists_may_be_returned():
    module = m.Layers()
    trainer, batch = make(lambda: module, num_stages=1), m.make_xy(4)
    np.testing.assert_allclose(float(trainer.train_step(batch)["loss"]), m.squared_error(module, batch), rtol=1e-5)
