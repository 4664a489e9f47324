"""A parameter has one place in a checkpoint, trained or frozen: runs that freeze others read one another's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax import nnx

import jaxpp_flax.linen as linen_pipeline
from jaxpp_flax import PipelineTrainer
from jaxpp_flax.checkpoint import CheckpointMismatchError, leaves_of, load_linen, load_nnx, save
from jaxpp_flax.checkpoint.format.paths import flatten, nest
from jaxpp_flax.layers import add_lora
from jaxpp_flax.pretrained import export_pretrained, load_pretrained
from jaxpp_flax.trainers import Training
from jaxpp_flax.trainers.state.placement import to_ordinary
from tests.trainers import models as m

BATCH = m.make_xy(8)
KINDS = ("nnx", "factory", "linen")
FIRST, SECOND = "layers*0/*", "layers*1/*"  # `layers/0` in NNX, `layers_0` in Linen


class LinenLayers(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(2):
            x = nn.tanh(linen_pipeline.PipelineStage(nn.Dense(4, name=f"layers_{i}"))(x))
        return x


def make_trainer(kind: str, seed: int, *, tx: Any = None, stages: int = 2, average: Any = 0.5, **training: Any) -> Any:
    model, variables = LinenLayers(), None
    if kind == "linen":
        variables = model.init(jax.random.key(seed), BATCH["x"])
    elif kind == "factory":
        model = lambda rngs: m.Layers(rngs=nnx.Rngs(seed), dropout=0.1)  # noqa: E731
    else:
        model = m.Layers(rngs=nnx.Rngs(seed), dropout=0.1)
        if kind == "lora":
            model = add_lora(model, rank=2, rngs=nnx.Rngs(seed))
            training = {"wrt": nnx.LoRAParam, **training}
    return PipelineTrainer(
        model, tx or optax.adam(0.1), m.squared_error, variables=variables, num_stages=stages, num_microbatches=2,
        training=Training(ema_decay=average, **training), logging=False, checkpoints=None,
    )  # fmt: skip


def parameters(trainer: Any) -> dict[str, np.ndarray]:
    """The parameters of the model by path, trained and frozen."""
    model = trainer.gather_model()
    found = model.variables["params"] if isinstance(model, nn.Module) else nnx.state(model, nnx.Param)
    return {path: np.asarray(leaf) for path, leaf in flatten(found)[0].items()}


def assert_equal(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_array_equal(np.asarray(actual[path]), np.asarray(value), err_msg=path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, tuple[Path, Any]]:
    """Runs of two steps by kind and frozen globs, with their checkpoints."""
    made: dict[Any, tuple[Path, Any]] = {}
    for kind in KINDS:
        for frozen in (None, FIRST):
            trainer = make_trainer(kind, 1, frozen=frozen)
            for _ in range(2):
                trainer.train_step(BATCH)
            path = tmp_path_factory.mktemp("saved") / "run"
            made[kind, frozen] = trainer.save(path), trainer
            made[kind, frozen, "old"] = save(path.with_name("old"), trainer.state), trainer
    return made


@pytest.mark.parametrize(
    ("form", "after_a_step"), [((), True), (("old",), False)], ids=["after a step", "as older versions wrote it"]
)
@pytest.mark.parametrize(
    ("theirs", "own"), [(None, FIRST), (FIRST, None), (FIRST, SECOND)], ids=["frozen", "thawed", "exchanged"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_was_frozen(saved: Any, kind: str, theirs: Any, own: Any, form: Any, after_a_step: bool):
    path, run = saved[(kind, theirs, *form)]
    trainer = make_trainer(kind, 5, frozen=own)
    if after_a_step:
        trainer.train_step(BATCH)
    trainer.restore(path)
    assert_equal(parameters(trainer), parameters(run))
    assert trainer.step == 2
    ours, stored = (flatten(to_ordinary(of.state))[0] for of in (trainer, run))
    both = {path for path in ours.keys() & stored.keys() if path.startswith(("opt_state", "ema"))}
    assert both
    for name in both:
        np.testing.assert_array_equal(ours[name], stored[name], err_msg=name)
    for name in ours.keys() - stored.keys():  # of what is trained now, and was frozen
        if name.startswith("opt_state"):
            assert not np.any(ours[name]), name
        if name.startswith("ema"):
            np.testing.assert_array_equal(ours[name], ours[name.replace("ema/", "params/")], err_msg=name)
    trainer.train_step(BATCH)
    assert trainer.step == 3


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_paths_on_disk(saved: Any, kind: str):
    of_model = [
        {path for path in leaves_of(saved[kind, frozen][0]) if path.startswith(("params/", "model_state/"))}
        for frozen in (None, FIRST)
    ]
    assert of_model[0] == of_model[1]


@pytest.mark.parametrize(("kind", "form"), [("nnx", ()), ("nnx", ("old",)), ("linen", ()), ("linen", ("old",))])
def test_plain_models_and_stock_orbax(saved: Any, kind: str, form: Any):
    path, run = saved[(kind, FIRST, *form)]
    if kind == "nnx":
        plain = load_nnx(m.Layers(rngs=nnx.Rngs(8), dropout=0.1), path)
        assert_equal(flatten(nnx.state(plain, nnx.Param))[0], parameters(run))
    else:
        variables = LinenLayers().init(jax.random.key(8), BATCH["x"])
        assert_equal(flatten(load_linen(variables, path)["params"])[0], parameters(run))
    if not form:
        with ocp.StandardCheckpointer() as stock:
            every = {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in leaves_of(path).items()}  # type: ignore[arg-type]
            assert_equal(flatten(stock.restore(path / "state", nest(every))["params"])[0], parameters(run))


def test_weights_are_read_and_written_out_of_the_checkpoint(saved: Any, tmp_path: Path):
    path, run = saved["linen", FIRST]
    assert_equal(flatten(load_pretrained(path, parameters(run)))[0], parameters(run))
    assert_equal(load_pretrained(export_pretrained(path, tmp_path / "w"), parameters(run)), parameters(run))
    old, _ = saved["linen", FIRST, "old"]
    assert_equal(load_pretrained(old, parameters(run)), parameters(run))


class Scale(nnx.Variable):
    """A kind of trained variable of a user's own."""


class Scaled(m.Layers):
    def __init__(self, seed: int):
        super().__init__(rngs=nnx.Rngs(seed))
        self.scale = Scale(jax.random.normal(jax.random.key(seed), (4,)))

    def __call__(self, x):
        return super().__call__(x * self.scale[...])


@pytest.mark.parametrize("frozen", [None, "scale"])
def test_a_variable_of_another_kind(frozen: Any, tmp_path: Path):
    kinds = (nnx.Param, Scale)
    first, second = (
        PipelineTrainer(
            Scaled(seed), optax.adam(0.1), m.squared_error, num_stages=2, num_microbatches=2, logging=False,
            training=Training(wrt=kinds, frozen=of),
        )
        for seed, of in ((0, frozen), (1, "scale" if frozen is None else None))
    )  # fmt: skip
    first.train_step(BATCH)
    path = first.save(tmp_path / "run")
    assert "params/scale" in leaves_of(path)
    second.restore(path)
    np.testing.assert_array_equal(second.gather_model().scale[...], first.gather_model().scale[...])


def test_adapters_and_their_base(saved: Any, tmp_path: Path):
    base, run = saved["nnx", None]
    tuned = make_trainer("lora", 5)
    with pytest.raises(CheckpointMismatchError, match=r"params/layers/0/lora/lora_a: missing in the checkpoint"):
        tuned.restore(base)
    tuned.restore(base, missing="keep")
    ours = parameters(tuned)
    assert_equal({path: leaf for path, leaf in ours.items() if "lora" not in path}, parameters(run))
    factors = tuned.save(tmp_path / "factors", only="params/*")
    assert len(leaves_of(factors)) == 4
    whole = tuned.save(tmp_path / "whole")
    other = make_trainer("lora", 7)
    other.restore(factors, only="params/*")
    assert other.step == 0
    assert_equal(
        {path: leaf for path, leaf in parameters(other).items() if "lora" in path},
        {path: leaf for path, leaf in ours.items() if "lora" in path},
    )
    # `only` names leaves of `trainer.state`, in which the base is no part of the parameters.
    other.restore(whole, only=["params/*", "step"])
    other.restore(whole, only="model_state/*")
    assert_equal(parameters(other), ours)
    everything = make_trainer("lora", 9, wrt=nnx.Param)
    everything.restore(whole)
    assert_equal(parameters(everything), ours)


def test_a_run_goes_on_with_other_frozen_parameters(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def trainer(frozen: Any) -> Any:
        return PipelineTrainer(
            m.Layers(rngs=nnx.Rngs(0)), optax.adam(0.1), m.squared_error, num_stages=2, num_microbatches=2,
            training=Training(frozen=frozen), checkpoints=tmp_path,
        )  # fmt: skip

    first = trainer(FIRST)
    first.train_step(BATCH)
    first.save()
    second = trainer(None)
    second.fit([BATCH], steps=2, resume=True)
    text = capsys.readouterr()
    assert "What the optimizer keeps of them begins anew: opt_state/0/mu/layers/0/bias" in text.out + text.err
    second.save()
    third = trainer(SECOND)
    third.fit([BATCH], steps=3, resume=True)
    text = capsys.readouterr()
    assert "is not restored: opt_state/0/mu/layers/1/bias" in text.out + text.err
    assert third.step == 3


def test_other_optimizers_are_still_refused(saved: Any):
    path, _ = saved["nnx", FIRST]
    with pytest.raises(CheckpointMismatchError, match="opt_state/0/trace/layers/1/kernel: missing"):
        make_trainer("nnx", 1, tx=optax.sgd(0.1, momentum=0.9)).restore(path)
    with pytest.raises(CheckpointMismatchError, match="ema/layers/1/kernel: in the checkpoint, but not"):
        make_trainer("nnx", 1, average=None).restore(path)


@pytest.mark.parametrize(
    ("only", "is_told"), [("params/*", True), (["params/*", "model_state/*"], False), ("model_state/*", False)]
)
def test_frozen_parameters_that_only_leaves_out_are_told(
    only: Any, is_told: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    def trainer(seed: int, frozen: Any) -> Any:
        return PipelineTrainer(
            m.Layers(rngs=nnx.Rngs(seed)), optax.adam(0.1), m.squared_error, num_stages=2, num_microbatches=2,
            training=Training(frozen=frozen), checkpoints=None,
        )  # fmt: skip

    path = trainer(0, None).save(tmp_path / "all")
    other = trainer(1, FIRST)
    other.restore(path, only=only)
    text = "".join(capsys.readouterr()).replace("\n", " ")
    assert ("only='params/*' leaves out 2 frozen parameters, which keep their values" in text) == is_told
    assert ("model_state/layers/0/bias" in text) == is_told
    # A file of the trained parameters alone has no frozen ones to leave out.
    part = other.save(tmp_path / "trained", only="params/*")
    trainer(2, FIRST).restore(part, only="params/*")
    assert "leaves out" not in "".join(capsys.readouterr())
