"""Trainers of many layouts hand one run from each to the next; base models go into ones with adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineStage, PipelineTrainer
from jaxpp_flax.checkpoint import CheckpointMismatchError
from jaxpp_flax.checkpoint.format.paths import flatten
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.trainers import MeshOptions, Training
from jaxpp_flax.trainers.state.placement import to_ordinary
from tests.helpers import tree_allclose
from tests.trainers.models import Chain

WIDTH, BLOCKS = 8, 8


class Block(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs, rank: int = 0):
        if rank:
            self.linear: Any = nnx.LoRALinear(WIDTH, WIDTH, lora_rank=rank, rngs=rngs)
        else:
            annotated = {"out_sharding": ("rows", "columns"), "eager_sharding": False}
            self.linear = nnx.Linear(WIDTH, WIDTH, kernel_metadata=annotated, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.linear(x))


def make_model(seed: int, rank: int = 0, blocks: int = BLOCKS) -> Chain:
    rngs = nnx.Rngs(seed)
    return Chain(PipelineStage(Block(rngs=rngs, rank=rank), name=f"block_{i}") for i in range(blocks))


def loss_fn(model, batch):
    return jnp.mean((model(batch) - 1) ** 2)


BATCH = np.linspace(-1, 1, 8 * WIDTH, dtype=np.float32).reshape(8, WIDTH)
ROWS, COLUMNS = [("rows", "fsdp"), ("columns", None)], [("rows", None), ("columns", "tensor")]
WHOLE = [("rows", None), ("columns", None)]

# Each with a spec that the kernels must have, once they are on their ranks.
TRAINERS: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "1 stage": ({"num_stages": 1}, ()),
    "2 stages": ({"num_stages": 2}, ()),
    "8 stages": ({"num_stages": 8}, ()),
    "balanced": ({"num_stages": 3, "assignment": "balanced"}, ()),
    "named": ({"num_stages": 2, "assignment": {"block_[0-4]": 0, "block_[5-7]": 1}}, ()),
    "interleaved": ({"num_stages": 4, "devices": {"num_ranks": 2}, "schedule": "interleaved_1f1b"}, ()),
    "data": ({"num_stages": 2, "devices": {"axes": {"data": 2}}}, ()),
    "fsdp": (
        {"num_stages": 2, "devices": {"axes": {"fsdp": 2}, "sharding_rules": ROWS}},
        ("fsdp",),
    ),
    "tensor": (
        {
            "num_stages": 4,
            "devices": {"axes": {"tensor": 2}, "sharding_rules": COLUMNS},
        },
        (None, "tensor"),
    ),
}


def make_trainer(name: str, seed: int, blocks: int = BLOCKS, **options: Any) -> PipelineTrainer:
    layout = dict(TRAINERS[name][0])
    devices = {"sharding_rules": WHOLE, **layout.pop("devices", {})}
    return PipelineTrainer(
        make_model(seed, blocks=blocks), optax.adam(1e-2), loss_fn, num_microbatches=2, logging=False,
        mesh=MeshOptions(**devices), **layout, **options,
    )  # fmt: skip


@pytest.mark.slow
def test_one_run_through_trainers_of_every_layout(tmp_path: Path):
    """Each resumes where the one before saved, straight onto its own layout, and hands on what it read."""
    first = make_trainer("1 stage", 0)
    first.train_step(BATCH)
    path = first.save(tmp_path / "start" / "1")
    expected = to_ordinary(first.state)
    loss = first.evaluate([BATCH])["loss"]
    for seed, (name, (_, spec)) in enumerate(TRAINERS.items(), start=1):
        trainer = make_trainer(name, seed, checkpoints=path.parent)
        trainer.fit([BATCH], steps=1, resume=True)  # nothing to do but to take it over
        trainer.compile(BATCH)
        tree_allclose(to_ordinary(trainer.state), expected, rtol=0, atol=0)
        for leaf_path, leaf in flatten(trainer.state)[0].items():
            assert isinstance(leaf, MpmdArray) == (name != "1 stage"), leaf_path
            if isinstance(leaf, MpmdArray):
                assert tuple(leaf.spec) == (spec if leaf_path.endswith("kernel") else ()), leaf_path
        # The sum over the width may be in another order, where it is sharded.
        assert trainer.evaluate([BATCH])["loss"] == pytest.approx(loss, rel=1e-6)
        path = trainer.save(tmp_path / f"{seed}" / "1")


def test_a_base_model_into_one_with_adapters(tmp_path: Path):
    base = make_trainer("2 stages", 0, blocks=3)
    base.train_step(BATCH)
    path = base.save(tmp_path / "base")
    tuned = PipelineTrainer(
        make_model(seed=1, rank=2, blocks=3), optax.sgd(0.1), loss_fn, num_stages=3, num_microbatches=2, logging=False,
        training=Training(wrt=nnx.LoRAParam),
    )  # fmt: skip
    tuned.compile(BATCH)  # on its ranks, where the base's weights, frozen, are other state than parameters
    adapters = to_ordinary(tuned.state.params)
    with pytest.raises(CheckpointMismatchError, match=r"params/blocks/0/linear/lora/lora_a: missing"):
        tuned.restore(path, rename={"model_state": "params"})
    tuned.restore(path, only="model_state/*/linear/*", rename={"model_state": "params"}, missing="keep")
    kernels = jax.tree.leaves(to_ordinary(base.state.params))
    restored = [
        leaf for name, leaf in flatten(to_ordinary(tuned.state.model_state))[0].items()
        if name.endswith(("kernel", "bias"))
    ]  # fmt: skip
    assert len(restored) == len(kernels) == 2 * 3
    for leaf, kernel in zip(restored, kernels, strict=True):
        np.testing.assert_array_equal(leaf, kernel)
    tree_allclose(to_ordinary(tuned.state.params), adapters, rtol=0, atol=0)
    assert tuned.step == 0
    # Adapters begin as zero, so the tuned model is the base.
    assert tuned.evaluate([BATCH])["loss"] == pytest.approx(base.evaluate([BATCH])["loss"], rel=1e-6)
    before = to_ordinary(tuned.state.model_state)
    tuned.train_step(BATCH)
    tree_allclose(to_ordinary(tuned.state.model_state), before, rtol=0, atol=0)
