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
from jaxpp_flax.engine.passes.memory import pack
from jaxpp_flax.engine.passes.memory.pack import PackRule, check_pack_bytes
from jaxpp_flax.engine.program.program import ProgramTask
from jaxpp_flax.engine.tracing.markers import mark_stage_end
from jaxpp_flax.engine.tracing.treduce import treduce
from jaxpp_flax.schedules import (
    GPipe,
    Interleaved1F1B,
    ResidualPlan,
    Schedule,
    StageResiduals,
    Std1F1B,
    ZeroBubble,
)
from tests.engine.toys import mesh_of, sgd_step
from tests.helpers import DIM, batch_of, tree_allclose

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


def run(schedule: Schedule, mesh: MpmdMesh | None = None, **options: Any) -> tuple[Any, Compiled]:
    """Two steps, and the compiled step."""
    batch, params = batch_of(6), params_of(schedule.num_stages)
    mesh = mesh or mesh_of(schedule.num_ranks)
    step = mpmd_jit_with_loop(sgd_step(schedule, loss), mesh, donate_argnums=0, **options)
    params, *_ = step(params, batch)
    results = step(params, batch)
    return jax.tree.map(np.asarray, results), step.compile(results[0], batch)


def loop_tasks(compiled: Compiled) -> list[ProgramTask]:
    return [task for task in compiled.program.tasks if task.stage is not None]


def arrays(task: ProgramTask) -> int:
    return len(task.graph.inputs) + len(task.graph.outputs)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: type(s).__name__)
def test_packed_values_are_the_same_bits_in_fewer_arrays(schedule: Schedule, monkeypatch: pytest.MonkeyPatch):
    expected, before = run(schedule)
    monkeypatch.setenv("JAXPP_FLAX_VERIFY", "1")
    actual, after = run(schedule, pack_bytes=1023)  # "large" has 1024 bytes
    tree_allclose(actual, expected, rtol=0, atol=0)
    for task, packed in zip(loop_tasks(before), loop_tasks(after), strict=True):
        assert task.name == packed.name  # profilers and errors name tasks as before
        assert arrays(task) - arrays(packed) >= LEAVES - 1
    large = [v for task in loop_tasks(after) for v in task.graph.inputs if v.aval.shape == (DIM, 4 * DIM)]
    assert large  # what is above the limit stays as it is


def test_packed_steps_agree_with_plain_jax():
    actual, _ = run(Std1F1B(3), pack_bytes=1023)
    plain, batch = jax.jit(sgd_step(None, loss)), batch_of(6)
    params, *_ = plain(params_of(3), batch)
    tree_allclose(actual, jax.tree.map(np.asarray, plain(params, batch)))


def test_a_packed_step_holds_no_more_than_a_second_copy_of_parameters_outside_products():
    _, before = run(Std1F1B(4))
    _, after = run(Std1F1B(4), pack_bytes=1023)
    copies = 5 * DIM * 4
    for packed, unpacked in zip(after.memory_analysis(), before.memory_analysis(), strict=True):
        assert packed.peak_bytes <= unpacked.peak_bytes + copies


def test_copies_of_parameters_have_a_limit(monkeypatch: pytest.MonkeyPatch):
    def parameters(compiled: Compiled) -> set[int]:
        return {sum(v.aval.shape == (DIM,) for v in task.graph.inputs) for task in loop_tasks(compiled)}

    _, packed = run(Std1F1B(2), pack_bytes=1023)
    monkeypatch.setattr(pack, "_COPIES", 5 * DIM * 4 - 1)
    _, limited = run(Std1F1B(2), pack_bytes=1023)
    assert parameters(packed) == {0}
    assert parameters(limited) >= {5}


def test_updates_read_packed_gradients():
    def step(params: Any, batch: Any) -> Any:
        return sgd_step(Std1F1B(4), loss)(params, batch)[0]

    batch, params = batch_of(6), params_of(4)
    single, packed = (mpmd_jit_with_loop(step, mesh_of(4), pack_bytes=n).compile(params, batch) for n in (0, 1023))
    outer = [task for task in packed.program.tasks if task.name.startswith("outer") and len(task.graph.outputs) > 1]
    assert len(outer) == 4  # updates, and no task that unpacks
    assert all((DIM * DIM + 5 * DIM,) in [v.aval.shape for v in task.graph.inputs] for task in outer)
    assert packed.num_lowerings == single.num_lowerings + 1  # a task that packs parameters


def test_a_table_is_not_packed_and_its_stage_packs_as_the_others():
    """XLA would copy the table in each task; and the first stage's packed array would differ from the others'."""
    schedule, params = Std1F1B(4), {"table": jnp.ones((8, DIM)), "stages": params_of(4)}
    batch = {"i": np.arange(24).reshape(6, 4) % 8, "y": batch_of(6)["y"][:, :4]}

    def embedded(params: Any, batch: Any) -> jax.Array:
        return loss(params["stages"], {"x": jnp.take(params["table"], batch["i"], axis=0), "y": batch["y"]})

    packed = mpmd_jit_with_loop(sgd_step(schedule, embedded), mesh_of(4), pack_bytes=1023).compile(params, batch)
    first = [task for task in loop_tasks(packed) if task.stage == 0]
    assert any(v.aval.shape == (8, DIM) for task in first for v in task.graph.inputs)
    sizes = {v.aval.shape for task in loop_tasks(packed)[:3] for v in task.graph.inputs if v.aval.ndim == 1}
    assert (5 * DIM,) in sizes
    assert (13 * DIM,) not in sizes


def test_gradients_that_the_step_returns_are_unpacked():
    schedule, batch, params = Std1F1B(2), batch_of(6), params_of(2)

    def gradients(params: Any, batch: Any, schedule: Any = schedule) -> Any:
        return treduce(lambda x: jax.value_and_grad(loss)(params, x), batch, schedule=schedule)

    packed = mpmd_jit_with_loop(gradients, mesh_of(2), pack_bytes=1023)(params, batch)
    single = mpmd_jit_with_loop(gradients, mesh_of(2), pack_bytes=0)(params, batch)
    tree_allclose(jax.tree.map(np.asarray, packed), jax.tree.map(np.asarray, single), rtol=0, atol=0)


def test_auto_packs_the_loops_that_save_many_arrays(monkeypatch: pytest.MonkeyPatch):
    _, unpacked = run(Std1F1B(2), pack_bytes=0)
    _, toy = run(Std1F1B(2))
    monkeypatch.setattr(pack, "_AUTO_SAVES", 6 * 3 * 2 * (LEAVES - 1))  # 6 microbatches, 3 tasks
    _, packed = run(Std1F1B(2))
    expected = list(map(arrays, loop_tasks(unpacked)))
    assert list(map(arrays, loop_tasks(toy))) == expected
    assert all(few < many - LEAVES for few, many in zip(map(arrays, loop_tasks(packed)), expected, strict=True))


def test_a_residual_plan_comes_first(monkeypatch: pytest.MonkeyPatch):
    plan = ResidualPlan([StageResiduals(recompute=True), StageResiduals()])
    monkeypatch.setattr(pack, "_AUTO_SAVES", 1)
    expected, kept = run(Std1F1B(2), residuals=plan)
    actual, packed = run(Std1F1B(2), residuals=plan, pack_bytes=1023)
    assert not any(v.aval.shape == (5 * DIM,) for task in loop_tasks(kept) for v in task.graph.inputs)
    assert any(v.aval.shape == (5 * DIM,) for task in loop_tasks(packed) for v in task.graph.inputs)
    tree_allclose(actual, expected, rtol=0, atol=0)


def test_ranks_of_several_devices_are_refused_or_not_packed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pack, "_AUTO_SAVES", 0)
    assert PackRule.of("auto", {"data": 1, "tensor": 1}).limit
    mesh = MpmdMesh(Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("stage", "data")), "stage")
    _, compiled = run(Std1F1B(2), mesh)
    assert all(len(task.graph.inputs) > LEAVES for task in loop_tasks(compiled))
    with pytest.raises(ValueError, match=r"^pack_bytes=1023 packs .* a rank of this mesh has the axes {'data': 2}. Le"):
        run(Std1F1B(2), mesh, pack_bytes=1023)


def test_a_setting_that_is_unknown_is_refused():
    with pytest.raises(ValueError, match=r"^pack_bytes='16KiB' is no known setting. Use \"auto\", the size"):
        run(Std1F1B(2), pack_bytes="16KiB")
    with pytest.raises(ValueError, match=r"^pack_bytes=-1: a size is at least 0 bytes"):
        check_pack_bytes(-1)
    with pytest.raises(TypeError, match=r"^pack_bytes must be a word or a whole number of bytes, got bool: True"):
        check_pack_bytes(True)
