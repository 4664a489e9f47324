"""The complete training script: its data, its losses beside plain Flax, and a run that Ctrl-C stops."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.pretrained import load_pretrained
from tests.examples.running import load_example, run_example
from tests.running import PATIENCE, ROOT, wait_for

SCRIPT = "recipes/complete_training.py"


def test_windows_go_on_where_their_state_was_taken(tmp_path: Path):
    recipe = load_example(SCRIPT)
    np.arange(1000, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    first, again = recipe.Windows(tmp_path / "tokens.bin"), recipe.Windows(tmp_path / "tokens.bin")
    drawn = [next(first)["tokens"] for _ in range(2)]
    state = first.get_state()
    later = next(first)
    again.set_state(state)
    np.testing.assert_array_equal(next(again)["tokens"], later["tokens"])
    assert not np.array_equal(drawn[0], drawn[1])
    np.testing.assert_array_equal(later["targets"], later["tokens"] + 1)


@pytest.mark.slow
def test_tokens_of_a_user_are_not_written_over(tmp_path: Path):
    (tmp_path / "train.bin").write_bytes(bytes(400))
    with pytest.raises(AssertionError, match=r"No such file or directory: .*held_out\.bin"):
        run_example(SCRIPT, "--run", str(tmp_path), "--steps", "10")
    assert (tmp_path / "train.bin").read_bytes() == bytes(400)


def test_losses_are_those_of_plain_flax(tmp_path: Path):
    recipe, tx = load_example(SCRIPT), optax.adamw(3e-3)
    recipe.write_tokens(tmp_path)
    windows = recipe.Windows(tmp_path / "train.bin")
    batches = [next(windows) for _ in range(4)]
    trainer = PipelineTrainer(
        recipe.GPT(rngs=nnx.Rngs(0)), tx, recipe.loss_fn, num_stages=4, num_microbatches=4, mesh={}, logging=False
    )
    model = recipe.GPT(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model: nnx.Module, optimizer: nnx.Optimizer, batch: dict[str, jax.Array]) -> jax.Array:
        loss, gradients = nnx.value_and_grad(recipe.loss_fn)(model, batch)
        optimizer.update(model, gradients)
        return loss

    expected = [float(step(model, optimizer, batch)) for batch in batches]
    assert expected[-1] < expected[0]
    np.testing.assert_allclose([float(trainer.train_step(b)["loss"]) for b in batches], expected, rtol=1e-5)


def losses(run: Path) -> dict[int, float]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


@pytest.mark.slow
def test_a_run_that_ctrl_c_stops_goes_on_as_if_nothing_had_happened(tmp_path: Path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run_example(SCRIPT, "--run", str(whole), "--steps", "60")
    command = [sys.executable, str(ROOT / "examples" / SCRIPT), "--run", str(cut), "--steps", "60"]
    # A signal that this process ignores, its children ignore too: in a background shell that is Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("XLA_FLAGS", None)
    with (tmp_path / "log").open("w") as log:
        stopped = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        wait_for(lambda: "step 20/60" in (tmp_path / "log").read_text(), "step 20")
        stopped.send_signal(signal.SIGINT)
        assert stopped.wait(PATIENCE) != 0, "Ctrl-C is no success"
    finally:
        stopped.kill()
        signal.signal(signal.SIGINT, before)
    assert not (cut / "model").exists()
    output = run_example(SCRIPT, "--run", str(cut), "--steps", "60")
    assert "the weights of step" in output.splitlines()[-1]
    # To the bit; the run that stopped has rows of its last and its first step, too.
    assert losses(whole).items() <= losses(cut).items()
    recipe = load_example(SCRIPT)
    target = nnx.state(nnx.eval_shape(lambda: recipe.GPT(rngs=nnx.Rngs(0))), nnx.Param)
    exported = [load_pretrained(run / "model", target) for run in (whole, cut)]
    for one, other in zip(*map(jax.tree.leaves, exported), strict=True):
        np.testing.assert_array_equal(one, other)
