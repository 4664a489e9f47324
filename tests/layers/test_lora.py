"""Adapters on the linear layers of NNX models: the same results at first, the same paths, one kernel when merged."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from jaxpp_flax import PipelineStage
from jaxpp_flax.layers import add_lora, merge_lora
from jaxpp_flax.layers.lora import find_adapters
from tests.trainers import models as m


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


X = normal(0, 2, 5, 8)


def paths(model):
    return {"/".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model))}


def fill(model):
    """Give the second factors values, as training does."""
    for _, factor in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)):
        factor[...] = normal(factor.shape[0], *factor.shape).astype(factor.dtype)
    return model


def linear(**options):
    return nnx.Linear(8, 8, rngs=nnx.Rngs(0), **options)


MODELS = {
    "linear": (linear, {}),
    "stage": (lambda: PipelineStage(linear(), name="a"), {}),
    "bfloat16": (lambda: linear(param_dtype=jnp.bfloat16, dtype=jnp.bfloat16), {}),
    "subclass": (lambda: type("Mine", (nnx.Linear,), {})(8, 8, rngs=nnx.Rngs(0)), {}),
    "several_axes": (
        lambda: nnx.MultiHeadAttention(2, 8, rngs=nnx.Rngs(0), decode=False),
        {"layers": ["query", "out"]},
    ),
    "blocks": (lambda: m.Chain([PipelineStage(m.Block(rngs=nnx.Rngs(0)))] * 2), {"layers": "blocks/*/widen"}),
}  # fmt: skip


@pytest.mark.parametrize("kind", MODELS)
def test_an_adapted_model_begins_as_it_was_and_merges_to_what_it_computes(kind: str):
    make, options = MODELS[kind]
    model, plain = make(), make()
    types = [type(module) for _, module in nnx.iter_modules(model)]
    assert add_lora(model, rank=2, alpha=6, rngs=nnx.Rngs(1), **options) is model
    np.testing.assert_array_equal(model(X), plain(X))
    assert paths(plain) < paths(model)
    assert {path.rpartition("/")[2] for path in paths(model) - paths(plain)} == {"lora_a", "lora_b"}
    adapted = fill(model)(X)
    assert adapted.dtype == plain(X).dtype
    assert not np.allclose(adapted, plain(X), rtol=0.1)
    assert merge_lora(model) is model
    # The factors are of size 1, so a term has about 10 times the size of the layer's own result; bfloat16 has 8 bits.
    rtol, atol = (0.05, 0.3) if kind == "bfloat16" else (1e-5, 1e-4)
    np.testing.assert_allclose(np.float32(model(X)), np.float32(adapted), rtol=rtol, atol=atol)
    assert paths(model) == paths(plain)
    assert [type(module) for _, module in nnx.iter_modules(model)] == types
    assert nnx.graphdef(model) == nnx.graphdef(make()) or kind == "subclass"  # a new class in each call


def test_the_term_is_scaled_by_alpha_over_rank():
    layer: Any = fill(add_lora(linear(), rank=4, alpha=6, rngs=nnx.Rngs(1)))
    expected = linear()(X) + 6 / 4 * X @ layer.lora.lora_a[...] @ layer.lora.lora_b[...]
    np.testing.assert_allclose(layer(X), expected, rtol=1e-5, atol=1e-5)


def test_the_mark_of_a_stage_comes_after_the_term():
    first = add_lora(PipelineStage(linear(), name="a"), rank=2, rngs=nnx.Rngs(1))
    second = PipelineStage(add_lora(linear(), rank=2, rngs=nnx.Rngs(1)), name="a")
    bare = jax.make_jaxpr(PipelineStage(linear(), name="a"))(X)
    for layer in (first, second):
        traced = jax.make_jaxpr(layer)(X)
        assert str(traced.jaxpr.eqns[-1].primitive) == str(bare.jaxpr.eqns[-1].primitive)
        marks = [e for e in traced.jaxpr.eqns if e.primitive is traced.jaxpr.eqns[-1].primitive]
        assert len(marks) == 1
        assert type(merge_lora(layer)) is type(PipelineStage(linear()))


@pytest.mark.parametrize("make", [linear, lambda: PipelineStage(linear())], ids=["linear", "stage"])
def test_an_adapted_layer_is_copied_and_pickled(make):
    layer = fill(add_lora(make(), rank=2, alpha=3, rngs=nnx.Rngs(1)))
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), nnx.merge(*nnx.split(layer))):
        assert type(other) is type(layer)
        np.testing.assert_array_equal(other(X), layer(X))
    assert isinstance(layer, nnx.Linear)


def test_adapters_of_flax_itself_are_merged():
    layer = fill(nnx.LoRALinear(8, 8, lora_rank=2, rngs=nnx.Rngs(0)))
    adapted = layer(X)
    np.testing.assert_allclose(merge_lora(layer)(X), adapted, rtol=1e-5, atol=1e-4)
    assert nnx.graphdef(layer) == nnx.graphdef(linear())


def test_factors_take_the_annotations_of_their_kernel():
    annotated = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
    with nnx.use_eager_sharding(False):
        layer: Any = linear(kernel_init=annotated)
    add_lora(layer, rank=2, rngs=nnx.Rngs(1))  # the annotation is not applied to devices here either
    found = [factor.get_metadata() for factor in (layer.lora.lora_a, layer.lora.lora_b)]
    key = next(name for name in ("out_sharding", "sharding_names", "sharding") if found[0].get(name))
    assert [tuple(metadata[key]) for metadata in found] == [("embed", None), (None, "mlp")]


def stack():
    return nnx.vmap(lambda rngs: nnx.Linear(8, 8, rngs=rngs), in_axes=0)(nnx.Rngs(0).split(2))


REFUSED = {
    "glob": (lambda: m.Layers(2), {"layers": ["layers/0", "blocks"]}, r"no layer matches 'blocks'.*layers/0, layers/1"),
    "function": (lambda: m.Layers(2), {"layers": lambda path: False}, "chooses no layer"),
    "no layer": (lambda: nnx.Embed(3, 2, rngs=nnx.Rngs(0)), {}, r"no layer matches '\*'.*the model has none"),
    "rank": (linear, {"rank": 0}, "rank=0: it must be a whole number above 0"),
    "alpha": (linear, {"alpha": -1}, "alpha=-1: it must be a number above 0"),
    "stack": (lambda: m.Chain([stack()]), {}, r"layer 'blocks/0' has a kernel of shape \(2, 8, 8\).*nnx\.vmap maps"),
    "axes": (
        lambda: m.Chain([linear(), nnx.LinearGeneral(8, 8, axis=1, rngs=nnx.Rngs(0))]),
        {},
        r"layer 'blocks/1' has axis=\(1,\).*Leave the layer out",
    ),
    "twice": (
        lambda: add_lora(m.Layers(2), rank=1, layers="layers/1", rngs=nnx.Rngs(0)),
        {},
        "layer 'layers/1' has an adapter already",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_gets_no_adapter_is_refused_and_unchanged(kind: str):
    make, options, text = REFUSED[kind]
    model = make()
    before = paths(model)
    with pytest.raises(ValueError, match=text):
        add_lora(model, **{"rank": 2, "rngs": nnx.Rngs(0), **options})
    assert paths(model) == before


def test_what_cannot_be_merged_is_refused():
    with pytest.raises(ValueError, match="no layer has an adapter"):
        merge_lora(m.Layers(2))
    with pytest.raises(ValueError, match=r"the nnx\.LoRA at 'blocks/0' belongs to no linear layer"):
        merge_lora(m.Chain([nnx.LoRA(8, 2, 8, base_module=linear(), rngs=nnx.Rngs(0))]))
    functions: list[Any] = [lambda model: add_lora(model, rank=1, rngs=nnx.Rngs(0)), merge_lora]
    for function in functions:
        with pytest.raises(TypeError, match=r"needs an instance of an nnx\.Module, got Dense"):
            function(nn.Dense(3))


def test_layers_that_share_a_kernel_are_not_merged_into_it():
    first, second = (nnx.Linear(8, 8, rngs=nnx.Rngs(i)) for i in range(2))
    second.kernel = first.kernel
    model = m.Chain([first, second])
    add_lora(model, rank=2, rngs=nnx.Rngs(2))
    with pytest.raises(ValueError, match=r"merge_lora: the layers 'blocks/0' and 'blocks/1' share a kernel.*of their"):
        merge_lora(model)
    assert "blocks/0/lora/lora_a" in paths(model)


def tied_to(kind: str) -> Any:
    """A model whose first layer has an adapter, and a kernel that is used elsewhere too."""
    first, second = (nnx.Linear(8, 8, rngs=nnx.Rngs(i)) for i in range(2))
    model = m.Chain([first, second])
    if kind == "a layer":
        second.kernel = first.kernel
    elif kind == "a stage":
        model.blocks[1] = PipelineStage(second, name="second")
        second.kernel = first.kernel
    elif kind == "an embedding":
        model.embed = nnx.Embed(8, 8, rngs=nnx.Rngs(2))
        model.embed.embedding = first.kernel
    else:
        model.tables = nnx.data({"own": [first.kernel]})
    return add_lora(model, rank=2, layers="blocks/0", rngs=nnx.Rngs(3))


@pytest.mark.parametrize(
    ("kind", "other"),
    [("a layer", "blocks/1/kernel"), ("a stage", "blocks/1/kernel"), ("an embedding", "embed/embedding"),
     ("a container", "tables/own/0")],
)  # fmt: skip
def test_a_kernel_that_is_used_without_an_adapter_too_is_not_merged(kind: str, other: str):
    model = fill(tied_to(kind))
    text = rf"layers share a kernel: 'blocks/0/kernel', with an adapter, is also '{other}', without.*layer\.kernel = "
    for function in (merge_lora, find_adapters):
        with pytest.raises(ValueError, match=f"{function.__name__}: {text}"):
            function(model)
    adapted, kernel = model(X), np.asarray(model.blocks[1].kernel[...])
    model.blocks[0].kernel = nnx.Param(model.blocks[0].kernel[...])  # as the message says
    np.testing.assert_allclose(merge_lora(model)(X), adapted, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(model.blocks[1].kernel[...], kernel)


def test_a_module_that_is_used_twice_is_merged_once():
    layer = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    model = fill(add_lora(m.Chain([layer, layer]), rank=2, rngs=nnx.Rngs(1)))
    adapted = model(X)
    np.testing.assert_allclose(merge_lora(model)(X), adapted, rtol=1e-5, atol=1e-5)
