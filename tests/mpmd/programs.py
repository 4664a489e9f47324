"""Programs and meshes that several tests share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxpp_flax import mpmd
from jaxpp_flax.engine.program.program import Run

WIDTH = 8


def topology(*counts: int, axis: str = "data") -> dict[str, Mesh]:
    """Meshes m0, m1... of so many devices each."""
    devices, meshes, start = jax.devices(), {}, 0
    for number, count in enumerate(counts):
        meshes[f"m{number}"] = Mesh(np.array(devices[start : start + count]), (axis,))
        start += count
    return meshes


def weights(blocks: int) -> list[jax.Array]:
    """NumPy's values, so that making them compiles nothing; `batches` too."""
    return [normal(block, WIDTH, WIDTH**-0.5) for block in range(blocks)]


def batches(count: int, rows: int = 4) -> list[jax.Array]:
    return [normal(100 + i, rows) for i in range(count)]


def normal(seed: int, rows: int, scale: float = 1.0) -> jax.Array:
    return jnp.asarray(scale * np.random.default_rng(seed).normal(size=(rows, WIDTH)), jnp.float32)


def block(w: jax.Array, x: jax.Array) -> jax.Array:
    return jax.nn.relu(jnp.sin(x @ w)) + x


def model(ws: Sequence[jax.Array], x: jax.Array, bodies: Sequence[Any] = ()) -> jax.Array:
    x = x * 2  # without a name
    for number, (w, body) in enumerate(zip(ws, bodies or [block] * len(ws), strict=True)):
        x = mpmd.named_computation(body, name=f"block_{number}")(w, x)
    return x


def loss(ws: Sequence[jax.Array], x: jax.Array, bodies: Sequence[Any] = ()) -> jax.Array:
    return jnp.mean(model(ws, x, bodies) ** 2)


def accumulate(ws: Any, xs: Sequence[jax.Array], loss_fn: Any = loss) -> Any:
    """Raw sums of losses and gradients over microbatches."""

    def microbatch(carry: Any, ws: Any, x: jax.Array) -> Any:
        return jax.tree.map(jnp.add, carry, jax.value_and_grad(loss_fn)(ws, x))

    carry = jnp.zeros(()), jax.tree.map(jnp.zeros_like, ws)
    for number, x in enumerate(xs):
        carry = mpmd.call(microbatch, call_counter=number)(carry, ws, x)
    return carry


def train_step(ws: Any, xs: Sequence[jax.Array]) -> Any:
    total, grads = accumulate(ws, xs)
    return jax.tree.map(lambda w, g: w - 0.1 * g / len(xs), ws, grads), total / len(xs)


def in_runs(blocks: int, meshes: int) -> dict[str, str]:
    """Neighbouring blocks on one mesh."""
    return {f"block_{i}": f"m{i * meshes // blocks}" for i in range(blocks)}


def in_turn(blocks: int, meshes: int) -> dict[str, str]:
    """Blocks dealt out to the meshes."""
    return {f"block_{i}": f"m{i % meshes}" for i in range(blocks)}


def config(meshes: dict[str, Mesh], assignment: dict[str, str], schedule: str | None = None, **more: Any) -> Any:
    options = mpmd.PartitioningOptions({"mpmd_pipeline_schedule": schedule} if schedule else {})
    return mpmd.make_config(meshes, assignment, partitioning_options=options, **more)


def runs_of(lowered: mpmd.MpmdLowered, mesh: int) -> list[tuple[str, int]]:
    """What a mesh runs in order: kind and stage, and the microbatch."""
    program = lowered.built.program
    runs = [i for i in program.instructions if isinstance(i, Run) and i.rank == mesh and i.microbatch >= 0]
    return [(program.tasks[run.task].name, run.microbatch) for run in runs]
