"""The metric of `Checkpoints(best=)`: refused or told where no checkpoint can have it."""

from __future__ import annotations

import warnings
from typing import Any

import optax
import pytest

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.checkpoint import CheckpointNotFoundError
from jaxpp_flax.trainers import Checkpoints, Evaluate, Logging
from tests.trainers import models as m
from tests.trainers.sharing import sharing_steps

DATA = [m.make_batch(4, seed) for seed in range(4)]


@sharing_steps("checkpoints")
def make_trainer(checkpoints: Checkpoints) -> PipelineTrainer:
    def loss(model: Any, batch: Any) -> Any:
        out = model(batch["tokens"][:, :4] * 1.0)
        return (out**2).mean(), {"size": out.mean(), "rows": out.mean(0)}

    return PipelineTrainer(
        m.Layers(), optax.sgd(0.1), loss, num_stages=1, num_microbatches=2, checkpoints=checkpoints,
        logging=Logging(progress=False),
    )  # fmt: skip


def fit(best: str, directory: Any, every: int | None = 1, **arguments: Any) -> PipelineTrainer:
    trainer = make_trainer(Checkpoints(directory, every=every, best=best))
    trainer.fit(DATA, **{"steps": 4, **arguments})
    return trainer


def test_a_metric_of_an_evaluation_without_one_is_refused(tmp_path):
    trainer = make_trainer(Checkpoints(tmp_path, every=1, best="eval_loss"))
    for loop in (lambda: trainer.fit(DATA), lambda: next(trainer.training_steps(DATA))):
        with pytest.raises(ValueError, match=r"best='eval_loss'.* this loop has none: pass fit\(eval_data="):
            loop()
    assert trainer.step == 0


@pytest.mark.parametrize(
    ("best", "arguments", "text"),
    [
        ("eval_los", {"eval_data": DATA[:1], "eval_every": 2}, "step 2 has no .*eval_loss.*Did you mean 'eval_loss'"),
        ("eval_los", {"eval_data": DATA[:1]}, "step 4 has no number of this name"),
        ("siz", {}, r"step 1 has no number.*It has: loss, size. Did you mean 'size'"),
        ("rows", {}, "step 1 has no number of this name"),  # an array has no order
        ("accuracy", {"eval_data": DATA[:1], "eval_every": 1}, "step 1 has no .*eval_loss, eval_size, loss, size"),
    ],
)  # fmt: skip
def test_a_metric_that_does_not_exist_is_told_once(best: str, arguments: Any, text: str, tmp_path):
    with pytest.warns(UserWarning, match=text) as caught:
        fit(best, tmp_path, **arguments)
    assert len(caught) == 1


@pytest.mark.parametrize(
    ("best", "every", "arguments"),
    [
        ("loss", 2, {}), ("size", None, {}), ("loss", 2, {"eval_data": DATA[:1], "eval_every": 2}),
        ("eval_loss", 2, {"eval_data": DATA[:1], "eval_every": 2}), ("eval_size", None, {"eval_data": DATA[:1]}),
        ("eval_loss", 1, {"callbacks": [Evaluate(DATA[:1], every=2)]}),
        ("eval_loss", None, {"eval_data": DATA[:1], "eval_every": 3}),
    ],
)  # fmt: skip
def test_a_metric_that_exists_is_found(best: str, every: int | None, arguments: Any, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer = fit(best, tmp_path, every, **arguments)
    trainer.restore("best")


def test_evaluations_at_other_steps_than_saves_are_told(tmp_path):
    trainer = make_trainer(Checkpoints(tmp_path, every=2, best="eval_loss"))
    with pytest.warns(UserWarning, match=r"none of the checkpoints of this run has this metric"):
        for _ in trainer.training_steps(DATA, callbacks=[NotAtTheEnd(DATA[:1], every=3)]):
            pass


@pytest.mark.parametrize(
    ("best", "evaluates", "text"),
    [
        ("eval_los", True, "step 1 has no number of this name.*Did you mean 'eval_loss'"),
        ("eval_loss", False, "step 1 has no number of this name.* It has: loss, size"),
        ("siz", False, "step 1 has no number of this name.* Did you mean 'size'"),
    ],
)
def test_a_loop_that_the_user_saves_in_is_told_at_the_first_save(best: str, evaluates: bool, text: str, tmp_path):
    trainer = make_trainer(Checkpoints(tmp_path, best=best))
    callbacks = [Evaluate(DATA[:1], every=1)] if evaluates else []
    steps = trainer.training_steps(DATA, callbacks=callbacks)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        next(steps), next(steps)
    with pytest.warns(UserWarning, match=text) as caught:
        trainer.save()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in steps:
            trainer.save()
    assert len(caught) == 1
    has = r"eval_loss, eval_size, loss, size\." if evaluates else r"loss, size\."
    with pytest.raises(CheckpointNotFoundError, match=rf"a number for '{best}', .* have: {has}"):
        trainer.restore("best")


def test_a_loop_without_saves_is_not_told_of_the_best(tmp_path):
    trainer = make_trainer(Checkpoints(tmp_path, best="eval_los"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(trainer.training_steps(DATA, callbacks=[Evaluate(DATA[:1], every=1)]))) == 4


class NotAtTheEnd(Evaluate):
    def on_last_step(self, trainer: Any, error: BaseException | None) -> None:
        """No evaluation."""


@pytest.mark.parametrize("argument", ["eval_every", "eval_global_batch_size"])
def test_an_evaluation_without_data_is_refused(argument: str, tmp_path):
    trainer = make_trainer(Checkpoints(tmp_path))
    with pytest.raises(ValueError, match=rf"{argument}=4, but there is nothing to evaluate: pass eval_data="):
        trainer.fit(DATA, **{argument: 4})  # pyright: ignore[reportArgumentType]
