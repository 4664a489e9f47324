"""Quantised products: a number at the middle of two levels is rounded otherwise by another program."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineStage, PipelineTrainer
from jaxpp_flax.trainers.step.optimizer_update import Update
from jaxpp_flax.verify import Report, verify


def quantised(x: Any, axis: int) -> tuple[Any, Any]:
    """The largest number of a row is 127.5 levels: the middle of two."""
    scale = jnp.abs(x).max(axis, keepdims=True) / 127.5
    return jnp.round(x / scale).clip(-128, 127).astype(jnp.int8), scale


@jax.custom_vjp
def product(x: Any, kernel: Any) -> Any:
    (rows, of_rows), (columns, of_columns) = quantised(x, 1), quantised(kernel, 0)
    return jnp.matmul(rows, columns, preferred_element_type=jnp.int32).astype(jnp.float32) * of_rows * of_columns


product.defvjp(
    lambda x, kernel: (product(x, kernel), (x, kernel)),
    lambda kept, grads: (product(grads, kept[1].T), product(kept[0].T, grads)),
)


class Block(nnx.Module):
    def __init__(self, seed: int) -> None:
        keys = jax.random.split(jax.random.key(seed))
        self.widen, self.narrow = nnx.Param(jax.random.normal(keys[0], (8, 16))), nnx.Param(
            jax.random.normal(keys[1], (16, 8))
        )  # fmt: skip

    def __call__(self, x: Any) -> Any:
        return x + product(jnp.tanh(product(x, self.widen[...])), self.narrow[...])


class Stack(nnx.Module):
    """Layers in a scan, whose backward is a scan too."""

    def __init__(self, seed: int) -> None:
        self.kernels = nnx.Param(jax.random.normal(jax.random.key(seed), (3, 8, 8)))

    def __call__(self, x: Any) -> Any:
        return jax.lax.scan(lambda x, kernel: (x + jnp.tanh(product(x, kernel)), None), x, self.kernels[...])[0]


def report_of(seed: int, block: Any = Block, **axes: int) -> Report:
    model = nnx.Sequential(*[PipelineStage(block(2 * seed + i), name=f"block_{i}") for i in range(2)])
    x = np.random.default_rng(seed).normal(size=(16, 8)).astype(np.float32)
    options: dict[str, Any] = {"num_stages": 2, "num_microbatches": 2, "mesh": axes, "logging": False}
    return verify(PipelineTrainer(model, optax.adam(1e-3), lambda model, x: (model(x) ** 2).mean(), **options), x)


@pytest.mark.parametrize(("seed", "block"), [(0, Block), (1, Block), (0, Stack)])
def test_a_level_is_rounding(seed: int, block: Any):
    report = report_of(seed, block, data=2)
    assert report.agrees, report
    assert report.facts["reference"] == "the whole batch at once"


def test_a_fault_is_found_all_the_same(monkeypatch: pytest.MonkeyPatch):
    right = Update.summand
    monkeypatch.setattr(Update, "summand", lambda self, grads: jax.tree.map(lambda g: 2 * g, right(self, grads)))
    first = report_of(0, data=2).first
    assert first is not None
    assert "doubled" in first.likely
