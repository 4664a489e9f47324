"""What the trace of a loss tells before anything runs: a loss whose microbatches do not add up to the whole batch."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineTrainer, WholeBatchLoss
from jaxpp_flax.trainers import (
    BatchStatisticsWarning,
    Inference,
    LossError,
    MicrobatchLossWarning,
    MicrobatchStateWarning,
    ModelError,
)
from tests.trainers import models as m

BATCH = m.make_xy(4) | {"mask": np.array([1, 0, 1, 1], np.float32)}


class Normed(m.Layers):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nnx.BatchNorm(self.WIDTH, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(super().__call__(x))


def make_trainer(
    loss_fn: Callable[..., Any], num_microbatches: int = 2, model: Any = m.Layers, **options: Any
) -> PipelineTrainer:
    options = {"num_stages": 1, "logging": False, **options}
    return PipelineTrainer(model(), optax.sgd(0.1), loss_fn, num_microbatches=num_microbatches, **options)


def weighted(model, batch):
    return (jnp.square(model(batch["x"]) - batch["y"]).mean(-1) * batch["mask"]).sum(), batch["mask"].sum()


def with_metrics(model, batch):
    return m.squared_error(model, batch), {"masked": weighted(model, batch), "size": jnp.abs(model(batch["x"])).mean()}


def masked_mean(model, batch):
    total, weight = weighted(model, batch)
    return total / jnp.maximum(weight, 1)


def contrastive(model, batch):
    z = model(batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(z @ z.T, jnp.arange(len(z))).mean()


def warned(trainer: PipelineTrainer, batch: Any = BATCH) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.step_function(batch)
    return [f"{w.category.__name__}: {w.message}" for w in caught]


def test_a_masked_mean_is_not_that_of_the_whole_batch_and_is_warned_of_once():
    trainer = make_trainer(masked_mean)
    with pytest.warns(MicrobatchLossWarning, match="depends on the values in the microbatch") as caught:
        step = trainer.step_function(BATCH)
    (text,) = [str(w.message) for w in caught]
    line = masked_mean.__code__.co_firstlineno + 2
    assert f"`div` at {__file__}:{line}:" in text
    assert "(masked_mean)" in text
    assert "Return the sum and this divisor, (loss_sum, weight)" in text
    assert "2 microbatches" in text
    larger = m.make_xy(8) | {"mask": np.ones(8, np.float32)}
    assert warned(trainer, larger) == [], "another structure of a batch says nothing new"
    split = jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), BATCH)
    _, metrics = jax.jit(step)(trainer.state, split)
    whole = float(nnx.jit(masked_mean)(m.Layers(), BATCH))
    assert abs(float(metrics["loss"]) - whole) > 1e-3, "the warning has a reason"


def test_the_remedies_and_one_microbatch_are_silent():
    def scaled_back(model, batch):
        return masked_mean(model, batch) * batch["mask"].sum(), batch["mask"].sum()

    for loss_fn in (m.squared_error, weighted, with_metrics, scaled_back):
        assert warned(make_trainer(loss_fn)) == []
    for loss_fn in (masked_mean, contrastive):
        assert warned(make_trainer(loss_fn, num_microbatches=1)) == []


def test_a_scalar_of_the_batch_is_a_constant():
    def tempered(model, batch):
        return m.squared_error(model, batch) / batch["temperature"]

    assert warned(make_trainer(tempered), {**BATCH, "temperature": np.float32(0.5)}) == []


def test_a_loss_across_examples_names_the_place_and_the_loss_of_two_parts():
    def as_pair(model, batch):
        return contrastive(model, batch) * 4, 4

    for loss_fn in (contrastive, as_pair):
        (text,) = warned(make_trainer(loss_fn))
        assert text.startswith("MicrobatchLossWarning: ")
        assert text.endswith("[JPF904]")
        assert "not by a mean or a sum: `dot_general` at" in text
        assert "(contrastive)" in text
        assert "loss_fn=WholeBatchLoss(embed_fn, loss_fn)" in text
        assert "weight" not in text.partition(". ")[2]


def test_batch_norm_has_a_warning_of_its_own():
    statistics, quotient = warned(make_trainer(masked_mean, model=Normed))
    assert statistics.startswith(BatchStatisticsWarning.__name__)
    assert "`div` at" in quotient
    assert "combines examples" not in quotient
    (statistics,) = warned(make_trainer(m.squared_error, model=Normed))
    assert statistics.startswith(BatchStatisticsWarning.__name__)


# ------------------------------------------------------------------ sums


def errors(model, batch):
    return jnp.square(model(batch["x"]) - batch["y"]).mean(-1)


def penalty(model):
    return 1e-3 * jnp.square(model.layers[0].kernel[...]).sum()


def in_groups(values, batch):
    return jax.ops.segment_sum(values, batch["mask"].astype(jnp.int32), 2)[1]


def if_any(batch, function):
    return jax.lax.cond(batch["mask"].sum() > 0, function, lambda: 0.0)


SUMS: dict[str, tuple[str, Callable[..., Any]]] = {
    "sum": ("2 times as large (`reduce_sum` at ", lambda model, batch: errors(model, batch).sum()),
    "over a constant": ("2 times as large", lambda model, batch: errors(model, batch).sum() / 4),
    "mean times size": ("2 times as large", lambda model, batch: m.squared_error(model, batch) * len(batch["x"])),
    "product": ("2 times as large", lambda model, batch: errors(model, batch) @ jnp.ones(len(batch["x"]))),
    "loop": (
        "2 times as large (`scan` at ",
        lambda model, batch: jax.lax.scan(lambda total, one: (total + one, None), 0.0, errors(model, batch))[0],
    ),
    "condition": ("2 times as large", lambda model, batch: if_any(batch, lambda: errors(model, batch).sum())),
    "mean and sum": (
        "adds terms that grow differently",
        lambda model, batch: errors(model, batch).mean() + jnp.square(model(batch["x"])).sum(),
    ),
    "sum and a penalty": ("grow differently", lambda model, batch: errors(model, batch).sum() + penalty(model)),
    "divided twice": (
        "0.5 times as large: it is divided by the number of examples once too often",
        lambda model, batch: m.squared_error(model, batch) / len(batch["x"]),
    ),
    "constant weight": ("loss_sum is 2 times as large", lambda model, batch: (errors(model, batch).sum(), 4)),
    "weight of a mean": ("its weight 2 times", lambda model, batch: (m.squared_error(model, batch), len(batch["x"]))),
    "segments": (
        "`div` at ",
        lambda model, batch: in_groups(errors(model, batch), batch) / in_groups(jnp.ones(len(batch["x"])), batch),
    ),
    "masked mean behind a condition": (
        "`div` at ",
        lambda model, batch: if_any(batch, lambda: masked_mean(model, batch)),
    ),
}

MEANS: dict[str, Callable[..., Any]] = {
    "sum over the size": lambda model, batch: errors(model, batch).sum() / len(batch["x"]),
    "mean and a penalty": lambda model, batch: m.squared_error(model, batch) + penalty(model),
    "sum and size": lambda model, batch: (errors(model, batch).sum(), len(batch["x"])),
    "guarded weight": lambda model, batch: (
        (errors(model, batch) * batch["mask"]).sum(), jnp.maximum(batch["mask"].sum(), 1)
    ),
    "condition": lambda model, batch: if_any(batch, lambda: m.squared_error(model, batch)),
    "loop": lambda model, batch: jax.lax.map(lambda one: one**2, errors(model, batch)).mean(),
    "Python loop": lambda model, batch: sum(errors(model, batch)[i] for i in range(len(batch["x"]))) / len(batch["x"]),
    "for one size alone": lambda model, batch: errors(model, batch)[jnp.arange(2)].mean(),
    "fails for other sizes": lambda model, batch: (errors(model, batch) + jnp.zeros(len(batch["x"][:2]))).mean(),
}  # fmt: skip


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_is_not_the_mean_of_its_parts(name):
    said, loss_fn = SUMS[name]
    (text,) = warned(make_trainer(loss_fn))
    assert text.startswith("MicrobatchLossWarning: ")
    assert said in text
    assert warned(make_trainer(loss_fn, num_microbatches=1)) == []
    (text,) = warned(make_trainer(loss_fn, num_microbatches=4))  # of one example each
    assert said in text


def test_a_mean_is_silent():
    for loss_fn in MEANS.values():
        assert warned(make_trainer(loss_fn)) == []


# ------------------------------------------------------------------ weights that are none


def accuracy(model, batch):
    return (jnp.abs(model(batch["x"]) - batch["y"]) < 0.5).mean()


def with_accuracy(model, batch):
    return m.squared_error(model, batch), accuracy(model, batch)


NO_WEIGHTS: dict[str, Callable[..., Any]] = {
    "accuracy": with_accuracy,
    "and metrics": lambda model, batch: (with_accuracy(model, batch), {"accuracy": accuracy(model, batch)}),
    "in a metric": lambda model, batch: (m.squared_error(model, batch), {"both": with_accuracy(model, batch)}),
    "hits": lambda model, batch: (m.squared_error(model, batch), (model(batch["x"]) > 0).sum()),
    "in a call": lambda model, batch: jax.jit(lambda x: (x.mean(), (x > 0).mean()))(model(batch["x"])),
}


@pytest.mark.parametrize("name", NO_WEIGHTS)
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_second_value_that_depends_on_parameters_is_no_weight(name, num_microbatches):
    loss_fn = NO_WEIGHTS[name]
    said = r'depends on the trained parameters \(layers/0/bias.*no weight.*"accuracy": accuracy}\)'
    training = make_trainer(loss_fn, num_microbatches)
    evaluating = make_trainer(m.squared_error, num_microbatches, inference=Inference(eval_loss_fn=loss_fn))
    for call in (
        lambda: training.step_function(BATCH),
        *(lambda t=t: t.evaluate([BATCH]) for t in (training, evaluating)),
    ):
        with pytest.raises(LossError, match=said):
            call()


def test_logits_are_no_weight():
    def with_logits(model, batch):
        return m.squared_error(model, batch), model(batch["x"])

    said = r"a weight of shape \(2, 4\).*no metrics: take them with `predict`; report scalars by name: \(loss, {'acc"
    with pytest.raises(LossError, match=said):
        make_trainer(with_logits).step_function(BATCH)


def test_a_loss_of_two_parts_has_no_such_weight_either():
    def compare(embeddings, batch):
        return jnp.square(embeddings - batch["y"]).mean(), (embeddings > 0).mean()

    trainer = make_trainer(WholeBatchLoss(lambda model, batch: model(batch["x"]), compare))
    for call in (lambda: trainer.step_function(BATCH), lambda: trainer.evaluate([BATCH])):
        with pytest.raises(LossError, match="this is no weight"):
            call()


def test_counts_are_weights():
    """Those of the data; in a metric, those of what the model predicts too."""

    def in_parts(model, batch):
        def add(sums, part):
            error, mask = part
            return (sums[0] + error * mask, sums[1] + mask), None

        return jax.lax.scan(add, (0.0, 0.0), (errors(model, batch), batch["mask"]))[0]

    def precision(model, batch):
        found = model(batch["x"])[:, 0] > 0
        return m.squared_error(model, batch), {"precision": ((found & (batch["mask"] > 0)).sum(), found.sum())}

    def of_shapes(model, batch):
        outputs = model(batch["x"])
        return jnp.square(outputs - batch["y"]).sum(), jnp.ones_like(outputs).sum()

    for loss_fn in (weighted, in_parts, precision, of_shapes):
        trainer = make_trainer(loss_fn)
        assert warned(trainer) == []
        assert trainer.evaluate([BATCH])["loss"] > 0


# ------------------------------------------------------------------ states


class Stateful(m.Layers):
    def __init__(self, *rows: int) -> None:
        super().__init__()
        self.state, self.count = nnx.Variable(jnp.zeros(self.WIDTH)), nnx.Variable(jnp.int32(0))
        self.hidden = nnx.Variable(jnp.zeros((*(rows or (2,)), self.WIDTH)))
        self.mean = nnx.metrics.Average()


def moving(new: Callable[..., Any], name: str = "state") -> Callable[..., Any]:
    def loss_fn(model, batch):
        outputs = model(batch["x"])
        variable = getattr(model, name)
        variable[...] = jax.lax.stop_gradient(new(variable[...], outputs, model))
        return jnp.square(outputs - batch["y"]).mean()

    return loss_fn


def reading(model, batch):
    """Adds sums to what it reads."""
    outputs = model(batch["x"]) + model.state[...]
    model.state[...] += jax.lax.stop_gradient(outputs).sum(0)
    return jnp.square(outputs - batch["y"]).mean()


def with_metric(model, batch):
    outputs = model(batch["x"])
    model.mean.update(values=outputs)
    return jnp.square(outputs - batch["y"]).mean()


MOVED: dict[str, Callable[..., Any]] = {
    "centre": moving(lambda v, x, model: 0.9 * v + 0.1 * x.mean(0)),
    "mean": moving(lambda v, x, model: v + x.mean(0)),
    "last": moving(lambda v, x, model: x.mean(0)),
    "calls": moving(lambda v, x, model: v + 1, "count"),
    "bias of experts": moving(lambda v, x, model: v + 0.1 * jnp.sign(x.sum() - x.sum(0))),
    "queue": moving(lambda v, x, model: jnp.concatenate([x, v])[: len(v)], "hidden"),
    "read": reading,
}

KEPT: dict[str, Callable[..., Any]] = {
    "sum": moving(lambda v, x, model: v + x.sum(0)),
    "teacher": moving(lambda v, x, model: 0.9 * v + 0.1 * model.layers[0].bias[...]),  # written once a step
    "counts": moving(lambda v, x, model: v.at[x.argmax(-1)].add(1.0)),
    "examples": moving(lambda v, x, model: v + len(x), "count"),
    "largest": moving(lambda v, x, model: jnp.maximum(v, jnp.abs(x).max(0))),
    "the same": moving(lambda v, x, model: model.layers[0].bias[...] + 1.0),
    "metric": with_metric,
}


@pytest.mark.parametrize("name", MOVED)
def test_a_state_that_a_loss_moves_in_each_microbatch(name):
    with pytest.warns(
        MicrobatchStateWarning, match=r"the loss moves (state|count|hidden) in each .*after_update"
    ) as told:
        make_trainer(MOVED[name], model=Stateful).step_function(BATCH)
    assert len(told) == 1
    assert str(told[0].message).endswith("[JPF908]")
    assert warned(make_trainer(MOVED[name], 1, Stateful)) == []


def test_a_loss_and_its_state_are_warned_of_each():
    def loss_fn(model, batch):
        return MOVED["centre"](model, batch) * (1 if "mask" in batch else len(batch["x"]))

    trainer = make_trainer(loss_fn, model=Stateful)
    (sums, moved) = warned(trainer, m.make_xy(4))
    assert sums.startswith(MicrobatchLossWarning.__name__)
    assert moved.startswith(MicrobatchStateWarning.__name__)
    assert warned(trainer) == [], "once"


def test_sums_over_the_examples_are_silent_and_equal_to_one_call():
    for name, loss_fn in KEPT.items():
        trainer, model = make_trainer(loss_fn, model=Stateful), Stateful()
        assert warned(trainer) == [], name
        trainer.train_step(BATCH)
        loss_fn(model, BATCH)
        found, expected = (nnx.state(of, nnx.Not(nnx.Param)) for of in (trainer.gather_model(), model))
        jax.tree.map(lambda *pair: np.testing.assert_allclose(*pair, rtol=1e-5, atol=1e-6), found, expected)


def recurrent(model, batch):
    hidden = jnp.tanh(model(batch["x"]) + model.hidden[...])
    model.hidden[...] = jax.lax.stop_gradient(hidden)
    return jnp.square(hidden - batch["y"]).mean()


@pytest.mark.parametrize("rows", [(2,), (4,), (1, 4)], ids=["microbatch", "batch", "batch_is_second"])
def test_a_state_for_each_example_is_refused(rows):
    trainer = make_trainer(recurrent, model=lambda: Stateful(*rows))
    shape = re.escape(str((*rows, m.Layers.WIDTH)))
    said = rf"a row for each example.*hidden of shape {shape}.*2 microbatches"
    with pytest.raises(ModelError, match=said):
        trainer.step_function(BATCH)
    if rows[-1] == len(BATCH["x"]):
        assert warned(make_trainer(recurrent, 1, lambda: Stateful(*rows))) == []


def test_another_error_of_a_loss_stays():
    def wrong(model, batch):
        return (model(batch["x"]) + jnp.zeros(3)).mean()

    with pytest.raises(ValueError, match="Incompatible shapes"):
        make_trainer(wrong, model=lambda: Stateful(4)).step_function(BATCH)
