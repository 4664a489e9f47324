"""Two bugs that other pipelines have had, rebuilt in a toy model: what `verify` says of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineStage, PipelineTrainer
from tests.verify.faults import MICROBATCHES, Fault, sums
from tests.verify.test_faults import Bench

DIM, WIDE, STAGES = 6, 10, 2


class Block(nnx.Module):
    """It uses `shared` twice."""

    def __init__(self, seed: int) -> None:
        rngs = nnx.Rngs(seed)
        self.shared, self.last = nnx.Linear(DIM, DIM, rngs=rngs), nnx.Linear(DIM, WIDE, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.last(jnp.tanh(self.shared(jnp.tanh(self.shared(x)))))[:, :DIM]


BUGS = [
    # The backward pass of the weights, apart from that of the inputs, meets a weight at each of its uses, and adds the
    # gradient of all of them each time.
    pytest.param(
        sums(1, lambda old, new, _: 2 * new - old, only=lambda x: x.shape[-1] == DIM), "shared", "doubled reduction",
        id="a split backward pass counts a shared weight twice",
    ),
    # Each microbatch overwrites the gradients of the one before.
    pytest.param(
        sums(1, lambda old, new, _: new - old), "last", f"the sum holds number {MICROBATCHES - 1} alone",
        id="gradients are those of the last microbatch",
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    model = nnx.Sequential(*[PipelineStage(Block(i), name=f"block_{i}") for i in range(STAGES)])
    trainer = PipelineTrainer(
        model, optax.sgd(0.1), lambda model, x: (model(x) ** 2).mean(), num_stages=STAGES, schedule="zero_bubble",
        num_microbatches=MICROBATCHES, logging=False,
    )  # fmt: skip
    x = np.random.default_rng(0).normal(size=(3 * MICROBATCHES, DIM)).astype(np.float32)
    with pytest.MonkeyPatch.context() as patch:
        yield Bench(patch, trainer, x)


@pytest.mark.parametrize(("bug", "leaf", "words"), BUGS)
def test_a_known_bug(bug: Any, leaf: str, words: str, bench: Bench):
    report = bench.find(Fault("", bug, (), ()))
    first = report.first
    assert first is not None
    assert (first.kind, first.block) == ("gradient", "block_1")
    assert leaf in first.leaf
    assert words in first.likely
    wrong = {row.leaf for row in report.rows if row.kind == "gradient" and not row.agrees}
    assert all(name.startswith("layers/1/") for name in wrong)
    assert any("last" in name for name in wrong) == (leaf == "last")
