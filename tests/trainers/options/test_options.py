"""The options of `PipelineTrainer`: each checks itself."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpp_flax import Checkpoints, PipelineTrainer
from jaxpp_flax.trainers import (
    Callback,
    DictTracker,
    Inference,
    Logging,
    Memory,
    MeshOptions,
    Precision,
    Training,
)
from jaxpp_flax.trainers.mesh import build_mesh
from tests.trainers import models as m


def make(**options):
    options = {"num_stages": 1, "num_microbatches": 2, "logging": False, **options}
    return PipelineTrainer(m.Layers(2), optax.sgd(0.1), m.squared_error, **options)


# ------------------------------------------------------------------ the constructor


def test_the_constructor_has_at_most_16_parameters_each_with_a_type():
    parameters = list(inspect.signature(PipelineTrainer.__init__).parameters.values())[1:]
    assert len(parameters) <= 16
    assert all(of.annotation not in (inspect.Parameter.empty, "Any") for of in parameters)
    assert not any(of.kind is of.VAR_KEYWORD for of in parameters)


# ------------------------------------------------------------------ short forms


def test_plain_values_are_short_forms():
    mesh = build_mesh(2)
    assert Checkpoints.of("run") == Checkpoints("run")
    assert Checkpoints.of(Path("run")) == Checkpoints(Path("run"))
    assert Checkpoints.of(None) is None
    assert MeshOptions.of(mesh) == MeshOptions(mesh=mesh)
    assert MeshOptions.of(mesh.jax_mesh) == MeshOptions(mesh=mesh.jax_mesh)
    assert MeshOptions.of({}) == MeshOptions(axes={})
    assert MeshOptions.of(None) == MeshOptions()
    assert Logging.of(False) == Logging(progress=False, messages=False)
    assert (Training.of(None), Memory.of(None), Inference.of(None)) == (Training(), Memory(), Inference())
    for options in (Checkpoints("run"), MeshOptions(), Logging(), Training()):
        assert type(options).of(options) is options


def test_the_trainer_takes_every_option(tmp_path):
    tracker = DictTracker()
    trainer = make(
        num_stages=2,
        mesh=MeshOptions(axes={"data": 2}, num_ranks=2),
        assignment=[1, 1],
        training=Training(frozen="layers/1", ema_decay=0.5, seed=3),
        precision=Precision(loss_scale=8.0, gradients="float32"),
        memory=Memory(remat="full"),
        inference=Inference(predict_fn=lambda model, batch: model(batch["x"])),
        logging=Logging(tracker=tracker, every=1, progress=False),
        checkpoints=Checkpoints(tmp_path / "run", every=1, keep=1, preemption_deadline=None),
    )
    head = np.array(trainer.gather_model().layers[1].kernel[...])
    trainer.fit([m.make_xy(4)], steps=2)
    assert dict(trainer.mesh.jax_mesh.shape) == {"stage": 2, "data": 2}
    assert trainer.plan.stage_sizes == (1, 2)
    assert list(tracker["loss"]) == [1, 2]
    assert [path.name for path in (tmp_path / "run").iterdir() if path.name.isdigit()] == ["2"]
    assert trainer.predict(m.make_xy(4)).shape[0] == 4
    assert (np.asarray(trainer.gather_model().layers[1].kernel[...]) == head).all()
    assert trainer.gather_model(ema=True) is not None


# ------------------------------------------------------------------ what is refused

REFUSED = [
    (lambda: Checkpoints(3), TypeError, "directory must be a path, got int: 3"),
    (lambda: Checkpoints.of(3), TypeError, "checkpoints must be a directory, or Checkpoints("),
    (lambda: Checkpoints("run", every=0), ValueError, "every=0: it must be a whole number of at least 1"),
    (
        lambda: Checkpoints("run", every="2"),
        ValueError,
        "every='2': it must be a whole number of at least 1, a policy, or None",
    ),
    (lambda: Checkpoints("run", keep="2"), ValueError, "keep='2'"),
    (lambda: Checkpoints("run", every=np.float32(2)), ValueError, "every="),
    (lambda: MeshOptions(num_ranks=0), ValueError, "num_ranks=0: it must be a whole number of at least 1"),
    (lambda: Checkpoints("run", keep=2.5), ValueError, "keep=2.5: it must be a whole number of at least 1"),
    (lambda: Checkpoints("run", preemption_deadline=0), ValueError, "preemption_deadline=0: it must be"),
    (lambda: Training(on_nonfinite="wait"), ValueError, "on_nonfinite='wait': it must be"),
    (lambda: Training(on_nonfinite="stop").rule(scaled=True), ValueError, "does not work with a loss scale"),
    (lambda: MeshOptions(mesh=build_mesh(2), axes={"data": 2}), ValueError, "both mesh= and axes= are"),
    (lambda: MeshOptions(sharding_rules=["embed"]), TypeError, "sharding_rules holds 'embed'"),
    (lambda: MeshOptions.of(3), TypeError, "mesh must be a jax.sharding.Mesh, an MpmdMesh"),
    (lambda: Training(frozen=3), TypeError, "frozen=3: use paths such as"),
    (lambda: Training(ema_decay=1.5), ValueError, "ema_decay=1.5: it must lie between 0 and 1"),
    (lambda: Training.of("head"), TypeError, "training must be Training(...), got str: 'head'"),
    (lambda: Training(seed="7"), TypeError, "seed must be a whole number, got str: '7'"),
    (lambda: Inference(predict_fn=lambda x: x), TypeError, "called as predict_fn(model, batch)"),
    (lambda: Inference(eval_loss_fn=3), TypeError, "eval_loss_fn must be a function of"),
    (lambda: Inference.of(m.mean_loss), TypeError, "inference must be Inference(...), got function"),
    (lambda: Logging(every=0), ValueError, "every=0: it must be a whole number of at least 1"),
    (lambda: Logging(progress="bar"), TypeError, "progress='bar' (str): it must be True or False"),
    (lambda: Logging.of("run.jsonl"), TypeError, "logging must be Logging(...), got str: 'run.jsonl'"),
]


def test_every_count_takes_whole_numbers_of_other_libraries(tmp_path):
    """Each becomes an int at once: what a policy, a comparison or JSON does with another type is nobody's concern."""
    for number in (np.int64(2), jnp.int32(2)):
        saved = Checkpoints(tmp_path, every=number, keep=number)
        found = [saved.every, saved.keep, Logging(every=number).every, MeshOptions(num_ranks=number).num_ranks]
        assert [type(value) for value in (*found, Callback(every=number).every)] == [int] * 5
    trainer = PipelineTrainer(
        m.Layers(), optax.sgd(0.1), m.squared_error, num_stages=number, num_microbatches=np.int64(2), checkpoints=saved,
        logging=False,
    )  # fmt: skip
    data = [m.make_xy(4, seed=seed) for seed in range(3)]
    trainer.fit(data, steps=number, eval_data=data, eval_every=number, global_batch_size=np.int64(4))
    assert trainer.fit(data, epochs=number, resume=True)["loss"] > 0
    assert trainer.step == 6


def test_refusals():
    for function, kind, text in REFUSED:
        with pytest.raises(kind, match=re.escape(text)):
            function()
