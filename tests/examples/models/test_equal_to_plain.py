"""The converted models give the losses and gradients of the plain ones under plain `jax.jit`."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from jaxpp_flax.layers import join_scanned, split_scanned
from jaxpp_flax.trainers import MeshOptions
from tests.examples.models.comparing import load, pipelined_step, tokens
from tests.helpers import tree_allclose

pytestmark = pytest.mark.slow

# Four microbatches' gradients summed, relative to a leaf's largest entry: some roundings of 6e-8. The exact gradient of
# a key's bias is zero, so only its absolute size tells.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-7}


def plain_nnx(model, loss_fn, batch):
    """Loss and gradients of the whole batch."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def loss_of(params):
        loss = loss_fn(nnx.merge(graphdef, params, rest, copy=True), batch)
        return loss[0] if isinstance(loss, tuple) else loss

    return jax.jit(jax.value_and_grad(loss_of))(params)


def test_vit():
    plain, converted = load("vit"), load("vit_pipelined")
    config = {"size": 8, "patch": 4, "channels": 1, "classes": 5, "width": 8, "layers": 3, "heads": 2}
    rng = np.random.default_rng(0)
    image = rng.normal(size=(16, 8, 8, 1)).astype(np.float32)
    batch = {"image": image, "label": rng.integers(0, 5, 16).astype(np.int32)}
    model = plain.ViT(**config, dropout_rate=0.0, rngs=nnx.Rngs(0))
    loss, grads = plain_nnx(model, plain.loss_fn, batch)
    marked = converted.ViT(**config, dropout_rate=0.0, rngs=nnx.Rngs(0))
    got, got_grads, trainer = pipelined_step(marked, converted.loss_fn, batch, num_stages=2)
    assert got == pytest.approx(float(loss), rel=1e-6)
    tree_allclose(nnx.to_pure_dict(got_grads), nnx.to_pure_dict(grads), **TOLERANCE)
    nnx.update(model, nnx.state(trainer.gather_model()))  # the paths are the same
    tree_allclose(model(image), marked(image), rtol=1e-6)


def test_decoder_with_padding_and_tied_embedding():
    plain, converted = load("decoder"), load("decoder_pipelined")
    config = {"vocabulary": 11, "width": 8, "hidden": 16, "heads": 2, "layers": 3, "length": 6}
    text = tokens(0, 8, 7, 11)
    for row, padding in enumerate((0, 5, 3, 0, 4, 4, 1, 0)):  # unequal weights in the microbatches
        text[row, len(text[row]) - padding :] = 0
    batch = {"inputs": text[:, :-1], "targets": text[:, 1:]}
    model = plain.TransformerLM(plain.TransformerConfig(**config), rngs=nnx.Rngs(0))
    loss, grads = plain_nnx(model, plain.loss_fn, batch)
    marked = converted.TransformerLM(converted.TransformerConfig(**config), rngs=nnx.Rngs(0))
    got, got_grads, _ = pipelined_step(marked, converted.loss_fn, batch, num_stages=3)
    assert got == pytest.approx(float(loss), rel=1e-6)
    tree_allclose(nnx.to_pure_dict(got_grads), nnx.to_pure_dict(grads), **TOLERANCE)


def test_scanned():
    plain, converted = load("scanned"), load("scanned_pipelined")
    config = {"vocabulary": 11, "width": 8, "hidden": 16, "heads": 2, "layers": 8, "length": 6}
    text = tokens(0, 8, 7, 11)
    batch = {"tokens": text[:, :-1], "targets": text[:, 1:]}
    model = plain.Transformer(plain.TransformerConfig(**config))
    variables = model.init(jax.random.key(0), batch["tokens"])

    def loss_of(params):
        return plain.loss_fn(lambda tokens: model.apply({"params": params}, tokens), batch)

    with nn.logical_axis_rules(plain.AXIS_RULES):
        loss, grads = jax.jit(jax.value_and_grad(loss_of))(variables["params"])
        got, got_grads, trainer = pipelined_step(
            converted.Transformer(converted.TransformerConfig(**config)),
            converted.loss_fn,
            batch,
            variables=split_scanned(variables, "layers", 4),
            num_stages=4,
            mesh=MeshOptions(axes={"data": 2}, sharding_rules=converted.AXIS_RULES),
        )
    assert got == pytest.approx(float(loss), rel=1e-6)
    kernel = got_grads["layers"]["stage_0"]["mlp_in"]["kernel"]
    assert kernel.shape == (2, 8, 16)
    tree_allclose(join_scanned(got_grads, "layers"), jax.tree.map(np.asarray, nn.meta.unbox(grads)), **TOLERANCE)
    tree_allclose(
        join_scanned(nn.meta.unbox(trainer.gather_variables()), "layers"), nn.meta.unbox(variables), rtol=0, atol=0
    )
