"""Marking NNX modules: the identity outside a pipeline, and invisible to parameters, graphs and pickles."""

from __future__ import annotations

import copy
import inspect
import pickle

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

from jaxpp_flax import PipelineStage, mark_stage_end, pipeline_stage
from jaxpp_flax.engine.jit import mpmd_jit
from tests.engine.toys import mesh_of
from tests.helpers import tree_allclose


class Block(nnx.Module):
    def __init__(self, *, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(jnp.tanh(self.linear(x))))


class SubclassedBlock(PipelineStage):
    def __init__(self, *, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return self.linear(x)


class Overriding(SubclassedBlock):
    def __call__(self, x):
        return super().__call__(x) + 1


@pipeline_stage
class DecoratedBlock(nnx.Module):
    def __init__(self, *, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return self.linear(x)


class Foreign:
    """A class of another library."""

    def __call__(self, x):
        return x


class Model(nnx.Module):
    def __init__(self, stage, *, rngs):
        self.blocks = nnx.List([stage(Block(rngs=rngs), i) for i in range(3)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def build(marked):
    stage = (lambda block, i: PipelineStage(block, name=f"block_{i}")) if marked else (lambda block, i: block)
    return Model(stage, rngs=nnx.Rngs(0))


def marks(function, *args):
    """The names of the forward marks in the trace, nested calls included."""

    def walk(jaxpr):
        for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            if eqn.primitive.name == "stage_marker":
                yield eqn.params["name"]
            for value in eqn.params.values():
                if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
                    yield from walk(value)

    return list(walk(jax.make_jaxpr(function)(*args)))


X = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)


def test_wrapping_is_the_identity_outside_a_pipeline():
    plain, marked = build(False), build(True)
    tree_allclose(marked(X), plain(X), rtol=0, atol=0)
    assert isinstance(marked.blocks[0], Block)
    assert isinstance(marked.blocks[0], PipelineStage)
    block = Block(rngs=nnx.Rngs(0))
    assert PipelineStage(block) is block


def test_a_marker_leaves_no_trace_in_the_compiled_program():
    def compiled(model):
        graphdef, state = nnx.split(model)
        return jax.jit(lambda s, x: nnx.merge(graphdef, s)(x)).lower(state, X).compile()

    assert compiled(build(True)).cost_analysis() == compiled(build(False)).cost_analysis()


def test_states_have_the_paths_of_the_plain_model():
    plain, marked = nnx.state(build(False)), nnx.state(build(True))
    assert jax.tree_util.tree_structure(plain) == jax.tree_util.tree_structure(marked)
    assert list(nnx.to_flat_state(plain).paths) == list(nnx.to_flat_state(marked).paths)
    model = build(True)
    nnx.update(model, plain)  # weights move from the plain to the marked model


def test_graphdefs_of_two_models_are_as_equal_as_those_of_plain_ones():
    plain = nnx.graphdef(build(False)) == nnx.graphdef(build(False))
    assert (nnx.graphdef(build(True)) == nnx.graphdef(build(True))) == plain


@pytest.mark.parametrize("make", [lambda: build(True), lambda: Overriding(rngs=nnx.Rngs(0)), lambda: build(False)])
def test_copies(make):
    model = make()
    model.eval()
    expected = model(X)
    graphdef, state = nnx.split(model)
    copies = {
        "merge": nnx.merge(graphdef, state),
        "clone": nnx.clone(model),
        "deepcopy": copy.deepcopy(model),
        "pickle": pickle.loads(pickle.dumps(model)),
        "pickled graphdef": nnx.merge(pickle.loads(pickle.dumps(graphdef)), state),
    }
    for name, other in copies.items():
        assert type(other) is type(model), name
        if isinstance(model, Model):
            assert type(other.blocks[0]) is type(model.blocks[0]), name
            assert getattr(other.blocks[1], "stage_name", None) == getattr(model.blocks[1], "stage_name", None), name
        tree_allclose(other(X), expected, rtol=0, atol=0)


def test_transforms():
    model = build(True)
    expected = build(True)(X)
    tree_allclose(nnx.jit(lambda m, x: m(x))(model, X), expected)
    abstract = nnx.eval_shape(lambda: build(True))
    assert isinstance(abstract.blocks[0], PipelineStage)
    plain, marked = (nnx.eval_shape(lambda m=m: nnx.grad(lambda m: m(X).sum())(build(m))) for m in (False, True))
    assert jax.tree.structure(marked) == jax.tree.structure(plain)
    assert marks(lambda x: build(True)(x), X) == ["block_0", "block_1", "block_2"]
    assert marks(lambda x: nnx.remat(lambda m, y: m(y))(build(True), x), X) == ["block_0", "block_1", "block_2"]


def test_each_block_marks_once():
    assert marks(SubclassedBlock(rngs=nnx.Rngs(0)), X) == ["SubclassedBlock"]
    assert marks(Overriding(rngs=nnx.Rngs(0)), X) == ["Overriding"]
    assert marks(DecoratedBlock(rngs=nnx.Rngs(0)), X) == ["DecoratedBlock"]
    assert marks(PipelineStage(DecoratedBlock(rngs=nnx.Rngs(0)), name="a"), X) == ["a"]
    assert marks(PipelineStage(SubclassedBlock(rngs=nnx.Rngs(0)), name="b"), X) == ["b"]
    assert marks(PipelineStage(PipelineStage(nnx.Linear(4, 4, rngs=nnx.Rngs(0))), name="c"), X) == ["c"]


def test_functions_and_methods():
    @pipeline_stage
    def layer(x):
        return {"x": x}

    @pipeline_stage(name="named")
    def other(x):
        return x

    class Methods(nnx.Module):
        @pipeline_stage
        def encode(self, x):
            return x

        @pipeline_stage(name="decoder")
        def decode(self, x):
            return x

    model = Methods()
    assert marks(layer, X) == ["layer"]
    assert marks(other, X) == ["named"]
    assert marks(lambda x: model.decode(model.encode(x)), X) == ["encode", "decoder"]
    assert layer.__name__ == "layer"


def test_marks_of_layers_close_a_block_and_bare_ones_do_not():
    def closes(function):
        return [e.params["closes_block"] for e in jax.make_jaxpr(function)(X).eqns if "closes_block" in e.params]

    assert closes(pipeline_stage(lambda x: x)) == [True]
    assert closes(mark_stage_end) == [False]


def test_a_mark_inside_of_a_scan_is_refused_with_the_users_line():
    @nnx.vmap(in_axes=0, out_axes=0)
    def blocks_of(key):
        return DecoratedBlock(rngs=nnx.Rngs(key))

    graphdef, state = nnx.split(blocks_of(jax.random.split(jax.random.key(0), 2)))

    def model(state, x):
        scan = nnx.scan(DecoratedBlock.__call__, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return scan(nnx.merge(graphdef, state, copy=True), x)

    line = inspect.getsourcelines(model)[1] + 2
    with pytest.raises(ValueError, match=rf"'DecoratedBlock' stands inside `scan` at .*test_nnx.py:{line}\b"):
        mpmd_jit(model, mesh_of(2))(state, X)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: PipelineStage(Block), r"wraps an instance of an nnx.Module, got the class Block\. Decorate the class"),
        (lambda: PipelineStage(nn.Dense(3)), r"got Dense\. Use jaxpp_flax.linen.PipelineStage"),
        (lambda: PipelineStage(jnp.tanh), r"Decorate a function with @pipeline_stage"),
        (lambda: PipelineStage(3), r"wraps an nnx.Module, got int\. Pass a module"),
        (lambda: pipeline_stage(Block(rngs=nnx.Rngs(0))), r"got a Block, .*Wrap it: `PipelineStage\(module\)`"),
        (lambda: pipeline_stage(3), r"got an int, neither a function nor a class"),
        (lambda: pipeline_stage(type("Empty", (), {})), r"class Empty, which has no `__call__`"),
        (
            lambda: pipeline_stage(Foreign),
            r"class Foreign, which is no Flax module.*`x = mark_stage_end\(layer\(x\)\)`",
        ),
        (lambda: pipeline_stage(Foreign()), r"got a Foreign, neither .*mark_stage_end\(layer"),
        (lambda: PipelineStage(Foreign), r"got the class Foreign\. Models of other libraries .*mark_stage_end\(layer"),
        (lambda: PipelineStage(Foreign()), r"got Foreign\. Models of other libraries .*mark_stage_end\(layer"),
    ],
)
def test_refusals(call, text):
    with pytest.raises(TypeError, match=text):
        call()


def test_a_function_that_makes_a_module_is_refused():
    @pipeline_stage
    def make_block():
        return nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    with pytest.raises(
        TypeError, match=r"'make_block' is marked .* returns the module Linear.*`PipelineStage\(module\)`"
    ):
        make_block()
    with pytest.raises(TypeError, match=r"returns the module Dense.*`jaxpp_flax\.linen\.PipelineStage\(module\)`"):
        pipeline_stage(lambda: nn.Dense(4))()


def test_outside_a_pipeline_remat_recomputes_and_results_stay():
    """As the docstring says; and a module that two models share is one object."""
    block, x = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), jnp.ones((2, 4))
    loss = lambda model, x: jnp.sum(jnp.tanh(model(x)) ** 2)  # noqa: E731
    plain = nnx.grad(loss)(block, x)
    shared = PipelineStage(block, remat="full")
    assert shared is block
    tree_allclose(jax.tree.leaves(nnx.grad(loss)(block, x)), jax.tree.leaves(plain))
    graphdef, state = nnx.split(block)
    text = str(jax.make_jaxpr(lambda state, x: nnx.merge(graphdef, state)(x))(state, x))
    assert "stage_marker" in text
    assert "checkpoint" in text or "remat" in text.lower()
