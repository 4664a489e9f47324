"""Marking Linen modules: parameter paths are those of the plain model, in every style and under transforms."""

from __future__ import annotations

import inspect
import pickle

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import jaxpp_flax.linen as pipeline
from jaxpp_flax.engine.jit import mpmd_jit
from tests.engine.toys import mesh_of
from tests.helpers import tree_allclose
from tests.layers.test_nnx import marks

X = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)


class Block(nn.Module):
    features: int = 4

    @nn.compact
    def __call__(self, x):
        return jnp.tanh(nn.Dense(self.features)(x))


class Compact(nn.Module):
    wrap: object
    block: object = Block

    @nn.compact
    def __call__(self, x):
        for i in range(2):
            x = self.wrap(self.block(), f"b{i}")(x)
        return self.wrap(self.block(name="last"), "b2")(x)


class Setup(nn.Module):
    wrap: object
    block: object = Block

    def setup(self):
        self.first = self.wrap(self.block(), "b0")
        self.others = [self.wrap(self.block(), f"b{i}") for i in (1, 2)]

    def __call__(self, x):
        for block in (self.first, *self.others):
            x = block(x)
        return x


class Field(nn.Module):
    inner: nn.Module

    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(self.inner(x))


def plain(module, name):
    return module


@pytest.mark.parametrize("style", [Compact, Setup])
@pytest.mark.parametrize("block", [Block, nn.remat(Block), nn.jit(Block)], ids=["plain", "remat", "jit"])
def test_paths_and_values_are_those_of_the_plain_model(style, block):
    reference, marked = style(plain, block), style(pipeline.PipelineStage, block)
    variables = reference.init(jax.random.key(0), X)
    tree_allclose(marked.init(jax.random.key(0), X), variables, rtol=0, atol=0)
    tree_allclose(marked.apply(variables, X), reference.apply(variables, X), rtol=0, atol=0)
    assert marks(lambda x: marked.apply(variables, x), X) == ["b0", "b1", "b2"]
    loss = lambda model: jax.grad(lambda v: model.apply(v, X).sum())(variables)  # noqa: E731
    tree_allclose(loss(marked), loss(reference))


def test_the_default_name_is_the_path():
    model = Compact(lambda module, name: pipeline.PipelineStage(module))
    variables = model.init(jax.random.key(0), X)
    assert marks(lambda x: model.apply(variables, x), X) == ["Block_0", "Block_1", "last"]


def test_a_module_in_a_field():
    reference = Field(Block())
    marked = Field(pipeline.PipelineStage(Block(), name="inner"))
    variables = reference.init(jax.random.key(0), X)
    tree_allclose(marked.init(jax.random.key(0), X), variables, rtol=0, atol=0)
    assert marks(lambda x: marked.apply(variables, x), X) == ["inner"]
    assert marks(lambda x: marked.clone().apply(variables, x), X) == ["inner"]
    again = pickle.loads(pickle.dumps(marked))
    assert again == marked
    assert isinstance(again.inner, Block)
    assert isinstance(again.inner, pipeline.PipelineStage)


def test_base_class_and_decorator():
    class Stage(pipeline.PipelineStage):
        features: int

        @nn.compact
        def __call__(self, x):
            return nn.Dense(self.features)(x)

    class Over(Stage):
        @nn.compact
        def __call__(self, x):
            return super().__call__(x) + 1

    @pipeline.pipeline_stage
    class Decorated(nn.Module):
        features: int

        @nn.compact
        def __call__(self, x):
            return nn.Dense(self.features)(x)

    class Method(nn.Module):
        features: int

        @pipeline.pipeline_stage(name="above")
        @nn.compact
        def __call__(self, x):
            return nn.Dense(self.features)(x)

    class MethodBelow(nn.Module):
        features: int

        @nn.compact
        @pipeline.pipeline_stage(name="below")
        def __call__(self, x):
            return nn.Dense(self.features)(x)

    expected = nn.Sequential([nn.Dense(4)]).init(jax.random.key(0), X)
    names = {Stage: "Stage", Over: "Over", Decorated: "Decorated", Method: "above", MethodBelow: "below"}
    for cls, name in names.items():
        for block in (cls, nn.remat(cls), nn.jit(cls)):
            model = block(features=4)
            variables = model.init(jax.random.key(0), X)
            assert jax.tree.map(jnp.shape, variables["params"]) == {"Dense_0": {"kernel": (4, 4), "bias": (4,)}}
            found = marks(lambda x, m=model, v=variables: m.apply(v, x), X)
            assert len(found) == 1, (cls, found)
            if block is cls:
                assert found == [name]
    assert set(expected["params"]) == {"layers_0"}


@pipeline.pipeline_stage
class ScannedBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.Dense(4)(x), None


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        blocks = nn.scan(ScannedBlock, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        return blocks()(x, None)[0]


def test_a_mark_inside_of_a_scan_is_refused_with_the_users_line():
    model = Scanned()
    variables = model.init(jax.random.key(0), X)
    line = inspect.getsourcelines(Scanned)[1] + 4
    with pytest.raises(ValueError, match=rf"'ScanScannedBlock_0' stands inside `scan` at .*test_linen.py:{line}\b"):
        mpmd_jit(model.apply, mesh_of(2))(variables, X)


def test_refusals():
    for bad, text in [
        (Block, r"got the class Block\. Decorate the class"),
        (nnx.Linear(2, 2, rngs=nnx.Rngs(0)), r"got Linear\. Use jaxpp_flax.PipelineStage"),
        (jnp.tanh, "Decorate a function"),
        (1, r"wraps a Linen Module, got int\. Pass a module"),
    ]:
        with pytest.raises(TypeError, match=text):
            pipeline.PipelineStage(bad)
