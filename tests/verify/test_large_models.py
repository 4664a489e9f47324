"""A model that does not fit into one device, whose stages do: the plain side runs block by block, where a block is."""

from __future__ import annotations

import gc
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineStage, PipelineTrainer
from jaxpp_flax.verify import comparison, verification
from jaxpp_flax.verify.runs import pieces
from tests.verify.faults import MICROBATCHES, Fault, sums
from tests.verify.test_faults import Bench

WIDTH, STAGES = 64, 4
# The bytes of a block's parameters; its gradients, and each of Adam's moments, are as large.
BLOCK = WIDTH * WIDTH * 4
STAGE = 3 * BLOCK  # of one block, with its moments
WHOLE = STAGES * STAGE
ROWS = 2  # of a microbatch
# The stage's state and the new one, which is compared; its gradients, which are too; and a block's state, moved.
LIMIT = 2 * STAGE + BLOCK + STAGE
# What crosses marks, and scalars.
SMALL = 5 * MICROBATCHES * ROWS * WIDTH * 4


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layer = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return jax.numpy.tanh(self.layer(x))


def bytes_on_devices(others: set[int]) -> dict[Any, int]:
    """The bytes of all live arrays on each device, without `others` (ids); arrays that share memory count once."""
    shards = {
        (shard.device, shard.data.unsafe_buffer_pointer()): shard.data.nbytes
        for array in jax.live_arrays()
        if id(array) not in others and not array.is_deleted()
        if not jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key)
        for shard in array.addressable_shards
    }
    found: dict[Any, int] = {}
    for (device, _), size in shards.items():
        found[device] = found.get(device, 0) + size
    return found


def test_no_device_holds_more_than_its_stage_and_a_block(monkeypatch: pytest.MonkeyPatch):
    """Clipping by the norm of all gradients needs them one after another; a fault is found with its block."""
    assert WHOLE > LIMIT + SMALL, "one device could hold the model's state"
    gc.collect()
    of_other_tests, peaks = jax.live_arrays(), dict[Any, int]()  # which are kept, and so their ids
    others = set(map(id, of_other_tests))

    def look(*_: Any) -> None:
        for device, size in bytes_on_devices(others).items():
            peaks[device] = max(peaks.get(device, 0), size)

    def watched(function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            look()
            found = function(*arguments, **options)
            look()
            return found

        return call

    def model(rngs: nnx.Rngs) -> nnx.Module:  # made on the devices of its stages
        return nnx.Sequential(*[PipelineStage(Block(rngs), name=f"block_{i}") for i in range(STAGES)])

    trainer = PipelineTrainer(
        model,
        optax.chain(optax.clip_by_global_norm(0.01), optax.adam(1e-3)),
        lambda model, x: (model(x) ** 2).mean(),
        num_stages=STAGES,
        num_microbatches=MICROBATCHES,
        logging=False,
    )
    x = np.random.default_rng(0).normal(size=(ROWS * MICROBATCHES, WIDTH)).astype(np.float32)
    for module, name in (
        (verification, "to_host"),
        (verification, "compare"),
        (comparison, "moved"),
        (pieces, "on_host"),
    ):
        monkeypatch.setattr(module, name, watched(getattr(module, name)))
    bench = Bench(monkeypatch, trainer, x)
    assert len(peaks) == STAGES
    assert max(peaks.values()) <= LIMIT + SMALL, {str(device): size / BLOCK for device, size in peaks.items()}
    first = bench.find(Fault("", sums(2, lambda old, new, _: 2 * new - old), (), ())).first
    assert first is not None
    assert (first.kind, first.block) == ("gradient", "block_2")
    assert "doubled reduction" in first.likely
