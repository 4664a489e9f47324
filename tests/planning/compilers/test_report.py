"""A report adds up: the bytes of each rank by kind, the distinct tasks, the step; here with XLA's compiler for CPU."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh

from jaxpp_flax import PipelineStage, PipelineTrainer
from jaxpp_flax.engine.pipeline import CompiledPipeline
from jaxpp_flax.planning import CompilerReport, compiler_report, device_named
from jaxpp_flax.planning.compilers import report as reports
from jaxpp_flax.planning.compilers.tasks import TaskText, read_task

WIDTH, LAYERS, BATCH = 32, 4, 64
LAYER = 4 * (WIDTH * WIDTH + WIDTH)  # the bytes of a layer's parameters


@cache
def compiled(stages: int, data: int) -> CompiledPipeline:
    def model(rngs: nnx.Rngs) -> nnx.Sequential:
        return nnx.Sequential(*[PipelineStage(nnx.Linear(WIDTH, WIDTH, rngs=rngs)) for _ in range(LAYERS)])

    mesh = Mesh(np.array(jax.devices()[: stages * data]).reshape(stages, data), ("stage", "data"))
    trainer = PipelineTrainer(
        model, optax.adam(1e-3), lambda model, x: jnp.mean(jnp.tanh(model(x)) ** 2), num_stages=stages,
        num_microbatches=8, mesh=mesh, logging=False,
    )  # fmt: skip
    return trainer.compile(jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32))


def report_of(stages: int = 4, data: int = 2, **options) -> CompilerReport:
    return compiler_report(compiled(stages, data), **options)


def test_the_bytes_of_a_rank_by_kind():
    found = report_of()
    microbatch = BATCH // 8 // 2 * WIDTH * 4  # on a device
    for rank in found.ranks:
        kinds = rank.kinds
        assert kinds["parameters"] == LAYER
        assert LAYER <= kinds["accumulators"] <= LAYER + 8  # gradients, and the sums of the loss
        assert kinds["optimizer state"] in (2 * LAYER, 2 * LAYER + 4)  # adam counts its steps
        assert kinds["workspace"] >= 0
        assert rank.total == sum(kinds.values())
    # 1F1B holds as many inputs of a stage as there are ranks from it on; the input of the first is the batch.
    held = [rank.kinds.get("residuals", 0) // microbatch for rank in found.ranks]
    assert held[1] >= 3 > held[3]
    assert found.ranks[0].kinds["batch"] == 8 * microbatch


def test_the_walk_is_that_of_memory_analysis():
    step = compiled(4, 2)
    for rank, analysis in zip(report_of().ranks, step.memory_analysis(), strict=True):
        arguments = sum(rank.kinds.get(kind, 0) for kind in ("parameters", "optimizer state", "batch", "between tasks"))
        assert arguments >= analysis.argument_bytes - 8  # small numbers between tasks may be given away
        # What is held between tasks, and the workspace of the task that runs: never more than both peaks.
        assert rank.total <= analysis.held_bytes + analysis.temp_bytes + 2 * LAYER


def test_equal_stages_are_one_task():
    found = report_of()
    names = [task.names for task in found.tasks]
    assert ("fwd_1", "fwd_2") in names
    middle = next(task for task in found.tasks if task.names == ("fwd_1", "fwd_2"))
    assert (middle.ranks, middle.runs) == ((1, 2), 16)
    assert middle.operations > 0
    assert middle.compile_seconds is not None
    assert sum(task.runs for task in found.tasks if "fwd_1" in task.names or "bwd_1" in task.names) == 32


def test_gradients_are_summed_over_data_once_a_step():
    reductions = [(task, of) for task in report_of().tasks for of in task.exchanges if of.kind == "all-reduce"]
    assert all(of.axes == ("data",) for _, of in reductions)
    weights = [task for task, of in reductions if of.nbytes >= LAYER]
    assert weights
    assert all(task.runs <= 4 for task in weights)  # once for each rank, not for each microbatch


def test_the_answer_and_the_file(tmp_path):
    found = report_of()
    assert (found.fits, found.excess) == (None, None)
    assert "the memory of a cpu is not known" in str(found)
    full = found.fullest.total
    fits, too_large = replace(found, memory=full), replace(found, memory=full - 1)
    assert (fits.fits, too_large.fits, too_large.excess) == (True, False, 1)
    assert f"It does not fit: rank {found.fullest.rank} holds" in str(too_large)
    assert str(fits).startswith("8 x cpu: stage 4, data 2\n")
    read = json.loads(too_large.save(tmp_path / "report.json").read_text())
    assert (read["fits"], read["excess"]) == (False, 1)
    assert read["ranks"][1]["kinds"]["parameters"] == LAYER
    assert sum(task["runs"] for task in read["tasks"]) == sum(task.runs for task in found.tasks)


def test_the_step_is_simulated_from_the_seconds_of_tasks(monkeypatch: pytest.MonkeyPatch):
    """Tasks of the loop take a second each, others none: the time of 1F1B follows."""

    def read(executable) -> TaskText:
        text = executable.as_text().partition("\n")[0]
        return replace(read_task(executable), seconds=1.0 if "fwd" in text or "bwd" in text else 0.0)

    monkeypatch.setattr(reports, "read_task", read)
    found = report_of(4, 1)
    # Rank 2 has 8 forwards and 8 backwards, and 2 ranks before it and behind it; the last rank fuses both.
    assert found.seconds == 2 + 16 + 2
    assert found.idle == pytest.approx(1 - (3 * 16 + 8) / (4 * 20))
    slow = replace(device_named("h100-sxm"), inside=1.0)  # a byte a second
    with_links = report_of(4, 1, device=slow)
    assert with_links.seconds is not None
    assert with_links.seconds > 100 * found.seconds
    assert "A step takes" in str(found)


@pytest.mark.parametrize(
    ("costs", "seconds"),
    [
        ({"optimal_seconds": 0.25}, 0.25),
        ([{"optimal_seconds": 0.25}], 0.25),
        ({"optimal_seconds": -23.75}, 0.25),  # 24 operations that the model does not know count as -1
        ({"flops": 8.0}, None),
        ({}, None),
        (None, None),
    ],
)
def test_the_seconds_of_a_cost_model(costs, seconds):
    executable = SimpleNamespace(as_text=lambda: "", memory_analysis=lambda: None, cost_analysis=lambda: costs)
    found = read_task(executable).seconds
    assert found == seconds or math.isclose(found or 0.0, seconds)


def test_a_step_without_ranks_is_refused():
    with pytest.raises(
        TypeError, match=r"needs the compiled step of a pipeline, got Compiled\. One stage on one device"
    ):
        compiler_report(jax.jit(jnp.tanh).lower(jnp.ones(2)).compile())  # pyright: ignore[reportArgumentType]
