"""Losses that can be traced for one size of a microbatch alone, or have other operations for another size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpp_flax.trainers import Inference, LossError
from tests.trainers import models as m
from tests.trainers.loss.test_loss_trace import SUMS as OF_ANY_SIZE
from tests.trainers.loss.test_loss_trace import errors, make_trainer, penalty, warned

BATCH = m.make_xy(8) | {"mask": np.array([1, 0, 1, 1] * 2, np.float32), "label": np.array([0, 1, 2, 3] * 2)}


def outputs_of(model, batch):
    return model(batch["x"].reshape(4, 2, 2).reshape(4, 4))


def fixed(model, batch):
    return jnp.square(outputs_of(model, batch) - batch["y"]).mean(-1)


def of_one(model, batch, i):
    return jnp.square(model(batch["x"][i]) - batch["y"][i]).mean()


def of_part(model, batch, i):
    return errors(model, jax.tree.map(lambda leaf: leaf[i : i + 2], batch))


def log_probs(model, batch):
    return jax.nn.log_softmax(outputs_of(model, batch))


def told_to_host(value):
    jax.debug.callback(lambda _: None, value)
    return value


def deep(model, batch):
    """Layers whose widths multiply to more than a float holds."""
    x = outputs_of(model, batch)
    for _ in range(120):
        x = x + x @ np.zeros((4, 256), np.float32) @ np.zeros((256, 4), np.float32)
    return x


def masked(model, batch):
    """Factors that are no counts."""
    x = outputs_of(model, batch) / np.finfo(np.float32).max + outputs_of(model, batch) * 1e-38
    return jnp.where(batch["mask"][:, None] < 0, x * np.inf, x * np.finfo(np.float32).max)


def by_scan(values):
    return jax.lax.scan(lambda total, one: (total + one, None), 0.0, values)[0]


SUMS: dict[str, Callable[..., Any]] = {
    "shape": lambda model, batch: fixed(model, batch).sum(),
    "indices": lambda model, batch: errors(model, batch)[jnp.arange(4)].sum(),
    "half": lambda model, batch: 0.5 * fixed(model, batch).sum(),
    "loop": lambda model, batch: sum(of_one(model, batch, i) for i in range(4)),
    "loop over all": lambda model, batch: sum(of_one(model, batch, i) for i in range(len(batch["x"]))),
    "rows": lambda model, batch: sum(errors(model, batch)),
    "loop in a call": lambda model, batch: jax.jit(lambda e: sum(e[i] for i in range(len(e))))(errors(model, batch)),
    "parts": lambda model, batch: sum(of_part(model, batch, i).mean() for i in (0, 2)),
    "stack": lambda model, batch: jnp.stack([of_one(model, batch, i) for i in range(4)]).sum(),
    "compiled loop": lambda model, batch: jax.lax.fori_loop(0, 4, lambda i, s: s + of_one(model, batch, i), 0.0),
    "map": lambda model, batch: jax.lax.map(lambda i: of_one(model, batch, i), jnp.arange(4)).sum(),
    "scan": lambda model, batch: by_scan(fixed(model, batch)),
    "one-hot code": lambda model, batch: -jnp.vdot(jax.nn.one_hot(batch["label"], 4), log_probs(model, batch)),
    "segments": lambda model, batch: jax.ops.segment_sum(fixed(model, batch), batch["label"] % 2, 2).sum(),
    "mean and sum": lambda model, batch: fixed(model, batch).mean() + jnp.square(model(batch["x"])).sum(),
    "sum and penalty": lambda model, batch: fixed(model, batch).sum() + penalty(model),
    "constant weight": lambda model, batch: (fixed(model, batch).sum(), 1.0),
    "weight of a mean": lambda model, batch: (fixed(model, batch).mean(), batch["mask"].sum()),
    "mean and size": lambda model, batch: (fixed(model, batch).mean(), 4),
}

MEANS: dict[str, Callable[..., Any]] = {
    "mean": lambda model, batch: fixed(model, batch).mean(),
    "size": lambda model, batch: fixed(model, batch).sum() / 4,
    "inverse": lambda model, batch: fixed(model, batch).sum() * 0.25,
    "half of a mean": lambda model, batch: fixed(model, batch).sum() / (2 * 4),
    "all entries": lambda model, batch: (jnp.square(outputs_of(model, batch) - batch["y"]) / 16).sum(),
    "weights": lambda model, batch: fixed(model, batch) @ np.full(4, 0.25, np.float32),
    "loop": lambda model, batch: sum(of_one(model, batch, i) for i in range(4)) / 4,
    "loop of shares": lambda model, batch: sum(of_one(model, batch, i) / 4 for i in range(4)),
    "rows": lambda model, batch: sum(errors(model, batch)) / len(batch["x"]),
    "parts": lambda model, batch: sum(of_part(model, batch, i).mean() for i in (0, 2)) / 2,
    "concatenated": lambda model, batch: jnp.concatenate([of_part(model, batch, i) for i in (0, 2)]).mean(),
    "stack": lambda model, batch: jnp.stack([of_one(model, batch, i) for i in range(4)]).mean(),
    "compiled loop": lambda model, batch: jax.lax.fori_loop(0, 4, lambda i, s: s + of_one(model, batch, i), 0.0) / 4,
    "some": lambda model, batch: errors(model, batch)[jnp.arange(2)].mean(),
    "pairs": lambda model, batch: (fixed(model, batch)[::2] - fixed(model, batch)[1::2]).mean(),
    "scan over columns": lambda model, batch: by_scan(jnp.square(outputs_of(model, batch)).mean(0)),
    "segments of their own": lambda model, batch: jax.ops.segment_sum(fixed(model, batch), jnp.arange(4), 4).mean(),
    "indices of classes": lambda model, batch: -log_probs(model, batch)[jnp.arange(4), batch["label"]].mean(),
    "mean and penalty": lambda model, batch: 4 * fixed(model, batch).mean() + penalty(model),
    "contrast of views": lambda model, batch: optax.losses.cosine_distance(
        *jnp.split(model(jnp.concatenate([batch["x"].reshape(4, 4), batch["y"]])), 2)
    ).mean(),
    "sum and size": lambda model, batch: (fixed(model, batch).sum(), 4),
    "deep": lambda model, batch: jnp.square(deep(model, batch)).mean(),
    "masked by infinity": lambda model, batch: jnp.square(masked(model, batch)).mean(),
    "call of the host": lambda model, batch: told_to_host(fixed(model, batch)).mean(),
    "masked loop": lambda model, batch: (
        sum(of_one(model, batch, i) * batch["mask"][i] for i in range(4)), sum(batch["mask"][i] for i in range(4))
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_is_found_from_one_trace(name):
    (text,) = warned(make_trainer(SUMS[name]), BATCH)
    assert text.startswith("MicrobatchLossWarning: ")
    if name in ("shape", "indices", "loop over all", "parts"):
        assert "It adds up the values of the examples (" in text
        assert (("return (loss_sum, weight)" in text) and __file__ in text) or "single examples" in text
    assert warned(make_trainer(SUMS[name], num_microbatches=1), jax.tree.map(lambda leaf: leaf[:4], BATCH)) == []


def test_a_mean_for_one_size_is_silent():
    for name, loss_fn in MEANS.items():
        assert warned(make_trainer(loss_fn), BATCH) == [], name


def test_an_evaluation_that_adds_up_is_warned_of_once():
    for loss_fn in (SUMS["shape"], SUMS["loop over all"], OF_ANY_SIZE["sum"][1]):
        trainer = make_trainer(m.squared_error, inference=Inference(eval_loss_fn=loss_fn))
        with pytest.warns(UserWarning, match=r"the loss of `evaluate` \(eval_loss_fn; .*JPF904") as told:
            trainer.evaluate([BATCH, BATCH])
        assert len(told) == 1
    silent = make_trainer(SUMS["shape"], inference=Inference(eval_loss_fn=MEANS["loop"]))
    silent.evaluate([BATCH])
    trainer = make_trainer(OF_ANY_SIZE["sum"][1])
    with pytest.warns(UserWarning, match="the loss is not a mean"):
        trainer.train_step(BATCH)
    trainer.evaluate([BATCH])  # of the same loss, which training has told of


# ------------------------------------------------------------------ weights

NO_WEIGHTS: dict[str, Callable[..., Any]] = {
    "accuracy in a metric": lambda model, batch: (
        fixed(model, batch).mean(),
        {"both": (fixed(model, batch).mean(), (outputs_of(model, batch) > 0).mean())},
    ),
    "mean of data": lambda model, batch: (m.squared_error(model, batch), jnp.abs(batch["x"]).mean()),
    "mean of data for one size": lambda model, batch: (fixed(model, batch).mean(), jnp.abs(batch["x"]).mean()),
    "fraction of data": lambda model, batch: (m.squared_error(model, batch), (batch["x"] > 0).mean()),
}

WEIGHTS: dict[str, Callable[..., Any]] = {
    "precision": lambda model, batch: (
        fixed(model, batch).mean(),
        {"hits": ((outputs_of(model, batch)[:, 0] * batch["mask"] > 0).sum(), (outputs_of(model, batch) > 0).sum())},
    ),
    "weights of the examples": lambda model, batch: (
        fixed(model, batch) @ jnp.exp(batch["y"][:, 0]), jnp.exp(batch["y"][:, 0]).sum()
    ),
    "fraction of unmasked": lambda model, batch: (
        (errors(model, batch) * batch["mask"] ** 2).mean(), (batch["mask"] ** 2).mean()
    ),
    "fraction by where": lambda model, batch: (
        jnp.where(batch["mask"] > 0, errors(model, batch), 0).mean(), (batch["mask"] > 0).mean()
    ),
    "fraction times size": lambda model, batch: (
        (fixed(model, batch) * batch["mask"]).sum(), batch["mask"].mean() * 4
    ),
    "constant": lambda model, batch: (fixed(model, batch).mean(), 2.0),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_WEIGHTS)
def test_a_mean_is_no_weight(name):
    with pytest.raises(LossError, match="this is no weight"):
        make_trainer(NO_WEIGHTS[name]).step_function(BATCH)
    evaluating = make_trainer(m.squared_error, inference=Inference(eval_loss_fn=NO_WEIGHTS[name]))
    with pytest.raises(LossError, match="this is no weight"):
        evaluating.evaluate([BATCH])


def test_what_counts_examples_is_a_weight():
    for name, loss_fn in WEIGHTS.items():
        trainer = make_trainer(loss_fn)
        assert warned(trainer, BATCH) == [], name
        trainer.evaluate([BATCH])
