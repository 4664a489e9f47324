"""What attention keeps for its backward stays in the layout that the forward's compiler chose."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from tests.compilers.small import WIDTH, compiled_for

pytestmark = pytest.mark.compilers

HEADS, FEATURES = 4, 128


class Attention(nnx.Module):
    """Between the numbers of an example."""

    def __init__(self, rngs: nnx.Rngs):
        self.project, self.join = (
            nnx.Linear(1, 3 * HEADS * FEATURES, rngs=rngs),
            nnx.Linear(HEADS * FEATURES, 1, rngs=rngs),
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = jnp.moveaxis(self.project(x[..., None]).reshape(*x.shape, 3, HEADS, FEATURES), 2, 0)
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        heads = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        return x + self.join(heads.reshape(*x.shape, HEADS * FEATURES))[..., 0]


def turned(text: str) -> list[str]:
    """The arrays of the size of attention's weights that a program copies into another layout."""
    return re.findall(rf"= (\w+\[1,{HEADS},{WIDTH},{WIDTH}\]\S*) (?:copy|transpose)\(", text)


def test_no_residual_of_attention_is_turned_on_tpu():
    step = compiled_for("tpu-v5p:2x2x1", {"tensor": 2}, Attention, rows=1)
    texts = {
        task.name: executable.as_text()
        for task, executable in zip(step.program.tasks, step.executables.tasks, strict=True)
    }
    assert {"fwd_0", "bwd_0"} <= texts.keys()
    assert not turned(texts["fwd_0"])
    assert not turned(texts["bwd_0"])
