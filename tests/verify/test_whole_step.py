"""The whole step against Flax and Optax alone: faults of the trainer's own functions are found, right steps agree."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineStage, PipelineTrainer, WholeBatchLoss
from jaxpp_flax.checkpoint.format.paths import flatten
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.trainers import Logging, Precision, Training
from jaxpp_flax.trainers.model.linen_model import LinenModel
from jaxpp_flax.trainers.model.nnx_model import NnxModel
from jaxpp_flax.trainers.step import builder
from jaxpp_flax.trainers.step.builder_cache import StepBuilderCache
from jaxpp_flax.trainers.step.optimizer_update import Update
from jaxpp_flax.verify import Report, verify, whole_step
from jaxpp_flax.verify.reference.plain_step import PlainStep
from jaxpp_flax.verify.reference.plain_update import PlainUpdate
from tests.helpers import slow_but
from tests.trainers import models as m
from tests.trainers.test_matches_plain import make_trainer
from tests.verify.test_pass_faults import Tied

pytestmark = [
    pytest.mark.filterwarnings("ignore::jaxpp_flax.trainers.BatchStatisticsWarning"),
    pytest.mark.filterwarnings("ignore::jaxpp_flax.trainers.MicrobatchLossWarning"),
]

BATCH = m.make_batch(8)
AT_ONCE, ONE_BY_ONE = "the whole batch at once", "one microbatch after another"
WITH_STATISTICS: dict[str, Any] = {"model_options": {"batch_norm": True}}


def trainer_of(kind: str = "nnx", **options: Any) -> PipelineTrainer:
    return make_trainer(kind, "1f1b", 2, 2, 2, **{"mesh": {}, **options})


class OnlyBlocks(nnx.Module):
    """Two blocks, so that a step compiles quickly."""

    def __init__(self) -> None:
        self.blocks = nnx.List([PipelineStage(nnx.Linear(4, 4, rngs=nnx.Rngs(i)), name=f"block_{i}") for i in range(2)])

    def __call__(self, x: Any) -> Any:
        for block in self.blocks:
            x = jnp.tanh(block(x))
        return x


def noisy(model: Any, batch: Any, *, rngs: Any, training: bool) -> Any:
    key = rngs["dropout"] if isinstance(rngs, dict) else rngs.noise()
    return m.mean_loss(model, batch) * (1 + training * 0.1 * jax.random.normal(key, ()))


def embed(model: Any, batch: Any) -> Any:
    return model(batch["x"]), model.blocks[0].kernel[...].sum()


def contrast(seen: Any, batch: Any) -> Any:
    y, scale = seen
    return jnp.mean((y @ y.T - jnp.exp(0.01 * scale)) ** 2), {"size": jnp.abs(y).mean()}


def contrastive() -> tuple[PipelineTrainer, Any]:
    options: dict[str, Any] = {"num_stages": 2, "num_microbatches": 2, "mesh": {}, "logging": False}
    trainer = PipelineTrainer(OnlyBlocks(), optax.sgd(0.1), WholeBatchLoss(embed, contrast), **options)
    return trainer, {"x": m.make_xy(8)["x"]}


ADAM = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
RIGHT: dict[str, tuple[Callable[[], Any], str]] = {
    "an optimizer that clips": (lambda: trainer_of(tx=ADAM), AT_ONCE),
    "a weighted loss, and metrics that are no means": (
        lambda: trainer_of(loss_fn=lambda *of: (m.weighted_loss(*of), {"count": of[1]["mask"].sum()})),
        ONE_BY_ONE,
    ),
    "statistics": (lambda: trainer_of(**WITH_STATISTICS), ONE_BY_ONE),
    "statistics of Linen": (lambda: trainer_of("linen", **WITH_STATISTICS), ONE_BY_ONE),
    "dropout": (lambda: trainer_of(model_options={"dropout": 0.3}), ONE_BY_ONE),
    "dropout of Linen": (lambda: trainer_of("linen", model_options={"dropout": 0.3}), ONE_BY_ONE),
    "random numbers of the loss": (lambda: trainer_of(loss_fn=noisy), ONE_BY_ONE),
    "random numbers of the loss, Linen": (lambda: trainer_of("linen", loss_fn=noisy), ONE_BY_ONE),
    "bfloat16": (lambda: trainer_of(precision="bfloat16", training=Training(frozen="embed/*")), AT_ONCE),
    "float16 of Linen": (lambda: trainer_of("linen", precision="float16"), ONE_BY_ONE),
    "narrow sums": (lambda: trainer_of(precision=Precision(gradients="bfloat16")), ONE_BY_ONE),
    "an average, and norms": (
        lambda: trainer_of(
            training=Training(ema_decay=0.9, on_nonfinite="skip"),
            logging=Logging(metrics=("gradient_norm", "parameter_norm", "update_ratio"), progress=False),
        ),
        AT_ONCE,
    ),
    "frozen weights of Linen": (lambda: trainer_of("linen", training=Training(frozen="Embed_0/*")), AT_ONCE),
    "a loss of the whole batch": (contrastive, AT_ONCE),
    "devices that share a batch": (lambda: trainer_of(mesh={"data": 2}), AT_ONCE),
}


@pytest.mark.parametrize(
    "name", slow_but(RIGHT, "a weighted loss, and metrics that are no means", "statistics", "a loss of the whole batch")
)
def test_a_right_step_agrees(name: str):
    make, form = RIGHT[name]
    made = make()
    trainer, batch = made if isinstance(made, tuple) else (made, BATCH)
    report = verify(trainer, batch)
    assert report.agrees, report
    assert not report.notes
    assert report.facts["reference"] == form
    assert {row.kind for row in report.rows if row.is_whole} == {"gradient", "metric", "state"}


# ---------------------------------------------------------------------- faults of the step's own functions


def small_trainer(**options: Any) -> tuple[PipelineTrainer, Any]:
    options = {"num_stages": 2, "num_microbatches": 2, "mesh": {}, "logging": False, "tx": optax.sgd(0.1), **options}
    return PipelineTrainer(OnlyBlocks(), options.pop("tx"), m.squared_error, **options), m.make_xy(8)


def with_statistics(kind: str = "nnx") -> tuple[PipelineTrainer, Any]:
    return trainer_of(kind, **WITH_STATISTICS), BATCH


def doubled_summand(patch: pytest.MonkeyPatch) -> None:
    right = Update.summand
    patch.setattr(Update, "summand", lambda self, grads: jax.tree.map(lambda g: 2 * g, right(self, grads)))


def another_divisor(patch: pytest.MonkeyPatch) -> None:
    right = builder.whole_batch

    def wrong(*of: Any) -> Any:
        metrics, divisor = right(*of)
        return metrics, 2 * divisor

    patch.setattr(builder, "whole_batch", wrong)


def another_loss(patch: pytest.MonkeyPatch) -> None:
    right = builder.whole_batch

    def wrong(*of: Any) -> Any:
        metrics, divisor = right(*of)
        return {**metrics, "loss": metrics["loss"] * 2}, divisor

    patch.setattr(builder, "whole_batch", wrong)


def changed_state(**change: Callable[[Any, Any], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """A fault of what a step returns: `change` makes a field of it of the state before and of the right value."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        right = Update.apply

        def wrong(self: Any, state: Any, *of: Any, **named: Any) -> Any:
            new, metrics = right(self, state, *of, **named)
            fields = {name: function(getattr(state, name), getattr(new, name)) for name, function in change.items()}
            return replace(new, **fields), metrics

        patch.setattr(Update, "apply", wrong)

    return plant


def lost_writes(adapter: type) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(adapter, "rest_of", lambda self, bound, before: before)


def one_key(adapter: type) -> Callable[[pytest.MonkeyPatch], None]:
    """All microbatches draw the same random numbers."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        right = adapter.bind  # type: ignore[attr-defined]
        patch.setattr(
            adapter, "bind", lambda self, *of, microbatch, **named: right(self, *of, microbatch=0 * microbatch, **named)
        )

    return plant


def first_microbatch_alone(patch: pytest.MonkeyPatch) -> None:
    right = builder._at
    patch.setattr(builder, "_at", lambda batch, index: right(batch, 0 * index))


FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Callable[[], Any], str]] = {
    "gradients are doubled": (doubled_summand, small_trainer, "gradient blocks/.* doubled"),
    "gradients are doubled, and then clipped": (
        doubled_summand,
        lambda: small_trainer(tx=optax.chain(optax.clip_by_global_norm(1e-3), optax.adam(0.1))),
        "gradient blocks/.* doubled",
    ),
    "gradients are divided by another number": (another_divisor, small_trainer, r"state params/.* \(1/2\)"),
    "the loss is another one": (another_loss, small_trainer, "metric loss.* doubled"),
    "one microbatch stands for all": (first_microbatch_alone, small_trainer, "gradient"),
    "the update is forgotten": (
        changed_state(params=lambda old, new: old), small_trainer, "state params/.* missing update"),
    "the update has the wrong sign": (
        changed_state(params=lambda old, new: jax.tree.map(lambda a, b: 2 * a - b, old, new)),
        small_trainer, "state params/.* wrong sign"),
    "the optimizer's state is not kept": (
        changed_state(opt_state=lambda old, new: old), lambda: small_trainer(tx=optax.adam(0.1)),
        "state opt_state/.* missing update"),
    "the average is not moved": (
        changed_state(ema=lambda old, new: old), lambda: small_trainer(training=Training(ema_decay=0.5)),
        "state ema/.* missing update"),
    "statistics are not written": (lost_writes(NnxModel), with_statistics, "state model_state/.* missing update"),
    "statistics of Linen are not written": (
        lost_writes(LinenModel), lambda: with_statistics("linen"), "state model_state/.* missing update"),
    "a written state is dropped at the end": (
        changed_state(model_state=lambda old, new: old), with_statistics, "state model_state/.* missing update"),
    "all microbatches have one key": (
        one_key(NnxModel), lambda: (trainer_of(model_options={"dropout": 0.3}), BATCH), "gradient"),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    slow_but(
        FAULTS, "gradients are doubled", "gradients are divided by another number", "the average is not moved",
        "statistics are not written",
    ),
)  # fmt: skip
def test_a_fault_of_the_step_itself_is_found(name: str, monkeypatch: pytest.MonkeyPatch):
    plant, make, words = FAULTS[name]
    plant(monkeypatch)
    report = verify(*make())
    assert report.first is not None
    assert report.first.is_whole
    text = f"{report.first.kind} {report.first.leaf}: {report.first.likely}"
    assert re.match(words, text), text


# ---------------------------------------------------------------------- what the plain step cannot see as it is


def summed(model: Any, batch: Any) -> Any:
    return ((model(batch["x"]) - batch["y"]) ** 2).sum()


def test_a_loss_that_is_no_mean_differs_unless_the_trainer_has_said_so(monkeypatch: pytest.MonkeyPatch):
    def report(is_told: bool) -> Report:
        monkeypatch.setattr(StepBuilderCache, "has_warned_of_microbatches", is_told)
        options: dict[str, Any] = {"num_stages": 2, "num_microbatches": 2, "mesh": {}, "logging": False}
        return verify(PipelineTrainer(OnlyBlocks(), optax.sgd(0.1), summed, **options), m.make_xy(8))

    wrong, told = report(False), report(True)
    assert wrong.first is not None
    assert "is not the mean over its microbatches" in wrong.first.likely
    assert told.agrees
    assert "not those of the whole batch at once" in str(told)


def test_a_loss_that_takes_microbatches_alone_is_compared_with_these():
    def loss_fn(model: Any, batch: Any) -> Any:
        return m.squared_error(model, batch) * jnp.mean(batch["x"].reshape(4, 4) ** 0)

    options: dict[str, Any] = {"num_stages": 2, "num_microbatches": 2, "mesh": {}, "logging": False}
    report = verify(PipelineTrainer(OnlyBlocks(), optax.sgd(0.1), loss_fn, **options), m.make_xy(8))
    assert report.agrees, report
    assert report.facts["reference"] == ONE_BY_ONE
    assert "does not take the whole batch at once: the loss of the plain step failed with TypeErr" in report.notes[0]


def fail(*_: Any) -> None:
    raise RuntimeError("no such thing here")


@pytest.mark.parametrize(
    ("place", "name", "part"),
    [(PlainUpdate, "apply", "the update"), (PlainStep, "_call", "the loss")],
    ids=["update", "loss"],
)
def test_a_plain_step_that_cannot_run_is_told(place: type, name: str, part: str, monkeypatch: pytest.MonkeyPatch):
    """Nobody knows then whether the step is right, so the report does not agree."""
    monkeypatch.setattr(place, name, fail)
    trainer, batch = small_trainer()
    report = verify(trainer, batch)
    assert not report.agrees
    assert report.first is None
    assert report.facts["reference"] == ""
    assert str(report).startswith(
        f"The blocks agree, but the whole step was not compared: {part} of the plain step failed with RuntimeError: "
        "no such thing here. So a fault of the step itself would not be seen.\n"
    )
    assert not report.notes


@pytest.mark.parametrize("fits", [True, False], ids=["on all devices", "on none"])
def test_a_state_that_is_too_large_for_one_device(fits: bool, monkeypatch: pytest.MonkeyPatch):
    def shortage(needed: dict[Any, int]) -> Any:
        return None if fits and len(needed) > 1 else "too small"

    monkeypatch.setattr(whole_step, "shortage", shortage)
    trainer, batch = small_trainer(mesh={"data": 2})
    report = verify(trainer, batch)
    assert report.agrees == fits, report
    assert bool(report.facts["reference"]) == fits
    assert ("lacks the memory" in str(report)) != fits


# ---------------------------------------------------------------------- copies of one array


@contextmanager
def other_copy(trainer: PipelineTrainer, batch: Any, change: Callable[[str, MpmdArray], MpmdArray]) -> Iterator[None]:
    """The compiled step returns other copies of the parameters."""
    compiled, compile_step = trainer.compile(batch), type(trainer).compile

    def step(state: Any, microbatches: Any) -> Any:
        new, metrics = compiled(state, microbatches)
        leaves, structure = flatten(new)
        return jax.tree.unflatten(structure, [change(path, leaf) for path, leaf in leaves.items()]), metrics

    step.stages = compiled.stages  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(trainer), "compile", lambda self, batch: compile_step(self, batch) and step)
        yield


def moved_on_second_device(path: str, leaf: MpmdArray) -> MpmdArray:
    if path != "params/blocks/1/kernel":
        return leaf
    ((rank, array),) = leaf._partially_addressable_arrays.items()
    parts = [np.array(shard.data) * (1 + 0.01 * i) for i, shard in enumerate(array.addressable_shards)]
    placed = [jax.device_put(part, shard.device) for part, shard in zip(parts, array.addressable_shards, strict=True)]
    return MpmdArray(
        {rank: jax.make_array_from_single_device_arrays(array.shape, array.sharding, placed)}, leaf.sharding
    )


def test_parameters_that_differ_on_the_second_device_of_a_rank():
    trainer, batch = small_trainer(mesh={"data": 2})
    with other_copy(trainer, batch, moved_on_second_device):
        first = verify(trainer, batch).first
    assert first is not None
    assert (first.kind, first.leaf) == ("state", "params/blocks/1/kernel")
    assert re.match(r"copies of one array that differ: after the step, the copy on device .* of rank 1", first.likely)


def test_a_stale_copy_of_a_tied_weight():
    trainer = PipelineTrainer(
        Tied(), optax.sgd(0.1), m.mean_loss, num_stages=2, num_microbatches=2, mesh={}, logging=False
    )
    before = np.asarray(trainer.state.params["embed"]["embedding"])

    def stale(path: str, leaf: MpmdArray) -> MpmdArray:
        parts = dict(leaf._partially_addressable_arrays) if isinstance(leaf, MpmdArray) else {}
        if path == "params/embed/embedding":
            parts[1] = jax.device_put(before, parts[1].sharding)
            return MpmdArray(parts, leaf.sharding)
        return leaf

    with other_copy(trainer, BATCH, stale):
        first = verify(trainer, BATCH).first
    assert first is not None
    assert (first.kind, first.leaf) == ("state", "params/embed/embedding")
    assert re.search(r"the copy on device .* of rank 1 is another one than that on device .* of rank 0", first.likely)
