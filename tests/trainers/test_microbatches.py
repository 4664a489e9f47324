"""`fit` on `Microbatches`: the loss and gradients of one masked batch, whatever the shapes of the microbatches."""

from __future__ import annotations

import gc
import itertools
from functools import partial
from weakref import WeakSet

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp_flax import Microbatches, PipelineStage, PipelineTrainer, WholeBatchLoss
from jaxpp_flax.engine import patterns
from jaxpp_flax.engine.jit import MpmdFunction
from jaxpp_flax.schedules import by_name
from jaxpp_flax.trainers import BatchError, LossError, Training
from jaxpp_flax.verify import verify
from tests.helpers import slow, tree_allclose
from tests.trainers import models as m

# One step of float32 in another order of sums; a lost token changes the loss in its third digit.
RTOL = 2e-5


def item(rows, length, seed=0):
    rng = np.random.default_rng(seed + 10 * length)
    tokens = rng.integers(0, m.VOCABULARY, (rows, length)).astype(np.int32)
    mask = (np.arange(length) < rng.integers(1, length + 1, (rows, 1))).astype(np.float32)
    return {"tokens": tokens, "targets": np.roll(tokens, 1, axis=1), "mask": mask}


def padded(batch):
    longest = max(part["tokens"].shape[1] for part in batch)
    wide = [{k: np.pad(v, ((0, 0), (0, longest - v.shape[1]))) for k, v in part.items()} for part in batch]
    return {name: np.concatenate([part[name] for part in wide]) for name in wide[0]}


class Attention(nnx.Module):
    """Attention under a mask, a head that is the embedding, and experts that each token is sent to."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(m.VOCABULARY, m.WIDTH, rngs=rngs)
        self.first = PipelineStage(nnx.MultiHeadAttention(2, m.WIDTH, decode=False, rngs=rngs))
        self.experts = PipelineStage(Experts(rngs))

    def __call__(self, batch):
        h = self.embed(batch["tokens"])
        h = h + self.first(h, mask=batch["mask"][:, None, None, :] > 0)
        return self.embed.attend(self.experts(h))


class Experts(nnx.Module):
    def __init__(self, rngs):
        self.router = nnx.Linear(m.WIDTH, 3, rngs=rngs)
        self.weights = nnx.Param(jax.random.normal(rngs.params(), (3, m.WIDTH, m.WIDTH)) / 3)

    def __call__(self, x):
        share = jax.nn.softmax(self.router(x))
        return x + jnp.einsum("ble,bld,edf->blf", share, x, self.weights[...])


def masked_loss(model, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch), batch["targets"])
    return (losses * batch["mask"]).sum(), batch["mask"].sum()


BATCHES = [
    Microbatches([item(2, 4), item(2, 8), item(4, 4)]),
    Microbatches([item(2, 8, seed=1)]),
    Microbatches([item(4, 4, seed=2), item(4, 4, seed=3), item(2, 8, seed=4), item(2, 4, seed=5), item(2, 8, seed=6)]),
]


def trainer_of(model=None, loss=masked_loss, **options):
    options = {"num_stages": 2, "num_microbatches": 4, "mesh": {"data": 1}, "logging": False, **options}
    return PipelineTrainer(model or Attention(nnx.Rngs(0)), optax.sgd(0.1), loss, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": {"data": 2}},
        slow({"schedule": "zero_bubble"}),
        slow({"schedule": "gpipe"}),
        slow({"num_stages": 1}),
        slow({"schedule": by_name("interleaved_1f1b", 2, 1), "mesh": {"data": 2}}),
    ],
)
def test_training_is_that_on_padded_batches(options):
    model = Attention(nnx.Rngs(0))
    graphdef, params = nnx.split(model)

    def value(params, batch):
        total, weight = masked_loss(nnx.merge(graphdef, params), batch)
        return total / weight

    trainer, losses = trainer_of(**options), list[float]()
    for batch in BATCHES:
        loss, grads = jax.value_and_grad(value)(params, padded(batch))
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        losses.append(float(loss))
    actual = [float(trainer.train_step(batch)["loss"]) for batch in BATCHES]
    np.testing.assert_allclose(actual, losses, rtol=RTOL)
    tree_allclose(jax.tree.leaves(trainer.state.params), jax.tree.leaves(params), rtol=RTOL, atol=1e-5)


def test_means_count_every_example_and_keys_are_those_of_the_microbatch():
    """Microbatches of one shape are what a batch cut in so many is, with dropout and metrics."""
    parts = [item(2, 5, seed) for seed in range(4)]
    whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    one, other = (
        PipelineTrainer(
            m.Tokens(rngs=nnx.Rngs(0), dropout=0.5), optax.sgd(0.1), m.loss_with_metrics, num_stages=2,
            num_microbatches=4, mesh={"data": 1}, logging=False,
        )
        for _ in range(2)
    )  # fmt: skip
    wanted, actual = one.train_step(whole), other.train_step(Microbatches(parts))
    tree_allclose(
        {k: np.asarray(v) for k, v in actual.items()}, {k: np.asarray(v) for k, v in wanted.items()}, rtol=RTOL
    )
    tree_allclose(jax.tree.leaves(other.state.params), jax.tree.leaves(one.state.params), rtol=RTOL, atol=1e-6)
    uneven = Microbatches([item(2, 5), item(6, 5, seed=1)])
    model = m.Tokens(rngs=nnx.Rngs(1))
    means = [float(m.mean_loss(model, part)) for part in uneven]
    loss = trainer_of(m.Tokens(rngs=nnx.Rngs(1)), m.mean_loss).train_step(uneven)["loss"]
    np.testing.assert_allclose(loss, (2 * means[0] + 6 * means[1]) / 8, rtol=RTOL)


def test_fit_draws_them_as_any_batches_and_counts_their_shapes(capsys):
    trainer = trainer_of(logging=True, training=Training(max_batch_shapes=3))
    trainer.fit(BATCHES, epochs=2)
    assert trainer.step == 6
    graphdef, params = nnx.split(Attention(nnx.Rngs(0)))
    trained = jax.tree.unflatten(jax.tree.structure(params), map(np.asarray, jax.tree.leaves(trainer.state.params)))
    expected = masked_loss(nnx.merge(graphdef, trained), padded(BATCHES[0]))
    np.testing.assert_allclose(trainer.evaluate([BATCHES[0]])["loss"], expected[0] / expected[1], rtol=RTOL)
    told = capsys.readouterr().out
    assert "compiling 2 stages for 3 shape(s) of microbatches (3 of at most 3)" in told
    assert told.count("shape(s) of microbatches") == 1
    with pytest.raises(BatchError, match=r"1 other shape\(s\), after 3"):
        trainer.train_step(Microbatches([item(2, 4), item(2, 6)]))


def test_a_shape_counts_once_it_is_compiled(monkeypatch):
    trainer = trainer_of(training=Training(max_batch_shapes=2))

    def fail(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(MpmdFunction, "compile", fail)
    for lengths in ((4, 8), (5, 6)):  # four shapes, of which none is compiled
        with pytest.raises(RuntimeError, match="out of memory"):
            trainer.train_step(Microbatches([item(2, length) for length in lengths]))


def test_programs_of_the_oldest_patterns_are_freed(monkeypatch):
    """A long run draws any number of patterns, and each program takes memory."""
    monkeypatch.setattr(patterns, "MOST_PATTERNS", 2)
    trainer = trainer_of(training=Training(order="given"))
    items, programs = [item(2, 4), item(2, 8)], WeakSet()
    for numbers in itertools.product((0, 1), repeat=3):
        trainer.train_step(Microbatches([items[number] for number in numbers]))
        programs.update(trainer.steps.compiled.values())
    gc.collect()
    assert len(programs) == len(trainer.steps.compiled) == 2


def test_the_table_is_of_the_microbatches_and_tells_the_worst_mixture(capsys):
    trainer = trainer_of(logging=True, schedule="gpipe")
    batch = Microbatches([item(2, 4), item(2, 16), item(2, 4), item(2, 4), item(2, 4)])
    compiled = trainer.compile(batch)
    told = " ".join(capsys.readouterr().out.split())
    assert "5 microbatches of ['mask'] float32[2, 16], ['targets'] int32[2, 16], ['tokens'] int32[2, 16]" in told
    assert "float32[2, 4], " not in told.partition("the worst has")[2]
    longest = trainer.compile(Microbatches([item(2, 16)] * 5))
    for mixed, worst in zip(compiled.memory_analysis(), longest.memory_analysis(), strict=True):
        assert mixed.peak_bytes < worst.peak_bytes
    assert compiled.compiler.compilations == longest.compiler.compilations
    assert all(all(read.values()) for read in trainer.leaves_read(batch))


def test_calls_for_one_shape_are_refused_by_name():
    trainer = trainer_of()
    trainer.train_step(BATCHES[0])
    for call in (trainer.accumulate, trainer.profile_step, trainer.rows_read, partial(verify, trainer)):
        with pytest.raises(BatchError, match="is for batches of one shape, but this one is Microbatches"):
            call(BATCHES[0])


def test_a_loss_that_draws_keys_keeps_the_order_of_the_data():
    """So a step on ranks is that on one device, whatever its microbatches cost."""

    def loss(model, batch, rngs):
        keep = jax.random.bernoulli(rngs.dropout(), 0.5, batch["mask"].shape)
        total, _ = masked_loss(model, {**batch, "mask": batch["mask"] * keep})
        return total, batch["mask"].sum()

    batch = Microbatches([item(2, 8), item(2, 4), item(2, 8, seed=1), item(2, 4, seed=1), item(2, 4, seed=2)])
    losses = [trainer_of(loss=loss, **options).train_step(batch)["loss"] for options in ({}, {"num_stages": 1})]
    assert float(losses[0]) == pytest.approx(float(losses[1]), rel=RTOL)


def test_what_no_step_can_train_on_is_refused():
    contrast = WholeBatchLoss(lambda model, batch: model(batch), lambda h, batch: (h**2).mean())
    with pytest.raises(LossError, match="WholeBatchLoss"):
        trainer_of(loss=contrast).train_step(BATCHES[0])
    with pytest.raises(BatchError, match=r"microbatch 1 .* 3 examples"):
        trainer_of(mesh={"data": 2}).train_step(Microbatches([item(2, 4), item(3, 4)]))
    with pytest.raises(BatchError, match="global_batch_size=8 with Microbatches"):
        trainer_of().train_step(BATCHES[0], global_batch_size=8)
    with pytest.raises(BatchError, match="predict takes one batch"):
        trainer_of().predict(BATCHES[0])
    with pytest.raises(BatchError, match="a plan is for batches of one shape"):
        trainer_of().planning_step(BATCHES[0])
    with pytest.raises(TypeError, match="one batch"):
        trainer_of().fit(BATCHES[0])
