"""`jaxpp_flax.linen.scan` computes what `nn.scan` computes, and marks each part; trees are mapped both ways."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jaxpp_flax.linen as pipeline
from jaxpp_flax.layers import join_scanned, split_scanned
from tests.helpers import slow, tree_allclose
from tests.layers.test_nnx import marks

X = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)
LENGTH = 5
AXES = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": LENGTH}


class Layer(nn.Module):
    features: int = 4

    @nn.compact
    def __call__(self, x, scale):
        x = jnp.tanh(nn.Dense(self.features)(x) * scale)
        return x, x.sum()


class Model(nn.Module):
    stages: object = None
    options: object = None
    target: object = Layer

    @nn.compact
    def __call__(self, x, scale):
        options = {**AXES, **(self.options or {})}
        if self.stages is None:
            layers = nn.scan(self.target, **options)
        else:
            layers = pipeline.scan(self.target, stages=self.stages, **options)
        x, sums = layers(4, name="layers")(x, scale)
        return nn.Dense(2)(x), sums


SCALES = jnp.linspace(0.5, 1.5, LENGTH)
KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def variables():
    """Those of every model here, however it runs its layers."""
    return Model().init(KEY, X, SCALES)


@pytest.mark.parametrize("stages", [slow(1), slow(2), slow(5), (1, 3, 1)], ids=str)
@pytest.mark.parametrize("target", [Layer, nn.remat(Layer, prevent_cse=False)], ids=["plain", "remat"])
def test_it_computes_what_nn_scan_does(variables, stages, target):
    plain, divided = Model(target=target), Model(stages=stages, target=target)
    split = split_scanned(variables, "layers", stages)
    assert jax.tree.structure(split) == jax.tree.structure(jax.eval_shape(divided.init, KEY, X, SCALES))
    tree_allclose(divided.apply(split, X, SCALES), plain.apply(variables, X, SCALES), rtol=1e-6)
    tree_allclose(join_scanned(split, "layers"), variables, rtol=0, atol=0)


def test_inputs_and_outputs_on_other_axes_and_broadcast(variables):
    class Vectors(Layer):
        @nn.compact
        def __call__(self, x, scale):
            x = jnp.tanh(nn.Dense(self.features)(x) * scale)
            return x, x.sum(0)

    split = split_scanned(variables, "layers", (3, 2))
    for target, options, scales in [
        (Layer, {"in_axes": nn.broadcast, "out_axes": 0}, 0.7),
        (Vectors, {"in_axes": 1, "out_axes": 1}, jnp.tile(SCALES, (4, 1))),
    ]:
        plain, divided = (Model(stages=stages, options=options, target=target) for stages in (None, 2))
        tree_allclose(divided.apply(split, X, scales), plain.apply(variables, X, scales), rtol=1e-6)


def test_a_mark_after_each_stage_named_by_its_path(variables):
    found = marks(Model(stages=2).apply, split_scanned(variables, "layers", 2), X, SCALES)
    assert found == ["layers/stage_0", "layers/stage_1"]


def test_unnamed_modules_are_called_as_by_nn_scan():
    class Unnamed(nn.Module):
        divided: bool

        @nn.compact
        def __call__(self, x):
            layers = pipeline.scan(Layer, stages=2, **AXES) if self.divided else nn.scan(Layer, **AXES)
            return layers()(x, SCALES)[0]

    names = [sorted(jax.eval_shape(Unnamed(divided).init, KEY, X)["params"]) for divided in (False, True)]
    assert names[0] == names[1] == ["ScanLayer_0"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"stages": 6}, "5 layers"),
        ({"stages": 0}, "5 layers"),
        ({"stages": (2, 2)}, r"stages=\(2, 2\) sum up to 4"),
        ({"stages": (5, 0)}, "sizes of 1 or more"),
        ({"stages": 2, "length": None}, "give length="),
        ({"stages": 2, "variable_carry": "state"}, "variable_carry='state'"),
        ({"stages": 2, "variable_broadcast": "params"}, "in_axes=nn.broadcast"),
        ({"stages": 2, "reverse": True}, "reverse=True"),
        ({"stages": 2, "out_axes": nn.broadcast}, "one axis"),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
def test_what_cannot_be_divided_is_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        pipeline.scan(Layer, **{**AXES, **arguments})


def test_a_function_is_refused():
    def body(module, x, _):
        return x, None

    with pytest.raises(TypeError, match="got body"):
        pipeline.scan(body, stages=2, **AXES)


def test_a_marked_layer_is_refused_with_what_to_do():
    decorated = pipeline.pipeline_stage(type("Decorated", (Layer,), {"__call__": lambda self, x, scale: (x, scale)}))
    subclass = type("Subclass", (pipeline.PipelineStage,), {"__call__": lambda self, x, scale: (x, scale)})
    for marked in (decorated, subclass, nn.remat(subclass)):
        with pytest.raises(ValueError, match=r"each of whose layers ends with a mark.* Pass the class without @pipe"):
            pipeline.scan(marked, stages=2, **AXES)


def test_optimizer_states_and_boxes_are_divided_too():
    box = nn.LogicallyPartitioned(jnp.arange(12.0).reshape(6, 2), names=("layers", "embed"))
    params = {"decoder": {"layers": {"scale": box}, "bias": jnp.ones(2)}}
    state = optax.adamw(1e-3).init(params)
    split = split_scanned(state, "layers", 4)
    part = split[0].mu["decoder"]["layers"]["stage_0"]["scale"]
    assert part.value.shape == (2, 2)
    assert part.names == ("layers", "embed")
    tree_allclose(join_scanned(split, "layers"), state, rtol=0, atol=0)
    values = split_scanned(params, "layers", [1, 5])["decoder"]["layers"]
    tree_allclose(values["stage_1"]["scale"].value, box.value[1:], rtol=0, atol=0)


def test_an_nnx_state_goes_there_and_back():
    stacked = {"kernel": jnp.arange(80.0).reshape(LENGTH, 4, 4), "bias": jnp.ones((LENGTH, 4))}
    state = nnx.State({"layers": {name: nnx.Param(value) for name, value in stacked.items()}})
    split = split_scanned(state, "layers", (2, 3))
    assert [leaf.shape[0] for leaf in jax.tree.leaves(split)] == [2, 2, 3, 3]
    tree_allclose(join_scanned(split, "layers"), state, rtol=0, atol=0)
