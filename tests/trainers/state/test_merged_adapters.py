"""An export of a model with adapters has the files of the merged model, and no device holds the whole of it."""

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
from jaxpp_flax.layers import add_lora, merge_lora
from jaxpp_flax.pretrained import export_pretrained, load_pretrained
from jaxpp_flax.pretrained.sources import open_source
from jaxpp_flax.trainers import Training
from tests.helpers import slow
from tests.trainers import models as m
from tests.trainers.sharing import sharing_steps

WIDTH = m.Layers.WIDTH
BATCH = m.make_xy(8)
TENSOR: dict[str, Any] = {"mesh": {"tensor": 2}}
CUT = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "tensor"))


class Pair(nnx.Module):
    def __init__(self, widen: nnx.Module, narrow: nnx.Module):
        self.widen, self.narrow = widen, narrow

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.narrow(self.widen(x))


class Attending(nnx.Module):
    """Kernels of several axes, of bfloat16, and with an annotation."""

    def __init__(self, rngs: nnx.Rngs):
        axes, wide = (2, WIDTH), 2 * WIDTH
        first = Pair(
            nnx.LinearGeneral(WIDTH, axes, rngs=rngs), nnx.LinearGeneral(axes, WIDTH, axis=(-2, -1), rngs=rngs)
        )
        second = Pair(
            nnx.Linear(WIDTH, wide, rngs=rngs, kernel_init=CUT),
            nnx.Linear(wide, WIDTH, rngs=rngs, param_dtype=jnp.bfloat16),
        )
        self.blocks = nnx.List(map(PipelineStage, (first, second)))

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x


def adapted(rngs: nnx.Rngs) -> nnx.Module:
    model = add_lora(Attending(rngs), rank=3, alpha=2, layers="blocks", rngs=rngs)
    for path, factor in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)):
        values = np.random.default_rng(len(str(path))).normal(size=factor.shape)
        factor[...] = jnp.asarray(values, factor.dtype)
    return model


@sharing_steps()
def make_trainer(model: Any = adapted, **options: Any) -> PipelineTrainer:
    options = {"num_stages": 2, "training": Training(wrt=nnx.LoRAParam, ema_decay=0.5), **options}
    return PipelineTrainer(model, optax.sgd(0.1), m.squared_error, num_microbatches=2, logging=False, **options)


def check_files(trainer: PipelineTrainer, folder: Path, **options: Any) -> Path:
    """The files of an export are those of `merge_lora`; returns them."""
    merged = merge_lora(trainer.gather_model(ema=True) if options else trainer.gather_model())
    expected = export_pretrained(nnx.state(merged, nnx.Param), folder / "merged", max_shard_bytes=1000)
    out = trainer.export_pretrained(folder / "out", max_shard_bytes=1000, **options)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == {
        file.name: file.read_bytes() for file in expected.iterdir()
    }
    return out


@pytest.mark.parametrize("options", [TENSOR, slow({"num_stages": 1})], ids=str)
def test_the_files_are_those_of_the_merged_model(options: dict[str, Any], tmp_path: Path):
    """Before a step, and of the average after it."""
    trainer = make_trainer(**options)
    first = check_files(trainer, tmp_path / "before")
    trainer.train_step(BATCH)
    second = check_files(trainer, tmp_path / "average", ema=True)
    with nnx.use_eager_sharding(False):
        plain = nnx.state(Attending(nnx.Rngs(1)), nnx.Param)
    read = [load_pretrained(path, plain)["blocks"][1]["widen"]["kernel"][...] for path in (first, second)]
    assert not np.array_equal(*read)


def test_before_the_first_step_factors_go_to_their_kernels_and_stay_where_they_were(tmp_path: Path):
    trainer = make_trainer(**TENSOR)
    trainer.export_pretrained(tmp_path / "out")
    held = trainer.held.memory
    ranks = {leaf.sharding.ranks for leaf in jax.tree.leaves(held.params)}
    assert len(ranks) == 2, "the base is frozen: its leaves are divided among the ranks apart from the factors"
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(held.params))
    trainer.train_step(BATCH)


def test_adapters_alone_and_everything_as_it_is(tmp_path: Path):
    trainer = make_trainer()
    model = nnx.to_flat_state(nnx.state(trainer.abstract_model, nnx.Param))
    everything = {".".join(map(str, path)) for path, _ in model}
    factors = {name for name in everything if ".lora." in name}
    assert len(factors) == 8
    cases: dict[str, tuple[dict[str, Any], set[str]]] = {
        "alone": ({"only": "*/lora_*"}, factors),
        "all": ({"merge_adapters": False}, everything),
        "some": ({"only": "blocks/0"}, {name for name in everything - factors if name.startswith("blocks.0.")}),
    }
    for name, (options, expected) in cases.items():
        assert set(open_source(trainer.export_pretrained(tmp_path / name, **options)).tensors) == expected, name


def test_an_adapter_that_cannot_be_merged_is_refused_with_the_argument_that_leaves_it(tmp_path: Path):
    def wrapped(rngs: nnx.Rngs) -> nnx.Module:
        model: Any = m.Layers(rngs=rngs)
        model.head = nnx.LoRA(WIDTH, 2, WIDTH, base_module=nnx.Linear(WIDTH, WIDTH, rngs=rngs), rngs=rngs)
        return model

    trainer = make_trainer(wrapped, num_stages=2)
    with pytest.raises(ValueError, match=r"nnx\.LoRA at 'head' belongs to no linear layer.*merge_adapters=False"):
        trainer.export_pretrained(tmp_path / "out")
    trainer.export_pretrained(tmp_path / "out", merge_adapters=False)
