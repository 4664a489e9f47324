"""Losses that are not finite after step 1: the run stops before a checkpoint is replaced, or the step is skipped."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.checkpoint.checkpoint_store import CheckpointStore
from jaxpp_flax.trainers import Checkpoints, Logging, NonFiniteLossError, Precision, Training
from jaxpp_flax.trainers.step import nonfinite
from jaxpp_flax.trainers.step.nonfinite import nonfinite_leaf
from tests.helpers import slow
from tests.trainers.models import Layers, squared_error
from tests.trainers.sharing import sharing_steps


@sharing_steps("checkpoints", "progress")
def trainer(num_stages=2, tx=None, progress=False, **more):
    tx = tx or optax.sgd(0.1)
    return PipelineTrainer(
        Layers(), tx, squared_error, num_stages=num_stages, num_microbatches=2,
        logging=Logging(progress=progress), **more,
    )  # fmt: skip


def batch(seed, *, bad=False):
    x, y = np.random.default_rng(seed).normal(size=(2, 4, Layers.WIDTH)).astype(np.float32)
    if bad:
        y[-1] = np.nan
    return {"x": x, "y": y}


def data(*bad, count=8):
    """Batches, of which those that make the steps `bad` hold NaN."""
    return [batch(step, bad=step in bad) for step in range(1, count + 1)]


def weights(of):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(of.state.params)]


@pytest.mark.parametrize("num_stages", [slow(1), 2])
def test_the_last_good_checkpoint_stays_and_the_run_goes_on_from_it(tmp_path, num_stages):
    it = trainer(num_stages, checkpoints=Checkpoints(tmp_path, every=1, keep=1))
    for bad in (4, 8):  # the last step has none after it that would tell
        with pytest.raises(NonFiniteLossError, match=rf"loss of step {bad} is nan.*resume=True.*\"skip\""):
            it.fit(data(bad), resume=True)
        assert CheckpointStore(tmp_path).steps() == (bad - 1,)
    again, plain = trainer(num_stages, checkpoints=tmp_path), trainer(num_stages)
    again.fit(data(), resume=True)
    plain.fit(data())
    for mine, theirs in zip(weights(again), weights(plain), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_without_checkpoints_the_run_stops_two_steps_later_as_a_loop_of_the_users_own_does(tmp_path):
    it = trainer(num_stages=1)
    it.save(tmp_path / "start")
    with pytest.raises(NonFiniteLossError, match="loss of step 3"):
        it.fit(data(3))
    assert it.step == 5
    for count in (3, 8):
        it.restore(tmp_path / "start")
        with pytest.raises(NonFiniteLossError, match="loss of step 3"):
            list(it.training_steps(data(3, count=count)))


def test_parameters_are_looked_at_before_a_save(tmp_path):
    """The loss of the step that spoils them is finite, and the next one comes after the save."""
    tx = optax.sgd(lambda count: jnp.where(count == 3, jnp.inf, 0.1))
    it = trainer(tx=tx, checkpoints=Checkpoints(tmp_path / "run", every=2, keep=1))
    with pytest.raises(NonFiniteLossError, match=r"after step 4 the parameter layers/0/\w+ holds.*older ones stay"):
        it.fit(data())
    assert CheckpointStore(tmp_path / "run").steps() == (2,)
    with pytest.raises(NonFiniteLossError, match="after step 4 the parameter"):
        it.save()
    it.save(tmp_path / "to look at")  # replaces nothing


def test_skip_is_training_without_that_batch(tmp_path, capsys):
    options = {"training": Training(on_nonfinite="skip", ema_decay=0.5)}
    skipping = trainer(progress=True, checkpoints=Checkpoints(tmp_path, every=1), **options)
    skipping.fit(data(3, 5))
    assert CheckpointStore(tmp_path).latest() == skipping.step == 8
    said = " ".join(capsys.readouterr().out.split())
    assert "step 3 is skipped: its loss or gradients are not finite (1 so far)" in said
    assert "step 5 is skipped: its loss or gradients are not finite (2 so far)" in said
    plain = trainer(**options)
    plain.fit([one for step, one in enumerate(data(), start=1) if step not in (3, 5)])
    for mine, theirs in zip(
        jax.tree.leaves((skipping.state.params, skipping.state.ema)),
        jax.tree.leaves((plain.state.params, plain.state.ema)),
        strict=True,
    ):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(theirs))
    assert float(skipping.train_step(batch(9, bad=True))["skipped_step"]) == 1


@pytest.mark.parametrize("num_stages", [slow(1), 2])
def test_the_first_step_is_skipped_like_every_other(tmp_path, capsys, num_stages):
    options = {"training": Training(on_nonfinite="skip", ema_decay=0.5), "tx": optax.adam(0.1)}
    skipping, plain = trainer(num_stages, progress=True, **options), trainer(num_stages, **options)
    before = [np.array(leaf) for leaf in weights(skipping)]
    metrics = skipping.train_step(batch(1, bad=True))
    assert math.isnan(metrics["loss"])
    assert (float(metrics["skipped_step"]), skipping.step) == (1, 1)
    for mine, theirs in zip(weights(skipping), before, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    skipping.save(tmp_path / "after")
    again = trainer(num_stages, **options)
    again.restore(tmp_path / "after")
    for it in (skipping, again, plain):
        it.fit(data()[1:])
    assert "step 1 is skipped: its loss or gradients are not finite (1 so far)" in " ".join(
        capsys.readouterr().out.split()
    )
    states = [(it.state.params, it.state.opt_state, it.state.ema) for it in (skipping, again, plain)]
    for ours in states[:2]:
        for mine, theirs in zip(jax.tree.leaves(ours), jax.tree.leaves(states[2]), strict=True):
            np.testing.assert_array_equal(np.asarray(mine), np.asarray(theirs))


@pytest.mark.parametrize(
    "options", [{"training": Training(on_nonfinite="skip")}, {"precision": Precision(loss_scale="dynamic")}], ids=str
)
def test_skipping_for_ever_ends(monkeypatch, options):
    monkeypatch.setattr(nonfinite, "_MAX_SKIPPED", 3)
    it = trainer(num_stages=1, **options)
    it.fit(data(2, 3, 5, 6))  # no three of them follow each other
    with pytest.raises(NonFiniteLossError, match="the last 3 steps, up to step 12, were all skipped"):
        it.fit(data(2, 3, 4, 5, 6, 7, 8) * 3)


def test_ignore_goes_on(tmp_path):
    it = trainer(1, training=Training(on_nonfinite="ignore"), checkpoints=Checkpoints(tmp_path, every=4))
    assert math.isnan(it.fit(data(1, 3))["loss"])
    assert CheckpointStore(tmp_path).steps() == (4, 8)


def test_arguments_that_contradict_each_other():
    with pytest.raises(ValueError, match=r"on_nonfinite='stop' does not work with a loss scale"):
        trainer(training=Training(on_nonfinite="stop"), precision=Precision(loss_scale="dynamic"))
    trainer(training=Training(on_nonfinite="skip"), precision=Precision(loss_scale="dynamic"))


def test_every_kind_of_leaf_is_looked_at():
    good = {"a": jnp.ones(3), "count": jnp.arange(2), "half": jnp.ones(2, jnp.bfloat16), "none": None}
    assert nonfinite_leaf(good) is None
    assert nonfinite_leaf({**good, "half": jnp.array([1, jnp.inf], jnp.bfloat16)}) == "half"
    assert nonfinite_leaf({**good, "z": jnp.array([1j * math.nan])}) == "z"


def test_a_mesh_around_the_trainer_and_arrays_of_the_host_are_no_matter():
    two = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    spread = jax.device_put(jnp.ones(4), jax.sharding.NamedSharding(two, jax.sharding.PartitionSpec("data")))
    params = {"spread": spread, "here": jnp.ones(2), "numpy": np.ones(3, np.float32)}
    with jax.set_mesh(jax.sharding.Mesh(np.array(jax.devices()[4:8]), ("other",))):
        assert nonfinite_leaf(params) is None
        assert nonfinite_leaf({**params, "numpy": np.float32([1, np.nan])}) == "numpy"
    assert nonfinite_leaf({**params, "spread": spread.at[3].set(jnp.inf)}) == "spread"


def test_a_loss_that_is_not_finite_is_never_the_best(capsys):
    it = trainer(1, training=Training(on_nonfinite="skip"), progress=True)
    it.fit(data())
    it.fit(data(1))
    assert "best loss nan" not in capsys.readouterr().out
