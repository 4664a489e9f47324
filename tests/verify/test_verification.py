"""`verify`: correct programs agree, the trainer does not change, and what cannot be compared is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineStage, PipelineTrainer
from jaxpp_flax.trainers import Memory
from jaxpp_flax.trainers.errors import BatchError
from jaxpp_flax.verify import VerifyError, verify, whole_step
from jaxpp_flax.verify.__main__ import main

BATCH = {"x": np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)}
SCRIPT = """
import jax.numpy as jnp, optax
from flax import nnx
from jaxpp_flax import PipelineStage, PipelineTrainer

def make():
    model = nnx.Sequential(*[PipelineStage(nnx.Linear(4, 4, rngs=nnx.Rngs(i)), name=f"block_{i}") for i in range(2)])
    trainer = PipelineTrainer(model, optax.sgd(0.1), lambda model, x: (model(x) ** 2).mean(), num_stages=2,
                              num_microbatches=2, logging=False)
    return trainer, jnp.ones((4, 4))
"""


def square(model: Any, batch: Any) -> Any:
    return (model(batch["x"]) ** 2).mean()


def small_trainer(loss_fn: Any = square, **options: Any) -> PipelineTrainer:
    blocks = [PipelineStage(nnx.Linear(4, 4, rngs=nnx.Rngs(i)), name=f"block_{i}") for i in range(2)]
    tx, options = optax.sgd(0.1, momentum=0.9), {"num_stages": 2, "num_microbatches": 2, "logging": False, **options}
    return PipelineTrainer(nnx.Sequential(*blocks), tx, loss_fn, **options)


def state_of(trainer: PipelineTrainer) -> list[Any]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves((trainer.state.params, trainer.state.opt_state))]


def test_a_right_pipeline_agrees_and_the_trainer_does_not_change(tmp_path: Path):
    trainer, other = small_trainer(), small_trainer()
    trainer.train_step(BATCH)
    other.train_step(BATCH)
    before = state_of(trainer)
    report = verify(trainer, BATCH)
    assert report.agrees, report
    assert trainer.step == 1
    assert all(map(np.array_equal, before, state_of(trainer)))
    assert float(trainer.train_step(BATCH)["loss"]) == float(other.train_step(BATCH)["loss"])
    kinds = {row.kind for row in report.rows}
    assert kinds == {"forward", "result", "backward", "gradient", "metric", "state"}
    order = [(row.kind, row.block) for row in report.rows]
    assert order.index(("forward", "block_0")) < order.index(("forward", "block_1"))
    assert order.index(("gradient", "block_1")) < order.index(("gradient", "block_0"))
    assert str(report).startswith("The pipeline is right")
    report.save(tmp_path / "report.json")
    saved = json.loads((tmp_path / "report.json").read_text())
    assert saved["agrees"]
    assert len(saved["rows"]) == len(report.rows)
    assert saved["facts"]["microbatches"] == 2


def test_precision_and_remat_agree():
    report = verify(small_trainer(precision="bfloat16", memory=Memory(remat="full")), BATCH)
    assert report.agrees, report
    assert {"forward", "backward"} <= {row.kind for row in report.rows}


@pytest.mark.parametrize("of_activations", [False, True])
def test_a_loss_that_is_not_deterministic_is_named(of_activations: bool):
    """Before the pipeline runs, if its call of the host needs nothing of a stage before."""
    numbers = iter(range(1000))

    def loss_fn(model: Any, batch: Any) -> Any:
        x = model(batch["x"])
        result = jax.ShapeDtypeStruct(x.shape[:1], jnp.float32)
        seen = [jax.lax.stop_gradient(x)] * of_activations
        noise = jax.pure_callback(lambda *_: np.full(result.shape, next(numbers), np.float32), result, *seen)
        return ((x**2).mean(-1) * (1 + noise)).mean()

    with pytest.raises(
        VerifyError,
        match=r"two plain steps .* differ, first in .*: the step is not deterministic.* calls the host: pure_callback "
        r"at .*test_verification.py:.*loss_fn",
    ):
        verify(small_trainer(loss_fn), BATCH)
    calls = next(numbers)
    assert (calls > 2 * 2) == of_activations


def test_a_clock_that_shows_two_plain_runs_the_same_time_is_the_likely_cause():
    calls = iter(range(1000))

    def loss_fn(model: Any, batch: Any) -> Any:
        result = jax.ShapeDtypeStruct((), jnp.float32)
        return square(model, batch) * (1 + jax.pure_callback(lambda: np.float32(next(calls) // 5), result))

    report = verify(small_trainer(loss_fn), BATCH)
    assert "Likely: pure_callback at " in report.sentence
    assert "varies from run to run; or " in report.sentence


def test_a_state_that_is_not_finite_is_named():
    trainer = small_trainer()
    trainer.set_weights(jax.tree.map(lambda x: x * np.nan, trainer.state.params))
    with pytest.raises(VerifyError, match=r"before the step is not finite: params/.* has a NaN"):
        verify(trainer, BATCH)


def test_a_batch_that_does_not_divide():
    with pytest.raises(BatchError):
        verify(small_trainer(), {"x": BATCH["x"][:7]})


def test_the_command_prints_and_writes_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    script, report = tmp_path / "script.py", tmp_path / "report.json"
    script.write_text(SCRIPT)
    assert main([f"{script}:make", "--report", str(report)]) == 0
    assert "The pipeline is right" in capsys.readouterr().out
    assert json.loads(report.read_text())["agrees"]
    with pytest.raises(SystemExit):
        main([f"{script}:other"])
    assert "has no function 'other'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["nowhere.py:make"])
    assert "no such file" in capsys.readouterr().err


def test_the_command_fails_if_the_whole_step_was_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(whole_step, "shortage", lambda needed: "too small")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    assert main([f"{script}:make"]) == 1
    assert "The blocks agree, but the whole step was not compared: this process lacks" in capsys.readouterr().out
