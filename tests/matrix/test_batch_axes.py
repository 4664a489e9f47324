"""Axes that divide the examples and the parameters: what stays divided in a stage, and what is summed when."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpp_flax.engine.arrays.mesh import MpmdMesh, entry_of
from jaxpp_flax.engine.compiled import Compiled
from jaxpp_flax.engine.jit import mpmd_jit_with_loop
from jaxpp_flax.engine.program.program import Run
from jaxpp_flax.engine.tracing.markers import mark_stage_end
from jaxpp_flax.engine.tracing.treduce import treduce
from jaxpp_flax.planning.compilers.tasks import exchanges, read_task
from jaxpp_flax.schedules import Schedule, Std1F1B, ZeroBubble
from tests.helpers import batch_of, slow, tree_allclose
from tests.matrix.harness import mesh_of
from tests.matrix.test_fsdp import FSDP, check, explicit
from tests.matrix.test_sharding import DIM, explicit_mesh

MICROBATCHES, ROWS, LAYERS = 2, 24, 3
BATCH = batch_of(MICROBATCHES, ROWS, DIM, host=True)


def moved(compiled: Compiled, *, in_loop: bool) -> dict[tuple[str, ...], int]:
    """The bytes that the tasks of the loop exchange, or those around it, by axes; without single numbers."""
    found: dict[tuple[str, ...], int] = {}
    for task, executable in zip(compiled.program.tasks, compiled.executables.tasks, strict=True):
        if (task.stage is not None) == in_loop:
            for each in exchanges(read_task(executable).text.collectives, compiled.mpmd_mesh.unstack[task.rank].shape):
                if each.nbytes > 4 * each.count:
                    found[each.axes] = found.get(each.axes, 0) + each.nbytes
    return found


@pytest.mark.parametrize("schedule", [Std1F1B(2), pytest.param(ZeroBubble(2), marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_gradients_of_sharded_parameters_are_summed_over_data_once(kind: str, schedule: Schedule):
    """Over "fsdp", in every microbatch, as the parameters are gathered there; over "data", after the loop."""
    mesh_like, apply = (mesh_of, {}) if kind == "auto" else (explicit_mesh, {"apply": explicit})
    compiled = check(mesh_like(2, data=2, fsdp=2), FSDP, ("data", "fsdp"), schedule, fsdp="microbatch", **apply)
    assert set(moved(compiled, in_loop=True)) == {("fsdp",)}
    gradients = 2 * (2 * DIM * 2 * DIM + 2 * DIM) * 4  # of two layers in float32
    losses = 4 * 4  # of four microbatches, stacked, in float32
    assert moved(compiled, in_loop=False) == {("data",): gradients // 2, ("data", "fsdp"): losses}


def stacked(rng: np.random.Generator) -> dict[str, np.ndarray]:
    def one(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) / shape[-2] ** 0.5).astype(np.float32)

    return {"up": one(LAYERS, DIM, 2 * DIM), "scale": one(LAYERS, 1, DIM), "down": one(LAYERS, 2 * DIM, DIM)}


def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
    y = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-3) * p["scale"]
    return x + jnp.tanh(y @ p["up"]) @ p["down"], None


def layers(x: jax.Array, p: Any) -> jax.Array:
    return jax.lax.scan(layer, x, p)[0]


def recomputed(x: jax.Array, p: Any) -> jax.Array:
    return jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), x, p)[0]


def recurrence(x: jax.Array, p: Any) -> jax.Array:
    """The state begins as zeros, without a trace of the batch, and so does what is added up beside it."""

    def cell(carry: Any, p: Any) -> Any:
        state, sums = carry
        state = layer(state + x, p)[0]
        return (state, sums + state.sum(0)), None

    state, sums = jax.lax.scan(cell, (jnp.zeros((ROWS, DIM)), jnp.zeros(DIM)), p)[0]
    return state + 1e-2 * sums


def twice(x: jax.Array, p: Any) -> jax.Array:
    """Two scans, and between them an operation through which XLA leads no partition."""
    return layers(jnp.sort(layers(x, p), -1), p)


def train(stage: Callable[..., jax.Array], mesh: MpmdMesh, axes: tuple[str, ...]) -> Compiled:
    """Compare a step of two stages, the last without a mark behind its scan, with plain `jax.jit`."""
    rng = np.random.default_rng(0)
    params = {"first": rng.normal(size=(DIM, DIM)).astype(np.float32), "stages": [stacked(rng) for _ in range(2)]}

    def loss(p: Any, b: Any) -> jax.Array:
        x = mark_stage_end(stage(jnp.sin(b["x"] @ p["first"]), p["stages"][0]))
        return jnp.mean((stage(x, p["stages"][1]) - b["y"]) ** 2)

    def step(params: Any, batch: Any, schedule: Schedule | None) -> Any:
        losses, grads = treduce(lambda b: jax.value_and_grad(loss)(params, b), batch, schedule)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), losses

    tensor = "tensor" if "tensor" in mesh.jax_mesh.shape else None
    of_stage = {"up": P(None, "fsdp", tensor), "scale": P(), "down": P(None, tensor, "fsdp")}
    specs = ({"first": P(), "stages": [of_stage] * 2}, dict.fromkeys(BATCH, P(None, axes)))
    pipelined = mpmd_jit_with_loop(step, mesh, in_specs=specs, static_argnums=2)
    actual = pipelined(params, BATCH, Std1F1B(2))
    # In float32 to 1e-5: the order of the sums over devices and microbatches differs.
    tree_allclose(actual, jax.jit(step, static_argnums=2)(params, BATCH, None), rtol=1e-5)
    return pipelined.compile(params, BATCH, Std1F1B(2))


def entries(compiled: Compiled) -> Iterator[tuple[Any, Any]]:
    """Yield, of each result of the loop's tasks that holds examples, what divides them, and its last dimension."""
    for instruction in compiled.program.instructions:
        if isinstance(instruction, Run) and instruction.microbatch >= 0:
            for held in map(compiled.executables.held.__getitem__, instruction.outputs):
                if ROWS in held.shape:
                    found = (*held.spec, *[None] * len(held.shape))[: len(held.shape)]
                    yield found[held.shape.index(ROWS)], (held.shape[-1], found[-1])


@pytest.mark.parametrize("axes", [slow(("fsdp",)), ("data", "fsdp")], ids="_".join)
@pytest.mark.parametrize("stage", [layers, recomputed, recurrence, twice])
def test_scans_keep_the_batch_divided(stage: Callable[..., jax.Array], axes: tuple[str, ...]):
    """All that a stage hands on, and keeps for its backward; and weights are gathered, no activations exchanged."""
    compiled = train(stage, mesh_of(2, **dict.fromkeys(axes, 2)), axes)
    assert {of_batch for of_batch, _ in entries(compiled)} == {entry_of(axes)}
    text = "".join(executable.as_text() for executable in compiled.executables.tasks if executable is not None)
    assert " all-to-all(" not in text


def test_a_tensor_axis_beside():
    """It divides the hidden width, as before."""
    found = set(entries(train(layers, mesh_of(2, fsdp=2, tensor=2), ("fsdp",))))
    assert {of_batch for of_batch, _ in found} == {"fsdp"}
    assert {last for _, (size, last) in found if size == 2 * DIM} == {"tensor"}
