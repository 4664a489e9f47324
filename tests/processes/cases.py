"""The cases that `run_cases.py` runs as several processes: each a step, its state and batch, and the mesh it runs on.

Every case is built alike in every process, and once more in one process alone, where it runs under plain `jax.jit`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.engine.tracing.markers import mark_stage_end
from jaxpp_flax.engine.tracing.treduce import Add, Concat, treduce
from jaxpp_flax.schedules import GPipe, Interleaved1F1B, Schedule, Std1F1B, ZeroBubble
from jaxpp_flax.schedules.gathers import Fsdp
from jaxpp_flax.schedules.residuals import ResidualPlan, StageResiduals
from tests.engine.toys import chain, chain_loss, sgd_step
from tests.helpers import ROWS, batch_of

STEPS = 3

# (state, batch, schedule) -> (state, outputs)
Step = Callable[[Any, Any, Schedule | None], tuple[Any, Any]]


@dataclass(frozen=True)
class Case:
    """A step to run `STEPS` times; `in_specs` as `mpmd_jit_with_loop` takes them."""

    name: str
    step: Step
    state: Any
    batch: Any
    schedule: Schedule
    mesh: MpmdMesh
    in_specs: Any = None
    donate: bool = True
    residuals: ResidualPlan | None = None
    fsdp: Fsdp = "microbatch"


def offloaded(num_stages: int) -> ResidualPlan:
    """Every stage moves what it keeps to the host; every second one keeps its input only."""
    return ResidualPlan([StageResiduals(recompute=stage % 2 == 1, offload=1.0) for stage in range(num_stages)])


def mesh_of(num_ranks: int, layout: str) -> MpmdMesh:
    """Ranks over all devices: "rows" gives each rank devices that follow one another, "columns" those of each process
    to different ranks."""
    devices = np.array(jax.devices())
    if devices.size == num_ranks:
        return MpmdMesh(Mesh(devices, ("stage",)), "stage")
    grid = devices.reshape(num_ranks, -1) if layout == "rows" else devices.reshape(-1, num_ranks).T
    return MpmdMesh(Mesh(grid, ("stage", "data")), "stage")


def plain_chain(state: Any, batch: Any, schedule: Schedule | None) -> tuple[Any, Any]:
    """Dense layers, SGD."""
    params, losses, grads = sgd_step(schedule)(state, batch)
    return params, (losses, grads)


def updates_alone(state: Any, batch: Any, schedule: Schedule | None) -> tuple[Any, Any]:
    """Dense layers, SGD; all processes would get small gradients, gathered, if the step returned them."""
    params, losses, _ = sgd_step(schedule)(state, batch)
    return params, losses


def clipped(state: Any, batch: Any, schedule: Schedule | None) -> tuple[Any, Any]:
    """Adam behind a clip of the global norm: scalars of all stages meet, and a step counter is replicated."""
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))
    params, opt_state = state
    loss, grads = treduce(lambda mb: jax.value_and_grad(chain_loss)(params, mb), batch, schedule, operation=(Add, Add))
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), (loss, optax.global_norm(grads))


def clipped_state(num_stages: int) -> Any:
    """For `clipped`."""
    params = chain(num_stages)
    return params, optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)).init(params)


def tied(state: Any, batch: Any, schedule: Schedule | None) -> tuple[Any, Any]:
    """One matrix in the first and the last stage: its gradients meet, and both stages get the new value."""

    def loss(params: Any, mb: Any) -> jax.Array:
        x = mb["x"] @ params["shared"]
        for i, w in enumerate(params["layers"]):
            x = jnp.tanh(x @ w)
            if i + 1 < len(params["layers"]):
                x = mark_stage_end(x)
        return jnp.mean((x @ params["shared"].T - mb["y"]) ** 2)

    losses, grads = treduce(lambda mb: jax.value_and_grad(loss)(state, mb), batch, schedule)
    return jax.tree.map(lambda p, g: p - 0.05 * g, state, grads), losses


def tied_state(num_stages: int) -> Any:
    """For `tied`."""
    rng = np.random.default_rng(3)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) / shape[0] ** 0.5, jnp.float32)  # noqa: E731
    return {"shared": draw(8, 8), "layers": [draw(8, 8) for _ in range(num_stages)]}


def with_statistics(state: Any, batch: Any, schedule: Schedule | None) -> tuple[Any, Any]:
    """Running means as a BatchNorm keeps them, one in each stage, and dropout with keys of the state."""
    params, means, key = state

    def loss(params: Any, means: Any, mb: Any, key: Any) -> Any:
        x, new = mb["x"], []
        for i, (p, mean) in enumerate(zip(params, means, strict=True)):
            if i:
                x = mark_stage_end(x)
            x = x @ p["w"] + p["b"]
            new.append(0.9 * mean + 0.1 * x.mean(0))
            keep = jax.random.bernoulli(jax.random.fold_in(key, i), 0.8, x.shape)
            x = jnp.where(keep, jnp.tanh(x - x.mean(0)), 0.0)
        return jnp.mean((x - mb["y"]) ** 2), new

    def body(carry: Any, xs: Any) -> Any:
        means, key = carry
        key, own = jax.random.split(key)
        (value, means), grads = jax.value_and_grad(loss, has_aux=True)(params, means, xs, own)
        return (means, key), (value, grads)

    (means, key), (losses, grads) = treduce(body, batch, schedule, operation=(Concat(), Add), init=(means, key))
    return (jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), means, key), losses


def statistics_state(num_stages: int) -> Any:
    """For `with_statistics`."""
    return chain(num_stages), [jnp.zeros(8)] * num_stages, jax.random.key(5)


def odd_types(state: Any, batch: Any, schedule: Schedule | None) -> tuple[Any, Any]:
    """Between stages go bfloat16, bool, int8, uint32, empty arrays and PRNG keys, and a mask skips a stage."""

    def loss(params: Any, mb: Any) -> jax.Array:
        x = mb["x"]
        mask = x > 0
        keys = jax.random.split(jax.random.key(7), 2)
        count = jnp.sum(mask, axis=-1).astype(jnp.int8)
        nothing = x[:0]
        for i, p in enumerate(params):
            if i:
                x, mask, count, keys, nothing = mark_stage_end((x, mask, count, keys, nothing))
                x = x.astype(jnp.float32)
            x = jnp.where(mask, jnp.tanh(x @ p["w"]), 0.1 * x) + count[:, None].astype(jnp.float32) * 0.01
            x = x + jax.random.uniform(keys[0], x.shape) * 0.1 + jnp.sum(nothing)
            mask = jnp.logical_not(mask)
            keys = jax.vmap(lambda k: jax.random.fold_in(k, 1))(keys)
            nothing = nothing * 2
            if i + 1 < len(params):
                x = x.astype(jnp.bfloat16)
        return jnp.mean((x - mb["y"]) ** 2)

    losses, grads = treduce(lambda mb: jax.value_and_grad(loss)(state, mb), batch, schedule)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), losses


def schedules(num_ranks: int) -> Iterator[tuple[str, Schedule]]:
    """Each with its name."""
    yield "gpipe", GPipe(num_ranks)
    yield "1f1b", Std1F1B(num_ranks)
    yield "interleaved", Interleaved1F1B(2 * num_ranks, num_ranks)
    yield "zero_bubble", ZeroBubble(num_ranks)


def one_device_each(num_processes: int) -> Iterator[Case]:
    """A rank in each process."""
    mesh = mesh_of(num_processes, "rows")
    batch = batch_of(2 * num_processes)
    for name, schedule in schedules(num_processes):
        yield Case(f"chain-{name}", plain_chain, chain(schedule.num_stages), batch, schedule, mesh)
    schedule = Std1F1B(num_processes)
    yield Case("clipped", clipped, clipped_state(num_processes), batch, schedule, mesh)
    yield Case("tied", tied, tied_state(num_processes), batch, schedule, mesh)
    yield Case("tied-kept", tied, tied_state(num_processes), batch, schedule, mesh, donate=False)
    yield Case("statistics", with_statistics, statistics_state(num_processes), batch, schedule, mesh)
    yield Case("odd-types", odd_types, chain(num_processes), batch, schedule, mesh)
    yield Case(
        "offloaded",
        plain_chain,
        chain(num_processes),
        batch,
        GPipe(num_processes),
        mesh,
        residuals=offloaded(num_processes),
    )


def two_devices_each(num_processes: int) -> Iterator[Case]:
    """Several ranks in each process; ranks of two devices, of one process or of two."""
    ranks = 2 * num_processes
    # More microbatches than XLA's CPU client takes computations.
    many = batch_of(40)
    yield Case("ranks-gpipe", plain_chain, chain(ranks), many, GPipe(ranks), mesh_of(ranks, "rows"))
    batch = batch_of(2 * num_processes)
    for layout in ("rows", "columns"):
        mesh = mesh_of(num_processes, layout)
        for spec in (None, P(None, "data")):
            specs = None if spec is None else (None, spec)
            name = f"{layout}-{'replicated' if spec is None else 'data'}"
            schedule = Std1F1B(num_processes)
            yield Case(f"{name}-chain", plain_chain, chain(num_processes), batch, schedule, mesh, specs)
        yield Case(f"{layout}-clipped", clipped, clipped_state(num_processes), batch, schedule, mesh, specs)
        yield Case(f"{layout}-tied", tied, tied_state(num_processes), batch, schedule, mesh, specs)
        yield Case(f"{layout}-odd", odd_types, chain(num_processes), batch, schedule, mesh, specs)
    # Ranks of a whole process, and ranks of a part of each: 1F1B and GPipe are above and below.
    for layout, name in (("rows", "interleaved"), ("columns", "zero_bubble")):
        schedule = dict(schedules(num_processes))[name]
        # Whole rows on each device: sums over parts of them, through this many stages, round otherwise.
        yield Case(
            f"{layout}-{name}", plain_chain, chain(schedule.num_stages), batch, schedule, mesh_of(num_processes, layout)
        )
    yield Case(
        "rows-statistics",
        with_statistics,
        statistics_state(num_processes),
        batch,
        Std1F1B(num_processes),
        mesh_of(num_processes, "rows"),
    )
    yield Case(
        "columns-offloaded",
        plain_chain,
        chain(num_processes),
        batch,
        GPipe(num_processes),
        mesh_of(num_processes, "columns"),
        (None, P(None, "data")),
        residuals=offloaded(num_processes),
    )
    # Parameters in halves, which lie in one process or in two.
    halves = {"w": P("data"), "b": P("data")}
    for layout in ("rows", "columns"):
        yield Case(
            f"{layout}-fsdp-step",
            updates_alone,
            chain(num_processes),
            batch,
            Std1F1B(num_processes),
            mesh_of(num_processes, layout),
            ([halves] * num_processes, P(None, "data")),
            fsdp="step",
        )
    yield Case(
        "rows-many", plain_chain, chain(num_processes), many, GPipe(num_processes), mesh_of(num_processes, "rows")
    )


GROUPS: dict[str, Callable[[int], Iterator[Case]]] = {"one": one_device_each, "two": two_devices_each}

# The cases of each group by name, for tests, which have not as many processes to make them.
NAMES = {
    "one": (
        "chain-gpipe", "chain-1f1b", "chain-interleaved", "chain-zero_bubble", "clipped", "tied", "tied-kept",
        "statistics", "odd-types", "offloaded",
    ),
    "two": (
        "ranks-gpipe", "rows-replicated-chain", "rows-data-chain", "rows-clipped", "rows-tied", "rows-odd",
        "columns-replicated-chain", "columns-data-chain", "columns-clipped", "columns-tied", "columns-odd",
        "rows-interleaved", "columns-zero_bubble", "rows-statistics",
        "columns-offloaded", "rows-fsdp-step", "columns-fsdp-step", "rows-many",
    ),
}  # fmt: skip

__all__ = ["GROUPS", "NAMES", "ROWS", "STEPS", "Case"]
