"""A task that contains the task of another stage runs it, beside a small one for the rest; results and times stay."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp_flax.engine.jit import mpmd_jit_with_loop
from jaxpp_flax.engine.program.program import Run
from jaxpp_flax.engine.runtime.measuring.profile import collect_task_times_ms
from jaxpp_flax.engine.tracing.fingerprint import Fingerprinter
from jaxpp_flax.engine.tracing.markers import mark_stage_end
from jaxpp_flax.schedules import GPipe, Std1F1B, ZeroBubble
from jaxpp_flax.schedules.residuals import KEEP, ResidualPlan
from tests.engine.toys import chain, gradients, mesh_of
from tests.helpers import DIM, batch_of, tree_allclose

share_tasks = import_module("jaxpp_flax.engine.passes.sharing.share_tasks")  # the package has the function's name
RANKS, MICROBATCHES = 3, 2


@pytest.fixture(autouse=True)
def even_small_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share_tasks, "_FEWEST_EQUATIONS", 2)
    monkeypatch.setattr(share_tasks, "_FEWEST_IN_LOOPS", 2)


def model() -> list[dict[str, jax.Array]]:
    """Equal layers; the first stage also embeds, and the last one has a head."""
    params = chain(RANKS)
    params[0]["embed"] = params[-1]["head"] = jnp.eye(DIM)
    return params


def loss(params: Any, batch: Any) -> jax.Array:
    x = batch["x"] @ params[0]["embed"]
    for i, p in enumerate(params):
        x = jnp.tanh((mark_stage_end(x) if i else x) @ p["w"] + p["b"])
    return jnp.mean((x @ params[-1]["head"] - batch["y"]) ** 2)


def pipelined(schedule: Any) -> Any:
    return mpmd_jit_with_loop(gradients(schedule, loss), mesh_of(RANKS))


def distinct(compiled: Any, kind: str) -> list[list[int]]:
    """For each stage, the programs that run for its tasks of a kind, as keys in order."""
    keys, found = Fingerprinter(), dict[int, list[int]]()
    for task in compiled.program.tasks:
        if task.name.startswith(kind):
            found.setdefault(task.rank, []).append(keys.graph(task.graph))
    return [found[rank] for rank in sorted(found)]


@pytest.mark.parametrize("schedule", [Std1F1B, GPipe, ZeroBubble])
def test_all_stages_run_the_middle_ones_task(schedule: Any):
    step = pipelined(schedule(RANKS))
    arguments = model(), batch_of(MICROBATCHES)
    compiled = step.compile(*arguments)
    compiled.program.verify()
    first, (middle,), *last = distinct(compiled, "fwd")
    assert middle in first
    assert len(first) == 2
    assert all(middle in found for found in last)
    assert all(len(found) == (3 if schedule is Std1F1B else 2) for found in last)
    tree_allclose(jax.tree.map(np.asarray, step(*arguments)), jax.jit(gradients(None, loss))(*arguments))
    of_ranks = compiled.memory_analysis()
    assert all(analysis.live_microbatches[analysis.rank] <= MICROBATCHES for analysis in of_ranks)


def test_a_fused_task_is_made_of_the_middle_stages_tasks():
    compiled = pipelined(Std1F1B(RANKS)).compile(model(), batch_of(MICROBATCHES))
    keys, found = Fingerprinter(), dict[str, list[int]]()
    for task in compiled.program.tasks:
        found.setdefault(task.name, []).append(keys.graph(task.graph))
    forward, head, backward = found["fwd_bwd_2"]
    assert ([forward], [backward]) == (found["fwd_1"], found["bwd_1"])
    assert [head] not in found.values()


def test_a_fused_task_stays_whole_under_a_plan_for_residuals():
    residuals = ResidualPlan([KEEP] * RANKS)
    step = mpmd_jit_with_loop(gradients(Std1F1B(RANKS), loss), mesh_of(RANKS), residuals=residuals)
    tasks = step.compile(model(), batch_of(MICROBATCHES)).program.tasks
    assert not any(task.part for task in tasks if task.fused)
    assert any(task.part for task in tasks)


def test_a_task_in_parts_has_one_time_for_each_microbatch():
    step = pipelined(GPipe(RANKS))
    arguments = model(), batch_of(MICROBATCHES)
    compiled = step.compile(*arguments)
    tasks = compiled.program.tasks
    runs = [i for i in compiled.program.instructions if isinstance(i, Run) and tasks[i.task].stage is not None]
    scheduled = RANKS * 2 * MICROBATCHES
    assert len(runs) > scheduled
    _, timings = compiled.profile(*arguments)
    assert len({t.task for t in timings}) == len(timings) == scheduled
    with collect_task_times_ms() as times:
        step(*arguments)
    assert times is not None
    assert {name: len(ms) for name, ms in times.items() if "wd" in name} == {
        f"{kind}_{stage}": MICROBATCHES for kind in ("fwd", "bwd") for stage in range(RANKS)
    }


def test_small_tasks_stay_whole(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(share_tasks, "_FEWEST_IN_LOOPS", 100)
    program = pipelined(Std1F1B(RANKS)).compile(model(), batch_of(MICROBATCHES)).program
    assert not any(task.part for task in program.tasks if task.stage is not None)
