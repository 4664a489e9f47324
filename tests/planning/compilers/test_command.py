"""The command compiles the layout that is given, or the best of the quote; here for the devices of the CPU."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxpp_flax.engine.runtime import task_compiler
from jaxpp_flax.planning.__main__ import main
from jaxpp_flax.planning.compilers import command

PROGRAM = """
import jax, jax.numpy as jnp, optax
from flax import nnx
from jaxpp_flax import PipelineStage, PipelineTrainer

def make(layers=4, **options):
    def model(rngs):
        return nnx.Sequential(*[PipelineStage(nnx.Linear(32, 32, rngs=rngs), name=f"layer_{i}") for i in range(layers)])
    loss = lambda model, x: jnp.mean(model(x) ** 2)
    trainer = PipelineTrainer(model, optax.adam(0.1), loss, logging=False, **options)
    return trainer, jax.ShapeDtypeStruct((64, 32), jnp.float32)

def fixed(**options):
    return make(num_stages=2, **options)
"""


@pytest.fixture
def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A user's file; `cpu:8` names the eight devices of the tests."""

    def mesh(topology: str, axes: Mapping[str, int]) -> Mesh:
        return Mesh(np.array(jax.devices()[:8]).reshape(tuple(axes.values())), tuple(axes))

    monkeypatch.setattr(command, "described_devices", lambda topology: jax.devices()[:8])
    monkeypatch.setattr(command, "described_mesh", mesh)
    file = tmp_path / "train.py"
    file.write_text(PROGRAM)
    return f"{file}:make"


def run(factory: str, *options: str) -> int:
    return main(["quote", factory, "--compile", "cpu:8", *options])


def test_the_layout_that_is_given(factory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "report.json"
    assert run(factory, "--axes", "stage=4,data=2", "--memory", "1GB", "--json", str(file)) == 0
    out = capsys.readouterr().out
    assert "8 x cpu: stage 4, data 2" in out
    assert "It fits: rank" in out
    read = json.loads(file.read_text())
    assert read["fits"] is True
    # 64 examples over data=2: 16 microbatches, four for each stage.
    assert next(task["runs"] for task in read["tasks"] if "fwd_0" in task["names"]) == 16
    assert run(factory, "--axes", "stage=4,data=2", "--microbatches", "4", "--memory", "1KB") == 1
    assert "It does not fit: rank" in capsys.readouterr().out


def test_the_best_of_the_quote(factory: str, capsys: pytest.CaptureFixture[str]):
    assert run(factory, "--best", "2", "--hardware", "h100-sxm") == 0
    out = capsys.readouterr().out
    assert out.count("It fits: rank") == out.count("The quote had") == 2
    assert "of the 80 GB of a cpu" in out


def test_a_plan_has_the_bytes_of_the_compiler(factory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    plan, report = tmp_path / "plan.json", tmp_path / "report.json"
    options = ("--hardware", "h100-sxm", "--memory", "1GB", "--best", "1", "--save", str(plan), "--json", str(report))
    assert run(factory, *options) == 0
    assert f"wrote {plan}" in capsys.readouterr().out
    ranks = [sum(rank["kinds"].values()) for rank in json.loads(report.read_text())["ranks"]]
    assert json.loads(plan.read_text())["peak_bytes"] == ranks
    assert run(factory, "--axes", "stage=8", "--save", str(plan)) == 2  # of which there is no plan
    assert "--save writes the plan of a quote's layout" in capsys.readouterr().err


def test_a_compiler_that_refuses_is_the_answer_no(
    factory: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def refuse(*_: Any) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory. Used 18.00G of 15.75G hbm.")

    monkeypatch.setattr(task_compiler, "compile_original", refuse)
    assert run(factory, "--axes", "stage=2,data=4") == 1
    assert "It does not fit: rank 0: the compiler refuses task" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ((), "--compile needs either --axes, such as stage=8,data=2,tensor=4, for one layout, or --best 3"),
        (("--axes", "stage=8", "--best", "2"), "--compile needs either --axes"),
        (("--axes", "data=8"), "the axis of the ranks is missing. Write stage=1"),
        (("--axes", "stage=2,data"), "'data' is no axis; write a name and a size once, such as data=2"),
        (("--axes", "stage=2,data=0"), "'data=0' is no axis"),
        (("--axes", "stage=2,stage=4"), "'stage=4' is no axis"),
        (("--best", "0"), "--best"),
        (("--best", "2"), "no table has a cpu. Name a row for its speeds by --hardware"),
        (("--axes", "stage=8"), "num_stages=8 needs at least 7 marks, but the function has 4"),
        (("--axes", "stage=2,data=4", "--schedule", "1f1c"), "1f1c"),
        (("--axes", "stage=8", "--depth", "layers"), "--depth: not with --axes"),
        (("--best", "2", "--stages", "4", "--schedule", "gpipe"), "--stages, --schedule: for --axes alone"),
        (("--best", "2", "--devices", "8", "--measure"), "--devices, --measure: not with --compile"),
        (("--best", "2", "--price", "2", "--top", "3", "--explain", "PP=2"), "--price, --top, --explain: not with"),
    ],
)
def test_what_does_not_fit_is_one_line(
    factory: str, options: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
):
    assert run(factory, *options) == 2
    assert text in capsys.readouterr().err


def test_a_factory_that_chooses_the_stages_itself(factory: str, capsys: pytest.CaptureFixture[str]):
    assert run(factory.replace(":make", ":fixed"), "--axes", "stage=2,data=4") == 2
    assert "the factory does not take the options of a trainer alone" in capsys.readouterr().err


def test_neither_a_quote_nor_a_compilation(factory: str, capsys: pytest.CaptureFixture[str]):
    assert main(["quote", factory]) == 2
    assert "a quote needs --hardware and --devices, such as" in capsys.readouterr().err


def test_a_quote_takes_no_options_of_a_compilation(factory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    given = ["--axes", "stage=2", "--best", "0", "--stages", "2", "--microbatches", "2", "--schedule", "1f1b", "--json"]
    quoted = ["quote", factory, "--hardware", "h100-sxm", "--devices", "8"]
    assert main([*quoted, *given, str(tmp_path / "report.json")]) == 2
    said = "--axes, --best, --stages, --microbatches, --schedule, --json: for --compile alone"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("examples", "shards", "stages", "count"), [(512, 2, 8, 32), (64, 2, 1, 4), (6, 2, 4, 3), (7, 8, 4, 1)]
)
def test_microbatches_by_default(examples: int, shards: int, stages: int, count: int):
    assert command._microbatches(examples, shards, stages) == count
