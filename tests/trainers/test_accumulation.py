"""A step in two halves, `accumulate` and `update`: equal to plain accumulation, and mixed with everything else."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from jaxpp_flax import PipelineTrainer, WholeBatchLoss
from jaxpp_flax.trainers import (
    BatchStatisticsWarning,
    Checkpoints,
    LossError,
    Memory,
    MeshOptions,
    NonFiniteLossError,
    Training,
)
from tests.helpers import slow, tree_allclose
from tests.trainers import models as m

BATCHES = [m.make_batch(4, seed) for seed in range(3)]
MICROBATCHES = 2


def make_trainer(model: Any = None, loss_fn: Any = m.mean_loss, **options: Any) -> PipelineTrainer:
    options = {"num_stages": 2, "num_microbatches": MICROBATCHES, "mesh": {}, "tx": optax.adam(0.1), **options}
    tx = options.pop("tx")
    return PipelineTrainer(model or m.Tokens(rngs=nnx.Rngs(0)), tx, loss_fn, logging=False, **options)


def joined(batches: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *batches)


def without_keys(state: Any) -> list[np.ndarray]:
    leaves = jax.tree.leaves(state)
    return [np.asarray(leaf) for leaf in leaves if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)]


def clipped() -> optax.GradientTransformation:
    """The norm is over all stages, and the schedule counts updates."""
    return optax.chain(optax.clip_by_global_norm(0.3), optax.sgd(optax.linear_schedule(0.5, 0.1, 2), momentum=0.9))


def plain_steps(loss_of: Any, params: Any, tx: Any, batches: list[Any], steps: int) -> tuple[list[float], Any]:
    """Gradients of each batch, summed and divided once: `loss_of` returns a sum and its weight."""
    grad, opt_state, losses = jax.jit(jax.value_and_grad(loss_of, has_aux=True)), tx.init(params), list[float]()
    for _ in range(steps):
        found = [grad(params, batch) for batch in batches]
        weight = sum(weight for (_, weight), _ in found)
        grads = jax.tree.map(lambda *leaves, weight=weight: sum(leaves) / weight, *[grads for _, grads in found])
        losses.append(float(sum(total for (total, _), _ in found) / weight))
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    return losses, params


def of_module(module: Any, loss_fn: Any) -> tuple[Any, Any]:
    """The loss as a function of parameters that returns a pair, and the parameters."""
    if isinstance(module, nn.Module):
        params = module.init(jax.random.key(0), BATCHES[0]["tokens"])["params"]
        bind = lambda params: lambda x: module.apply({"params": params}, x)  # noqa: E731
    else:
        graphdef, params = nnx.split(module, nnx.Param)
        bind = lambda params: nnx.merge(graphdef, params)  # noqa: E731

    def loss_of(params: Any, batch: Any) -> Any:
        output = loss_fn(bind(params), batch)
        return output if isinstance(output, tuple) else (output, 1.0)

    return loss_of, params


@pytest.mark.parametrize(
    ("schedule", "kind", "loss_fn"),
    [
        ("1f1b", "nnx", m.weighted_loss),
        ("zero_bubble", "linen", m.mean_loss),
        *(
            slow(schedule, kind, loss_fn)
            for schedule in ("gpipe", "interleaved_1f1b", "zbv", "dualpipe_v", None)
            for kind, loss_fn in (("nnx", m.mean_loss), ("linen", m.weighted_loss))
        ),
    ],
)
def test_equal_to_plain_accumulation(schedule, kind, loss_fn):
    batches = [*BATCHES[:2], m.make_batch(8, 7)]  # of two sizes
    stages = 4 if schedule in ("interleaved_1f1b", "zbv", "dualpipe_v") else 2
    module = m.Tokens(stages, rngs=nnx.Rngs(0)) if kind == "nnx" else m.LinenModel(stages)
    loss_of, params = of_module(module, loss_fn)
    options = {"variables": {"params": params}} if kind == "linen" else {}
    if schedule is None:
        trainer = make_trainer(module, loss_fn, num_stages=1, tx=clipped(), **options)
    else:
        ranks = {"mesh": {}} if stages == 2 else {"mesh": MeshOptions(axes={}, num_ranks=2)}
        options |= {**ranks, "schedule": schedule, "num_stages": stages}
        trainer = make_trainer(module, loss_fn, tx=clipped(), **options)
    losses = list[float]()
    for step in range(2):
        found = [trainer.accumulate(batch) for batch in batches]
        assert trainer.step == step
        if step == 0:  # those of one batch
            total, weight = loss_of(params, batches[2])
            np.testing.assert_allclose(float(found[2]["loss"]), total / weight, rtol=1e-5)
        losses.append(float(trainer.update()["loss"]))
    expected_losses, expected = plain_steps(loss_of, params, clipped(), batches, 2)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    tree_allclose(jax.tree.map(np.asarray, trainer.state.params), jax.tree.map(np.asarray, expected))


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": {"data": 2}},
        slow({"precision": "bfloat16"}),
        slow({"precision": "float16"}),
        slow({"num_stages": 1}),
        slow({"schedule": "interleaved_1f1b", "num_stages": 4, "mesh": MeshOptions(axes={}, num_ranks=2)}),
        slow({"training": Training(ema_decay=0.9, on_nonfinite="skip")}),
        slow({"memory": Memory(optimizer_state="pinned_host")}),
    ],
    ids=str,
)
def test_equal_to_one_step_of_as_many_microbatches(options):
    """Dropout's keys differ from call to call, and running statistics go on: as in one loop over all microbatches."""
    options = {"loss_fn": m.loss_with_metrics, "tx": clipped(), **options}

    def make(count: int) -> PipelineTrainer:
        rngs = nnx.Rngs(0, dropout=1)
        blocks = 2 if options.get("num_stages", 2) < 4 else 4
        model = m.Tokens(blocks, rngs=rngs, batch_norm=True, dropout=0.3)
        return make_trainer(model, num_microbatches=count, **options)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BatchStatisticsWarning)
        trainer, reference = make(MICROBATCHES), make(MICROBATCHES * len(BATCHES))
        for _ in range(2):
            for batch in BATCHES:
                trainer.accumulate(batch)
            metrics, expected = trainer.update(), reference.train_step(joined(BATCHES))
            assert metrics.keys() == expected.keys()
            # bfloat16 has 8 bits, and XLA rounds in other places of other programs.
            narrow = "precision" in options
            for name in expected:
                np.testing.assert_allclose(
                    float(metrics[name]), float(expected[name]), rtol=1e-2 if narrow else 1e-5, err_msg=name
                )
    tree_allclose(without_keys(trainer.state), without_keys(reference.state), rtol=2e-2 if narrow else 1e-5)
    trainer.train_step(BATCHES[0])  # takes the state where it lies


@pytest.mark.parametrize("fsdp", [slow("step"), slow("microbatch")])
@pytest.mark.parametrize("divides", [slow("data"), slow("model")])
def test_sums_lie_as_their_parameters(fsdp, divides):
    cut = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, divides))
    axes = {"data": 2} if divides == "data" else {"data": 2, "model": 2}
    if fsdp == "step" and divides == "model":
        pytest.skip("only parameters over the axis of the batch are gathered")
    mesh = MeshOptions(axes=axes, fsdp=fsdp)
    trainer = make_trainer(lambda rngs: m.Layers(rngs=rngs, kernel_init=cut), m.squared_error, mesh=mesh)
    reference = make_trainer(lambda rngs: m.Layers(rngs=rngs), m.squared_error, num_stages=1)
    for seed in range(2):
        trainer.accumulate(m.make_xy(4, seed=seed))
        reference.accumulate(m.make_xy(4, seed=seed))
    for param, grad in zip(*map(jax.tree.leaves, (trainer.state.params, trainer.pending.sums.grads)), strict=True):
        assert grad.sharding.is_equivalent_to(param.sharding, grad.ndim)
        assert grad.mpmd_idxs == param.mpmd_idxs
    np.testing.assert_allclose(float(trainer.update()["loss"]), float(reference.update()["loss"]), rtol=1e-5)
    tree_allclose(without_keys(trainer.state), without_keys(reference.state))


def test_nothing_but_an_update_changes_the_state(tmp_path):
    trainer = make_trainer(checkpoints=Checkpoints(tmp_path / "run"))
    with pytest.raises(RuntimeError, match=r"trainer\.update has no gradients"):
        trainer.update()
    trainer.train_step(BATCHES[0])
    before, loss = without_keys(trainer.state), trainer.evaluate([BATCHES[0]])["loss"]
    trainer.accumulate(BATCHES[1])
    refused = {
        "fit": lambda: trainer.fit(BATCHES),
        "training_steps": lambda: trainer.training_steps(BATCHES),
        "train_step": lambda: trainer.train_step(BATCHES[0]),
        "profile_step": lambda: trainer.profile_step(BATCHES[0]),
        "restore": trainer.restore,
        "set_state": lambda: trainer.set_state(trainer.state),
        "set_weights": lambda: trainer.set_weights(trainer.state.params),
        "load_pretrained": lambda: trainer.load_pretrained("nowhere"),
        "use_schedule": lambda: trainer.use_schedule("gpipe"),
    }
    for name, call in refused.items():
        with pytest.raises(RuntimeError, match=rf"trainer\.{name} would change .* the gradients of 1 batch for"):
            call()
    assert trainer.evaluate([BATCHES[0]])["loss"] == loss
    trainer.save()  # of the state before the step
    tree_allclose(without_keys(trainer.state), before, rtol=0)
    trainer.update()
    after = without_keys(trainer.state)
    trainer.restore()
    tree_allclose(without_keys(trainer.state), before, rtol=0)
    trainer.accumulate(BATCHES[2])
    trainer.zero_grad()
    trainer.accumulate(BATCHES[1])
    trainer.update()
    tree_allclose(without_keys(trainer.state), after, rtol=0)  # what was dropped leaves no trace
    trainer.fit(BATCHES, steps=1)
    assert trainer.step == 3


def test_sums_of_a_call_that_did_not_end_are_refused():
    trainer = make_trainer()
    trainer.accumulate(BATCHES[0])
    jax.tree.leaves(trainer.pending.sums.grads)[0].delete()
    for call in (trainer.update, lambda: trainer.accumulate(BATCHES[0])):
        with pytest.raises(RuntimeError, match="the gradients of 1 batch are lost"):
            call()
    trainer.zero_grad()
    trainer.accumulate(BATCHES[0])
    trainer.update()


def test_a_loss_that_is_not_finite():
    good = {**BATCHES[0], "scale": np.ones(4, np.float32)}

    def scaled(model, batch):
        return (m.token_losses(model, batch).mean(-1) * batch["scale"]).mean()

    bad = {**good, "scale": np.full(4, np.nan, np.float32)}
    stops = make_trainer(loss_fn=scaled)
    with pytest.raises(NonFiniteLossError, match="the loss of step 1 is nan"):
        stops.accumulate(bad)
    skips = make_trainer(loss_fn=scaled, training=Training(on_nonfinite="skip"))
    before = without_keys(skips.state.params)
    for batch in (good, bad, good):
        skips.accumulate(batch)
    assert float(skips.update()["skipped_step"]) == 1.0
    tree_allclose(without_keys(skips.state.params), before, rtol=0)
    skips.accumulate(good)
    assert float(skips.update()["skipped_step"]) == 0.0


def test_batches_of_other_metrics_are_refused():
    def loss_fn(model, batch):
        loss = m.mean_loss(model, batch)
        return (loss, {"accuracy": loss}) if batch["mask"].shape[0] == 4 else loss

    trainer = make_trainer(loss_fn=loss_fn)
    trainer.accumulate(m.make_batch(8))
    with pytest.raises(LossError, match="Return the same weight and metrics for each batch of a step"):
        trainer.accumulate(m.make_batch(4))


@pytest.mark.slow
def test_the_loss_of_a_whole_batch_counts_each_call_once():
    def embed(model, batch):
        return model(batch["tokens"]).mean(1)

    def contrast(embeddings, batch):
        return jnp.mean((embeddings @ embeddings.T - jnp.eye(len(embeddings))) ** 2)

    loss = WholeBatchLoss(embed, contrast)
    trainer = make_trainer(loss_fn=loss, tx=clipped())
    loss_of, params = of_module(m.Tokens(rngs=nnx.Rngs(0)), loss)
    for batch in BATCHES:
        trainer.accumulate(batch)
    (expected,), after = plain_steps(loss_of, params, clipped(), BATCHES, 1)
    np.testing.assert_allclose(float(trainer.update()["loss"]), expected, rtol=1e-5)
    tree_allclose(jax.tree.map(np.asarray, trainer.state.params), jax.tree.map(np.asarray, after))


@pytest.mark.slow
def test_the_hook_of_once_a_step_runs_in_update_with_the_metrics_of_the_step():
    class Counted(nnx.Variable):
        pass

    model = m.Tokens(rngs=nnx.Rngs(0))
    model.losses = Counted(jnp.zeros(()))

    def after_update(model, metrics):
        model.losses[...] += metrics["loss"]

    trainer = make_trainer(model, training=Training(after_update=after_update))
    losses = [float(trainer.accumulate(batch)["loss"]) for batch in BATCHES]
    trainer.update()
    found = float(jax.tree.leaves(trainer.state.model_state)[0])
    np.testing.assert_allclose(found, sum(losses) / len(losses), rtol=1e-6)
