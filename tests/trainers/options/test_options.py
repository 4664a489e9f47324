"""The options of `PipelineTrainer`: each checks itself."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

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
    return PipelineTrainer(m.Model(2, rngs=nnx.Rngs(0)), optax.sgd(0.1), m.mean_loss, **options)


# ------------------------------------------------------------------ the constructor


def test_the_constructor_has_at_most_16_parameters_each_with_a_type():
    parameters = list(inspect.signature(PipelineTrainer.__init__).parameters.values())[1:]
    assert len(parameters) <= 16
    assert all(of.annotation not in (inspect.Parameter.empty, "Any") for of in parameters)
    assert not any(of.kind is of.VAR_KEYWORD for of in parameters)


def test_an_unknown_name_raises_as_python_does():
    with pytest.raises(TypeError, match=r"__init__\(\) got an unexpected keyword argument 'stages'"):
        make(stages=2)


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
    assert Logging.of(False) == Logging(progress=False)
    assert (Training.of(None), Memory.of(None), Inference.of(None)) == (Training(), Memory(), Inference())
    for options in (Checkpoints("run"), MeshOptions(), Logging(), Training()):
        assert type(options).of(options) is options


def test_the_trainer_takes_every_option(tmp_path):
    tracker = DictTracker()
    trainer = make(
        num_stages=2,
        mesh=MeshOptions(axes={"data": 2}, num_ranks=2),
        assignment=[1, 1],
        training=Training(frozen="head", ema_decay=0.5, seed=3),
        precision=Precision(loss_scale=8.0, gradients="float32"),
        memory=Memory(remat="full"),
        inference=Inference(predict_fn=lambda model, batch: model(batch["tokens"])),
        logging=Logging(tracker=tracker, every=1, progress=False),
        checkpoints=Checkpoints(tmp_path / "run", every=1, keep=1, preemption_deadline=None),
    )
    head = jnp.array(trainer.gather_model().head.kernel.get_value())
    trainer.fit([m.make_batch(4)], steps=2)
    assert dict(trainer.mesh.jax_mesh.shape) == {"stage": 2, "data": 2}
    assert trainer.plan.stage_sizes == (1, 2)
    assert list(tracker["loss"]) == [1, 2]
    assert [path.name for path in (tmp_path / "run").iterdir() if path.name.isdigit()] == ["2"]
    assert trainer.predict(m.make_batch(4)).shape[0] == 4
    assert (trainer.gather_model().head.kernel.get_value() == head).all()
    assert trainer.gather_model(ema=True) is not None


# ------------------------------------------------------------------ what is refused

REFUSED = {
    "directory": (lambda: Checkpoints(3), TypeError, "directory must be a path, got int: 3"),
    "checkpoints": (lambda: Checkpoints.of(3), TypeError, "checkpoints must be a directory, or Checkpoints("),
    "every": (lambda: Checkpoints("run", every=0), ValueError, "every=0: it must be a whole number of at least 1"),
    "every is a text": (
        lambda: Checkpoints("run", every="2"),
        ValueError,
        "every='2': it must be a whole number of at least 1, a policy, or None",
    ),
    "keep is a text": (lambda: Checkpoints("run", keep="2"), ValueError, "keep='2'"),
    "every is a float": (lambda: Checkpoints("run", every=np.float32(2)), ValueError, "every="),
    "ranks": (lambda: MeshOptions(num_ranks=0), ValueError, "num_ranks=0: it must be a whole number of at least 1"),
    "keep": (lambda: Checkpoints("run", keep=2.5), ValueError, "keep=2.5: it must be a whole number of at least 1"),
    "deadline": (lambda: Checkpoints("run", preemption_deadline=0), ValueError, "preemption_deadline=0: it must be"),
    "on_nonfinite": (lambda: Training(on_nonfinite="wait"), ValueError, "on_nonfinite='wait': it must be"),
    "conflict": (lambda: Training(on_nonfinite="stop").rule(scaled=True), ValueError, "overflow is skipped"),
    "two meshes": (lambda: MeshOptions(mesh=build_mesh(2), axes={"data": 2}), ValueError, "both mesh= and axes= are"),
    "rules": (lambda: MeshOptions(sharding_rules=["embed"]), TypeError, "sharding_rules holds 'embed'"),
    "mesh": (lambda: MeshOptions.of(3), TypeError, "mesh must be a jax.sharding.Mesh, an MpmdMesh"),
    "frozen": (lambda: Training(frozen=3), TypeError, "frozen=3: use paths such as"),
    "decay": (lambda: Training(ema_decay=1.5), ValueError, "ema_decay=1.5: it must lie between 0 and 1"),
    "training": (lambda: Training.of("head"), TypeError, "training must be Training(...), got str: 'head'"),
    "seed": (lambda: Training(seed="7"), TypeError, "seed must be a whole number, got str: '7'"),
    "predict_fn": (lambda: Inference(predict_fn=lambda x: x), TypeError, "called as predict_fn(model, batch)"),
    "eval_loss_fn": (lambda: Inference(eval_loss_fn=3), TypeError, "eval_loss_fn must be a function of"),
    "inference": (lambda: Inference.of(m.mean_loss), TypeError, "inference must be Inference(...), got function"),
    "log every": (lambda: Logging(every=0), ValueError, "every=0: it must be a whole number of at least 1"),
    "progress": (lambda: Logging(progress="bar"), TypeError, "progress='bar' (str): it must be True or False"),
    "logging": (lambda: Logging.of("run.jsonl"), TypeError, "logging must be Logging(...), got str: 'run.jsonl'"),
}


@pytest.mark.parametrize("number", [np.int64(2), jnp.int32(2)], ids=["NumPy", "JAX"])
def test_every_count_takes_whole_numbers_of_other_libraries(number, tmp_path):
    """Each becomes an int at once: what a policy, a comparison or JSON does with another type is nobody's concern."""
    options = [Checkpoints(tmp_path, every=number, keep=number), Logging(every=number), MeshOptions(num_ranks=number)]
    found = [options[0].every, options[0].keep, options[1].every, options[2].num_ranks, Callback(every=number).every]
    assert [type(value) for value in found] == [int] * 5
    trainer = PipelineTrainer(
        m.Model(2, rngs=nnx.Rngs(0)), optax.sgd(0.1), m.mean_loss, num_stages=number, num_microbatches=number,
        checkpoints=options[0], logging=False,
    )  # fmt: skip
    data = [m.make_batch(4, seed) for seed in range(3)]
    trainer.fit(data, steps=number, eval_data=data, eval_every=number, global_batch_size=np.int64(4))
    assert trainer.fit(data, epochs=number, resume=True)["loss"] > 0
    assert trainer.step == 6


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case):
    function, kind, text = REFUSED[case]
    with pytest.raises(kind, match=re.escape(text)):
        function()
