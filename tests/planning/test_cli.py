"""The command line makes a plan, and writes it."""

from __future__ import annotations

import pytest

from jaxpp_flax.planning import Plan
from jaxpp_flax.planning.__main__ import main, parser

PROGRAM = """
import jax, jax.numpy as jnp, optax
from flax import nnx
from jaxpp_flax import PipelineStage, PipelineTrainer

def make():
    layers = [PipelineStage(nnx.Linear(8, 8, rngs=nnx.Rngs(i)), name=f"layer_{i}") for i in range(4)]
    trainer = PipelineTrainer(
        nnx.Sequential(*layers), optax.sgd(0.1), lambda model, x: jnp.mean(model(x) ** 2), num_stages=2,
        num_microbatches=4, mesh={}, logging=False,
    )
    return trainer, jax.ShapeDtypeStruct((8, 8), jnp.float32)

def wrong():
    return None
"""


def test_plan(tmp_path, capsys):
    file, saved = tmp_path / "train.py", tmp_path / "plan.json"
    file.write_text(PROGRAM)
    options = ["--memory-limit", "1GB", "--schedules", "1f1b", "gpipe", "--save", str(saved)]
    assert main(["choose", f"{file}:make", *options]) == 0
    assert "the best of 2 schedules" in capsys.readouterr().out.replace("\n", " ")
    found = Plan.load(saved)
    assert (found.stage_sizes, found.num_microbatches, found.layout) == ((2, 3), 4, {"stage": 2})
    for factory, text in (
        (f"{file}:wrong", "must return a trainer and a batch, got NoneType"),
        (f"{file}:mak", "has no function 'mak'. Did you mean 'make'"),
        (str(file), "write a Python file and a function in it"),
    ):
        assert main(["choose", factory]) == 2
        assert text in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["choose", f"{file}:make", "--memory-limit", "80GX"])
    assert "'80GX' is not a number of bytes; write it as 40e9 or 40GB" in capsys.readouterr().err
    assert main(["choose", f"{file}:make", "--memory-limit", "1KB"]) == 1
    assert "may hold 1,000" in capsys.readouterr().err


def test_every_flag_is_explained():
    (commands,) = (action for action in parser()._actions if action.choices)
    for action in (action for each in commands.choices.values() for action in each._actions):
        assert action.help, action.option_strings or action.dest
