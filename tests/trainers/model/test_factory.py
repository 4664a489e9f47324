"""Functions that make a model: the arguments they get, and those that are refused."""

from __future__ import annotations

import functools
from dataclasses import dataclass
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


@jax.tree_util.register_dataclass
@dataclass
class Tree:
    """As modules of Equinox and penzai are: a tree of arrays that is called with an input."""

    w: Any

    def __call__(self, x: Any) -> Any:
        return x @ self.w


class Layer:
    """As layers of Keras are: an object that takes anything, and asks for its inputs itself."""

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        raise TypeError("missing a required argument: 'inputs'")


def fails(streams: nnx.Rngs) -> Any:
    raise KeyError("config")


TREE, LINEN = Tree(jnp.ones((4, 4))), m.LinenModel(2)
ANOTHER = r"another library.*jaxpp_flax\.api\.treduce`, with `mark_stage_end"
FOREIGN: dict[str, tuple[Any, str]] = {
    "a tree of arrays": (TREE, rf"got Tree\. .*{ANOTHER}"),
    "its class": (Tree, rf"got the class Tree\. .*{ANOTHER}"),
    "a function made of it": (functools.wraps(TREE)(lambda x: TREE(x)), ANOTHER),  # as `jax.vmap` and `jax.jit` do
    "a factory of it": (lambda rngs: TREE, rf"must return an nnx\.Module, got Tree\. A trainer takes.*{ANOTHER}"),
    "an object": (Layer(), rf"'Layer' was called as a factory, and failed with TypeError: missing .*{ANOTHER}"),
    "its parts": ((TREE, len), rf"got tuple\. .*{ANOTHER}"),
    "a function of an input": (lambda x: x @ TREE.w, rf"'<lambda>' was called as a factory.*Rngs.*{ANOTHER}"),
    "a function of parameters": (lambda params, x: x @ params, rf"needs the arguments \['params', 'x'\].*{ANOTHER}"),
    "a Linen class": (m.LinenModel, r"got the class LinenModel\. Pass an instance, `LinenModel\(\.\.\.\)`, with var"),
    "apply": (LINEN.apply, r"got method\. Pass the module itself"),
    "a module's call": (m.Layers().__call__, r"got method\. Pass the module itself"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_models_of_other_libraries_are_refused(kind: str):
    model, message = FOREIGN[kind]
    with pytest.raises(TypeError, match=message):
        make(model)


def test_an_error_of_a_factory_stays():
    with pytest.raises(KeyError, match="config") as caught:
        make(fails)
    assert "'fails' was called as a factory, and failed with KeyError" in caught.value.__notes__[0]


def test_an_object_may_be_a_factory():
    class Config:
        def __call__(self, rngs: nnx.Rngs) -> nnx.Module:
            return m.Layers(rngs=rngs)

    assert make(Config()).abstract_model.layers[0].kernel.shape == (4, 4)


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
