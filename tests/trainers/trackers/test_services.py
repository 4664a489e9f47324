"""A run of W&B or MLflow that the user has opened is used, and left open."""

from __future__ import annotations

import types

import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.trainers import Logging, MlflowTracker, Tracker, WandbTracker
from tests.trainers.models import make_batch
from tests.trainers.trackers.services import install_mlflow, install_wandb


def fit(tracker: Tracker) -> None:
    trainer = PipelineTrainer(
        nnx.Linear(5, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1), lambda model, batch: model(batch["tokens"] * 1.0).mean(),
        num_stages=1, num_microbatches=2, logging=Logging(tracker=tracker, progress=False),
    )  # fmt: skip
    trainer.fit([make_batch(4)])


def test_a_run_of_wandb_that_the_user_opened_stays_open(monkeypatch: pytest.MonkeyPatch):
    wandb = install_wandb(monkeypatch)
    run = wandb.init()
    for _ in range(2):
        fit(WandbTracker(project="other"))
    assert wandb.run is run
    assert run.exit_code is None
    assert list(wandb.runs) == ["run1"]
    assert list(run.rows) == [1]


def test_a_run_of_wandb_that_the_tracker_opened_is_finished(monkeypatch: pytest.MonkeyPatch):
    wandb = install_wandb(monkeypatch)
    tracker = WandbTracker()
    fit(tracker)
    assert (wandb.run, wandb.runs["run1"].exit_code) == (None, 0)
    run = wandb.init(id="users")
    with pytest.warns(UserWarning, match=r"the W&B run users is open, so rows go there, not to the run run1"):
        fit(tracker)
    assert run.exit_code is None
    assert wandb.run is run


def test_another_run_beside_the_users(monkeypatch: pytest.MonkeyPatch):
    wandb = install_wandb(monkeypatch)
    users = wandb.init()
    fresh = type(users)("fresh")
    monkeypatch.setattr(wandb, "init", lambda **_: fresh)
    fit(WandbTracker(reinit="create_new"))
    assert (users.exit_code, fresh.exit_code) == (None, 0)


@pytest.mark.parametrize("is_active", [True, False])
def test_a_run_of_mlflow_that_is_active_in_the_program_is_not_ended(is_active: bool, monkeypatch: pytest.MonkeyPatch):
    mlflow = install_mlflow(monkeypatch)
    run = mlflow.client().create_run("0")
    mlflow.active = run if is_active else types.SimpleNamespace(info=types.SimpleNamespace(run_id="another"))
    fit(MlflowTracker(run_id=run.info.run_id))
    assert run.info.status == ("RUNNING" if is_active else "FINISHED")
    fit(MlflowTracker())
    assert mlflow.client.runs["run2"].info.status == "FINISHED"
    assert run.info.status == ("RUNNING" if is_active else "FINISHED")
