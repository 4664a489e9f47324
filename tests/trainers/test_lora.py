"""Adapters are trained as a pipeline over a frozen base: as in plain JAX, without bytes for the base, saved alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineStage, PipelineTrainer
from jaxpp_flax.checkpoint import leaves_of, restore
from jaxpp_flax.layers import add_lora, merge_lora
from jaxpp_flax.trainers import Training
from tests.helpers import tree_allclose
from tests.trainers import models as m
from tests.trainers.sharing import sharing_steps

BATCHES = [m.make_batch(4, seed) for seed in range(3)]
INIT = nnx.initializers.lecun_normal()
BASE = nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam))


def adapted_model(seed: int = 0) -> m.Tokens:
    model = m.Tokens(rngs=nnx.Rngs(0))
    return add_lora(model, rank=3, alpha=6, layers="blocks", rngs=nnx.Rngs(seed))


@sharing_steps()
def make_trainer(stages: int = 2, wrt: Any = nnx.LoRAParam, **options: Any) -> PipelineTrainer:
    return PipelineTrainer(
        options.pop("model", None) or adapted_model(), optax.adam(0.1), m.mean_loss,
        num_stages=stages, num_microbatches=2, training=Training(wrt=wrt), logging=False, **options,
    )  # fmt: skip


def values(model: Any, kind: Any) -> dict[Any, np.ndarray]:
    return {path: np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(nnx.state(model, kind))}


@pytest.fixture(scope="module")
def trained() -> tuple[PipelineTrainer, list[float]]:
    trainer = make_trainer()
    return trainer, [float(trainer.train_step(batch)["loss"]) for batch in BATCHES]


def test_equal_to_plain_jax_with_a_frozen_base(trained: tuple[PipelineTrainer, list[float]]):
    trainer, losses = trained

    def labels(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: "lora" in jax.tree_util.keystr(path), params)

    tx = optax.multi_transform({True: optax.adam(0.1), False: optax.set_to_zero()}, labels)
    expected, after = m.plain_training(adapted_model(), tx, m.mean_loss, BATCHES, 2)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    # Adam divides by the root of a gradient's square: rounding of tiny gradients moves a factor by up to 1e-6.
    tree_allclose(
        nnx.to_pure_dict(nnx.state(trainer.gather_model())), nnx.to_pure_dict(after[-1]), rtol=1e-5, atol=1e-6
    )
    before, now = (values(model, BASE) for model in (adapted_model(), trainer.gather_model()))
    assert len(before) == 7
    tree_allclose(now, before, rtol=0, atol=0)


def arrays_in_step(trainer: PipelineTrainer, shapes: set[tuple[int, ...]]) -> tuple[Counter[Any], Counter[Any]]:
    """For each device: arrays of these shapes before a step, and the most of them after any instruction."""
    runtime: Any = trainer.compile(BATCHES[0]).runtime
    plain, counts = runtime._steps, list[Counter[Any]]()

    def look(environment: list[Any]) -> None:
        alive = {id(x): x for x in environment if x is not None and not x.is_deleted() and x.shape in shapes}
        counts.append(Counter(device for x in alive.values() for device in x.devices()))

    def watched(step: Any) -> Any:
        def run(environment: list[Any]) -> None:
            look(environment)
            step(environment)
            look(environment)

        return run

    runtime._steps = [watched(step) for step in plain]
    try:
        trainer.train_step(BATCHES[0])
    finally:
        runtime._steps = plain
    most = Counter[Any]()
    for count in counts:
        most |= count
    return counts[0], most


def test_the_frozen_base_has_no_gradient_and_no_optimizer_bytes_on_any_rank():
    base = set(map(np.shape, values(adapted_model(), BASE).values()))
    adapters = values(adapted_model(), nnx.LoRAParam)
    assert base.isdisjoint(map(np.shape, adapters.values()))
    trainer, whole = make_trainer(), make_trainer(wrt=nnx.Param)
    before, most = arrays_in_step(trainer, base)
    assert len(before) == 2
    assert most == before, "an array of a frozen parameter's shape beside the parameter itself"
    before, most = arrays_in_step(whole, base)
    assert all(most[device] > before[device] for device in before), "training all parameters does make gradients"

    def bytes_by_device(tree: Any) -> Counter[Any]:
        found = Counter[Any]()
        for leaf in jax.tree.leaves(tree):
            if leaf.ndim:  # without Adam's number of steps, which each rank has
                for shard in leaf.first_mpmd_replica.addressable_shards:
                    found[shard.device] += shard.data.nbytes
        return found

    held = bytes_by_device(trainer.state.params)
    assert sum(held.values()) == sum(leaf.nbytes for leaf in adapters.values())
    assert bytes_by_device(trainer.state.opt_state) == held + held  # both moments of Adam, for the adapters alone


@pytest.mark.slow
def test_factors_are_divided_along_the_axis_of_their_kernel():
    axes = {"up": (None, "tensor"), "down": ("tensor", None)}

    def block(rngs: nnx.Rngs) -> m.Block:
        made = m.Block(rngs=rngs)
        made.widen = nnx.Linear(8, 16, rngs=rngs, kernel_init=nnx.with_partitioning(INIT, axes["up"]))
        made.narrow = nnx.Linear(16, 8, rngs=rngs, kernel_init=nnx.with_partitioning(INIT, axes["down"]))
        return PipelineStage(made)

    def trainer(stages: int, **options: Any) -> PipelineTrainer:
        with nnx.use_eager_sharding(False):
            model = m.Model(2, rngs=nnx.Rngs(0))
            model.blocks = nnx.List([block(nnx.Rngs(i)) for i in range(2)])
        return make_trainer(stages, model=add_lora(model, rank=2, layers="blocks", rngs=nnx.Rngs(0)), **options)

    divided, plain = trainer(2, mesh={"tensor": 2}), trainer(1)
    for batch in BATCHES:
        losses = [float(made.train_step(batch)["loss"]) for made in (divided, plain)]
        np.testing.assert_allclose(*losses, rtol=1e-5)
    widen = divided.state.params["blocks"][0]["widen"]["lora"]
    assert [tuple(widen[name].get_value().spec) for name in ("lora_a", "lora_b")] == [(), (None, "tensor")]


def test_adapters_are_saved_alone_and_loaded_on_another_number_of_stages(trained, tmp_path):
    trainer, _ = trained
    path = trainer.save(tmp_path / "adapters", only="params/*")
    expected = values(trainer.gather_model(), nnx.LoRAParam)
    assert set(leaves_of(path)) == {f"params/{'/'.join(map(str, key))}" for key in expected}
    other = make_trainer(stages=1, model=adapted_model(seed=5))
    assert not all(np.array_equal(x, expected[key]) for key, x in values(other.gather_model(), nnx.LoRAParam).items())
    other.restore(path, only="params/*")
    tree_allclose(values(other.gather_model(), nnx.LoRAParam), expected, rtol=0, atol=0)
    first = make_trainer().save(tmp_path / "first", only=["params", "opt_state"])  # before any step
    assert len(leaves_of(first)) == 3 * len(expected) + 1, "the factors, both moments of Adam, and its number of steps"
    model = adapted_model(seed=5)  # and into a plain model
    nnx.update(model, restore(path, {"params": nnx.state(model, nnx.LoRAParam)})["params"])
    tree_allclose(values(model, nnx.LoRAParam), expected, rtol=0, atol=0)


def test_a_part_of_the_state_is_no_step_of_the_run(trained, tmp_path):
    trainer, _ = trained
    with pytest.raises(ValueError, match=r"save\(None, only='params/\*'\): .* Pass another path"):
        trainer.save(only="params/*")
    with pytest.raises(ValueError, match=r"only='adapters'\): no leaf of trainer\.state has such a path"):
        trainer.save(tmp_path / "x", only="adapters")
    assert list(tmp_path.iterdir()) == []


def test_the_merged_model_computes_what_the_adapted_one_does(trained):
    trainer, _ = trained
    adapted = trainer.predict(BATCHES[0]["tokens"])
    merged = merge_lora(trainer.gather_model())
    assert nnx.graphdef(merged) == nnx.graphdef(m.Tokens(rngs=nnx.Rngs(0)))
    # Two products in the other order: sums of 8 terms of size 1.
    np.testing.assert_allclose(merged(BATCHES[0]["tokens"]), adapted, rtol=1e-5, atol=1e-5)
