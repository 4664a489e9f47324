"""Every front compiles for machines that are not there: of one host and of several, TPUs and NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, Mesh

from jaxpp_flax import PipelineTrainer, mpmd, tasks
from jaxpp_flax.engine.arrays import placing
from tests.compilers.machines import ONE_HOST, TWO_HOSTS, mesh_of
from tests.examples.running import load_example
from tests.mpmd import programs
from tests.trainers import models as m

pytestmark = pytest.mark.compilers

TOKENS = jax.ShapeDtypeStruct((32, m.LENGTH), np.int32)
BATCH = {"tokens": TOKENS, "targets": TOKENS}


@pytest.fixture(autouse=True)
def nothing_is_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "copy_arrays", None)
    monkeypatch.setattr(jax, "make_array_from_callback", None)


def loss_fn(model: Any, batch: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["tokens"]), batch["targets"]).mean()


def trainer(mesh: Mesh, model: Any, stages: int, loss_fn: Any = loss_fn) -> PipelineTrainer:
    return PipelineTrainer(
        model, optax.adam(1e-3), loss_fn, num_stages=stages, num_microbatches=4, mesh=mesh, assignment="even",
        logging=False,
    )  # fmt: skip


def check_trainer(mesh: Mesh, model: Any) -> Any:
    made = trainer(mesh, model, mesh.shape["stage"])
    compiled = made.compile(BATCH)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(made.held.memory))
    assert made.compile(BATCH) is compiled
    shapes = jax.tree.leaves(compiled.in_shardings[0][0])
    assert len(shapes) == len(jax.tree.leaves(made.held.memory))
    assert all(memory.argument_bytes > 0 for memory in compiled.memory_analysis())
    for executable in compiled.executables.tasks:
        assert executable.memory_analysis().output_size_in_bytes > 0
    with pytest.raises(RuntimeError, match=r"trainer\.train_step needs the mesh's devices, but .* a description"):
        made.train_step(BATCH)
    return compiled


def blocks(rngs: nnx.Rngs) -> m.Model:
    return m.Model(4, rngs=rngs)


@pytest.mark.parametrize("machine", ONE_HOST)
def test_a_trainer_with_a_factory(machine: str):
    compiled = check_trainer(mesh_of(machine, {"stage": 2, "data": 2}), blocks)
    assert compiled.compiler.compilations == compiled.compiler.lowerings


@pytest.mark.parametrize("machine", TWO_HOSTS)
def test_a_trainer_with_an_abstract_model_on_hosts_that_hold_stages(machine: str):
    compiled = check_trainer(mesh_of(machine, {"stage": 4, "data": 2}), nnx.eval_shape(lambda: blocks(nnx.Rngs(0))))
    # The stages in the middle are equal: what XLA says of one holds for both.
    of_rank = {rank: [e for t, e in zip(compiled.program.tasks, compiled.executables.tasks, strict=True)
                      if t.rank == rank] for rank in (1, 2)}  # fmt: skip
    assert of_rank[1] == of_rank[2]
    assert compiled.compiler.compilations == compiled.compiler.lowerings < len(compiled.program.tasks)


@pytest.mark.parametrize("machine", TWO_HOSTS)
def test_a_trainer_with_stages_across_hosts(machine: str):
    mesh = mesh_of(machine, {"data": 2, "stage": 2, "tensor": 2})
    assert {device.process_index for device in mesh.devices[:, 0].flat} == {0, 1}
    check_trainer(mesh, m.Model(4, rngs=nnx.Rngs(0)))


def loss_that_prints(model: Any, batch: Any) -> jax.Array:
    jax.debug.print("{}", batch["targets"].sum())
    return loss_fn(model, batch)


def test_calls_of_the_host():
    mesh = mesh_of("tpu-v5e:2x2", {"stage": 2, "data": 2})
    assert trainer(mesh, blocks, 2, loss_that_prints).compile(BATCH).memory_analysis()
    mesh = mesh_of("h100-sxm:1x4", {"stage": 2, "data": 2})
    with pytest.raises(NotImplementedError, match=r"^the task fwd_0 on rank 0 calls the host \(debug_\w+\), which"):
        trainer(mesh, blocks, 2, loss_that_prints).compile(BATCH)


@pytest.fixture
def cache_on_disk(tmp_path: Path) -> Iterator[Path]:
    before = jax.config.jax_compilation_cache_dir
    compilation_cache.set_cache_dir(str(tmp_path))
    compilation_cache.reset_cache()
    yield tmp_path
    compilation_cache.set_cache_dir(before)
    compilation_cache.reset_cache()


@pytest.mark.parametrize("machine", ONE_HOST)
def test_the_cache_on_disk_gets_nothing_that_jax_could_not_read(machine: str, cache_on_disk: Path):
    trainer(mesh_of(machine, {"stage": 2, "data": 2}), blocks, 2).compile(BATCH)
    assert not list(cache_on_disk.glob("*fwd*"))


@pytest.mark.parametrize("machine", ONE_HOST)
def test_tasks_by_hand(machine: str):
    example = load_example("tasks/one_f_one_b.py")
    devices = mesh_of(machine, {"stage": 2, "fsdp": 2}).devices
    mesh = tasks.MpmdMesh(Mesh(devices, ("stage", "fsdp"), axis_types=(AxisType.Explicit,) * 2), "stage")
    f32 = partial(jax.ShapeDtypeStruct, dtype=np.float32)
    shapes = (f32((example.WIDTH, example.HIDDEN)), f32((example.HIDDEN, example.WIDTH)))
    x = [f32((8, example.WIDTH))] * 4
    compiled = example.make_step(mesh, 4).lower([[shapes] * example.LAYERS] * 2, x, x).compile()
    assert all(executable.as_text() for executable in compiled.tasks.values())
    with pytest.raises(RuntimeError, match="a call of step needs the mesh's devices"):
        compiled.run([])


@pytest.mark.parametrize("machine", ONE_HOST)
def test_named_computations(machine: str):
    devices = mesh_of(machine, {"stage": 2, "data": 2}).devices
    meshes = {f"m{i}": Mesh(row, ("data",)) for i, row in enumerate(devices)}
    config = programs.config(meshes, programs.in_runs(4, 2), schedule="1F1B")
    w, x = (jax.ShapeDtypeStruct((rows, programs.WIDTH), jnp.float32) for rows in (programs.WIDTH, 4))
    compiled = mpmd.jit(programs.train_step, config).lower([w] * 4, [x] * 2).compile()
    assert all(memory.argument_bytes > 0 for memory in compiled.memory_analysis().values())
    with pytest.raises(RuntimeError, match="a call of train_step needs the mesh's devices"):
        compiled.run([w] * 4 + [x] * 2)
