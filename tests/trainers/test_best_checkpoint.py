"""The best checkpoint by a metric is kept and found again: by an option, and with a policy of Orbax."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from orbax.checkpoint import checkpoint_managers as policies

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.checkpoint import CheckpointNotFoundError
from jaxpp_flax.checkpoint.reading import read_json
from jaxpp_flax.trainers import Checkpoints, Inference
from jaxpp_flax.trainers.callbacks import EarlyStopping
from tests.trainers.sharing import sharing_steps

DATA = [jnp.ones((4, 2))] * 6
# The losses of evaluations at steps 1 to 6.
TARGETS = [3.0, 1.0, 0.5, 2.0, 4.0, 5.0]


@sharing_steps("checkpoints", "logging")
def trainer(checkpoints, logging=False):
    """A trainer whose parameter counts the steps: evaluation's loss at step n is `TARGETS[n - 1]`."""

    def loss(model, x):
        return model.kernel.sum() * x.mean()

    def eval_loss(model, x):
        step = jnp.round(-model.kernel[0, 0]).astype(int)  # each step subtracts 1
        return jnp.array(TARGETS)[step - 1] * x.mean()

    model = nnx.Linear(1, 1, use_bias=False, kernel_init=nnx.initializers.zeros, rngs=nnx.Rngs(0))
    return PipelineTrainer(
        model, optax.sgd(1.0), loss, num_stages=1, num_microbatches=2, logging=logging,
        checkpoints=checkpoints, inference=Inference(eval_loss_fn=eval_loss),
    )  # fmt: skip


def steps(path):
    return sorted(int(p.name) for p in path.iterdir() if p.name.isdigit())


@pytest.mark.parametrize(("mode", "best"), [("min", 3), ("max", 1)])
def test_the_best_is_kept_and_restored(tmp_path, mode, best):
    options = Checkpoints(tmp_path, every=1, keep=1, best="eval_loss", best_mode=mode)
    t = trainer(options)
    t.fit(DATA, steps=4, eval_data=DATA[:1], eval_every=1)
    assert steps(tmp_path) == sorted({best, 4})
    resumed = trainer(options)  # a new process reads the metrics from the disk
    resumed.fit(DATA, steps=6, eval_data=DATA[:1], eval_every=1, resume=True)
    best = best if mode == "min" else 6
    assert steps(tmp_path) == sorted({best, 6})
    resumed.restore("best")
    assert resumed.step == best
    assert np.allclose(resumed.state.params["kernel"], -best)


def test_a_policy_of_orbax_gets_the_metrics(tmp_path):
    best = policies.BestN(get_metric_fn=lambda metrics: metrics["eval_loss"], reverse=True, n=2)
    t = trainer(Checkpoints(tmp_path, every=1, keep=best))
    t.fit(DATA, steps=5, eval_data=DATA[:1], eval_every=1)
    assert steps(tmp_path) == [2, 3]
    with ocp.CheckpointManager(tmp_path) as stock:
        assert stock.metrics(3) == {"loss": -2.0, "eval_loss": 0.5}


def test_what_does_not_fit_is_refused(tmp_path):
    with pytest.raises(ValueError, match="best_mode='most': it must be 'min' or 'max'"):
        Checkpoints(tmp_path, best="loss", best_mode="most")
    with pytest.raises(ValueError, match="best=3: it must be the name of a metric"):
        Checkpoints(tmp_path, best=3)
    t = trainer(Checkpoints(tmp_path / "a", every=2))
    t.fit(DATA, steps=2)
    with pytest.raises(CheckpointNotFoundError, match=r'"best" needs the name of a metric'):
        t.restore("best")
    t = trainer(Checkpoints(tmp_path / "b", every=2, best="eval_loss"))
    t.train_step(DATA[0])
    t.save()
    with pytest.raises(CheckpointNotFoundError, match=r"a number for 'eval_loss', .* have: no metrics\."):
        t.restore("best")


@pytest.mark.parametrize("every", [3, 4])
def test_the_last_checkpoint_has_the_evaluation_after_it(tmp_path, every):
    t = trainer(Checkpoints(tmp_path, every=every, best="eval_loss"))
    t.fit(DATA, steps=4, eval_data=DATA[:1])
    t.restore("best")
    assert t.step == 4


def test_a_run_that_stops_early_at_a_save_stays_stopped(tmp_path):
    def run(**more):
        t = trainer(Checkpoints(tmp_path, every=2))
        t.fit(DATA, eval_data=DATA[:1], eval_every=4, callbacks=[EarlyStopping(patience=1, min_delta=9.0)], **more)
        return t.step

    assert run(steps=6) == 6  # the evaluation after step 6 has no better loss than that after step 4
    assert run(steps=20, resume=True) == 6


def test_a_failed_last_evaluation_loses_no_step(tmp_path):
    t = trainer(Checkpoints(tmp_path, every=4))
    with pytest.raises(ValueError, match="without a single batch"):
        t.fit(DATA, steps=4, eval_data=[])
    assert steps(tmp_path) == [4]


class Loader:
    """Leaves out a short batch, which its length counts, as loaders do."""

    def __init__(self, fails=False):
        self.fails = fails

    def __len__(self):
        return 5

    def __iter__(self):
        yield from DATA[:4]
        if self.fails:
            raise OSError("the disk is gone")


def test_where_the_data_end_unforeseen_the_last_checkpoint_has_the_evaluation_after_it(tmp_path):
    for name, data in [("generator", (batch for batch in DATA[:4])), ("loader", Loader())]:
        t = trainer(Checkpoints(tmp_path / name, every=2, best="eval_loss"))
        last = t.fit(data, eval_data=DATA[:1])
        assert steps(tmp_path / name) == [2, 4]
        assert last == {"loss": -3.0, "eval_loss": 2.0}
        assert t.fit(data, steps=4, resume=True) == last
        t.restore("best")
        assert t.step == 4


def test_a_save_that_waits_for_the_next_batch_is_not_lost_with_it(tmp_path):
    t = trainer(Checkpoints(tmp_path, every=4))
    with pytest.raises(OSError, match="the disk is gone"):
        t.fit(Loader(fails=True), eval_data=DATA[:1])
    assert steps(tmp_path) == [4]


def test_a_finished_run_returns_the_metrics_of_its_checkpoint(tmp_path):
    last = trainer(Checkpoints(tmp_path, every=4)).fit(DATA, eval_data=DATA[:1], eval_every=3)
    assert last == {"loss": -5.0, "eval_loss": 5.0}
    for limit in ({"steps": 6}, {"steps": 4}, {"epochs": 1}):
        assert trainer(Checkpoints(tmp_path, every=4)).fit(DATA, resume=True, **limit) == last


def test_metrics_of_a_step_that_a_restore_has_undone_are_forgotten(tmp_path):
    t = trainer(Checkpoints(tmp_path, every=1))
    t.fit(DATA, steps=2)
    t.restore(1)
    (tmp_path / "2").rename(tmp_path / "two")
    t.train_step(DATA[0] * 2)  # another second step
    t.save()
    assert read_json(tmp_path / "two", "metrics") == {"loss": -1.0}
    assert read_json(tmp_path / "2", "metrics") == {}
