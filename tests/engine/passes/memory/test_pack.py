"""Steps whose small values are packed: the same bits as unpacked, with few arrays for each task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.engine.compiled import Compiled
from jaxpp_flax.engine.jit import mpmd_jit_with_loop
from jaxpp_flax.engine.passes.memory.pack import pack_bytes
from jaxpp_flax.engine.program.program import ProgramTask
from jaxpp_flax.engine.tracing.markers import mark_stage_end
from jaxpp_flax.schedules import GPipe, Interleaved1F1B, Schedule, Std1F1B, ZeroBubble
from tests.engine.toys import mesh_of, sgd_step
from tests.helpers import DIM, batch_of, tree_allclose

VARIABLE = "JAXPP_FLAX_PACK_BYTES"
SCHEDULES = [Std1F1B(4), GPipe(4), ZeroBubble(4), Interleaved1F1B(4, 2)]
LEAVES = 6  # of a stage, and one that is too large


def params_of(num_stages: int) -> list[dict[str, jax.Array]]:
    """Many vectors and two matrices for each stage; one matrix is above the limit of the tests."""
    rng = np.random.default_rng(0)
    shapes = {"w": (DIM, DIM), "large": (DIM, 4 * DIM)} | dict.fromkeys("abcde", (DIM,))
    return [
        {name: jnp.asarray(rng.normal(size=shape) / 3, jnp.float32) for name, shape in shapes.items()}
        for _ in range(num_stages)
    ]


def loss(params: Sequence[dict[str, jax.Array]], batch: dict[str, jax.Array]) -> jax.Array:
    """Elementwise work that leaves many residuals, some of them booleans."""
    x = batch["x"]
    for i, p in enumerate(params):
        if i:
            x = mark_stage_end(x, f"stage_{i - 1}")
        x = jnp.tanh(x @ p["w"] * p["a"] + p["b"]) * p["c"]
        x = jnp.sin(x) * jnp.where(x > 0, x, 0) * p["d"] + p["e"]
        x = jnp.tanh(x @ p["large"])[:, :DIM]
    return jnp.mean((x - batch["y"]) ** 2)


def run(schedule: Schedule, mesh: MpmdMesh | None = None) -> tuple[Any, Compiled]:
    """Two steps, and the compiled step."""
    batch, params = batch_of(6), params_of(schedule.num_stages)
    step = mpmd_jit_with_loop(sgd_step(schedule, loss), mesh or mesh_of(schedule.num_ranks), donate_argnums=0)
    params, *_ = step(params, batch)
    results = step(params, batch)
    return jax.tree.map(np.asarray, results), step.compile(results[0], batch)


def loop_tasks(compiled: Compiled) -> list[ProgramTask]:
    return [task for task in compiled.program.tasks if task.stage is not None]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: type(s).__name__)
def test_packed_values_are_the_same_bits_in_fewer_arrays(schedule: Schedule, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    expected, before = run(schedule)
    monkeypatch.setenv(VARIABLE, "1023")  # "large" has 1024 bytes
    monkeypatch.setenv("JAXPP_FLAX_VERIFY", "1")
    actual, after = run(schedule)
    tree_allclose(actual, expected, rtol=0, atol=0)
    for task, packed in zip(loop_tasks(before), loop_tasks(after), strict=True):
        assert task.name == packed.name  # profilers and errors name tasks as before
        gone = len(task.graph.inputs) + len(task.graph.outputs) - len(packed.graph.inputs) - len(packed.graph.outputs)
        assert gone >= LEAVES - 1
    large = [v for task in loop_tasks(after) for v in task.graph.inputs if v.aval.shape == (DIM, 4 * DIM)]
    assert large  # what is above the limit stays as it is


def test_packed_steps_agree_with_plain_jax(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, "1023")
    actual, _ = run(Std1F1B(3))
    plain, batch = jax.jit(sgd_step(None, loss)), batch_of(6)
    params, *_ = plain(params_of(3), batch)
    tree_allclose(actual, jax.tree.map(np.asarray, plain(params, batch)))


def test_a_packed_step_holds_no_more_than_a_second_copy_of_small_parameters(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    _, before = run(Std1F1B(4))
    monkeypatch.setenv(VARIABLE, "1023")
    _, after = run(Std1F1B(4))
    copies = (DIM * DIM + 5 * DIM) * 4
    for packed, unpacked in zip(after.memory_analysis(), before.memory_analysis(), strict=True):
        assert packed.peak_bytes <= unpacked.peak_bytes + copies


def test_nothing_is_packed_where_a_rank_has_several_devices(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, "1023")
    assert pack_bytes({"data": 1, "tensor": 1}) == 1023
    assert pack_bytes({"data": 2, "tensor": 1}) == 0
    mesh = MpmdMesh(Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("stage", "data")), "stage")
    _, compiled = run(Std1F1B(2), mesh)
    assert all(len(task.graph.inputs) > LEAVES for task in loop_tasks(compiled))


def test_a_limit_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, "16KiB")
    with pytest.raises(ValueError, match=r"JAXPP_FLAX_PACK_BYTES is '16KiB', which is not a number of bytes. Set it"):
        run(Std1F1B(2))
