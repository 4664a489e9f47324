"""Export with adapters merged: the weights of `merge_lora(trainer.model)`, without the whole model on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.layers import add_lora, merge_lora
from jaxpp_flax.pretrained import load_pretrained
from jaxpp_flax.trainers import Parameters
from tests.trainers.models import LinenModel, Model, make_batch, mean_loss

BATCH = make_batch(8)


def adapted(rngs: nnx.Rngs) -> Model:
    return add_lora(Model(4, rngs=rngs), rank=3, alpha=6, layers="blocks", rngs=rngs)


def make_trainer(stages: int = 2, model: Any = adapted, wrt: Any = nnx.LoRAParam, **options: Any) -> PipelineTrainer:
    return PipelineTrainer(
        model, optax.adam(0.1), mean_loss, num_stages=stages, num_microbatches=2, logging=False,
        parameters=Parameters(wrt=wrt, ema_decay=0.5), **options,
    )  # fmt: skip


def written(trainer: PipelineTrainer, path: Path, **options: Any) -> dict[str, np.ndarray]:
    """What an export writes, by the paths of the plain model, which it must fill without an error."""
    trainer.export_pretrained(path, merge_lora=True, **options)
    plain = nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: Model(4, rngs=nnx.Rngs(0))), nnx.Param))
    return dict(flat(load_pretrained(path, plain)))


def flat(tree: Any) -> dict[str, np.ndarray]:
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def expected(model: Any) -> dict[str, np.ndarray]:
    return flat(nnx.to_pure_dict(nnx.state(merge_lora(model), nnx.Param)))


def assert_bitwise(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert found.keys() == wanted.keys()
    for path, value in wanted.items():
        np.testing.assert_array_equal(found[path], value, err_msg=path)


@pytest.fixture(scope="module")
def trained() -> PipelineTrainer:
    trainer = make_trainer()
    trainer.train_step(BATCH)
    return trainer


def test_the_weights_are_those_of_merge_lora_bit_by_bit(trained: PipelineTrainer, tmp_path: Path):
    wanted = expected(trained.model)
    begun = expected(adapted(nnx.Rngs(0)))
    assert any(not np.array_equal(wanted[path], begun[path]) for path in wanted), "the adapters have learnt"
    assert_bitwise(written(trained, tmp_path / "merged"), wanted)
    assert_bitwise(written(trained, tmp_path / "average", ema=True), expected(trained.ema_model))


def test_before_the_first_step_factors_may_lie_on_other_ranks(trained: PipelineTrainer, tmp_path: Path):
    path = trained.save(tmp_path / "checkpoint")
    for stages in (1, 2):
        trainer = make_trainer(stages)
        trainer.restore(path)
        assert_bitwise(written(trainer, tmp_path / f"merged{stages}"), expected(trainer.model))
    narrow = [tree["blocks"][2]["narrow"] for tree in (trainer.state.params, trainer.state.model_state)]
    assert narrow[0]["lora"]["lora_a"].get_value().sharding.ranks != narrow[1]["kernel"].get_value().sharding.ranks


def test_a_divided_kernel_is_merged_where_it_is(tmp_path: Path):
    def model(rngs: nnx.Rngs) -> Model:
        made = Model(4, rngs=rngs)
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "tensor"))
        for block in made.blocks:
            block.widen = nnx.Linear(8, 16, rngs=rngs, kernel_init=init)
        add_lora(made, rank=2, layers="blocks", rngs=rngs)
        for block in made.blocks:
            block.widen.lora.lora_b[...] = rngs.params.normal((2, 16))
        return made

    with nnx.use_eager_sharding(False):
        trainer = make_trainer(model=model, mesh={"tensor": 2})
        found = written(trainer, tmp_path / "merged")
        assert_bitwise(found, expected(trainer.model))


def test_a_model_without_adapters_is_refused(tmp_path: Path):
    trainer = make_trainer(model=lambda rngs: Model(2, rngs=rngs), stages=1, wrt=nnx.Param)
    with pytest.raises(ValueError, match="no layer has an adapter"):
        trainer.export_pretrained(tmp_path / "merged", merge_lora=True)
    linen = LinenModel(2)
    variables = linen.init(jax.random.key(0), BATCH["tokens"])
    trainer = PipelineTrainer(
        linen, optax.sgd(0.1), mean_loss, variables=variables, num_stages=1, num_microbatches=2, logging=False
    )
    with pytest.raises(ValueError, match="of an NNX model; this is Linen"):
        trainer.export_pretrained(tmp_path / "merged", merge_lora=True)
    assert list(tmp_path.iterdir()) == []
