"""Random programs whose gradients have types of sums (`jax.P(reduced=, unreduced=)`) equal plain JAX."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jaxpp_flax.api as jaxpp
from jaxpp_flax.schedules import DualPipeV, GPipe, Interleaved1F1B, Schedule, Std1F1B, ZeroBubble
from tests.helpers import tree_allclose

WIDTH = 8
LAYERS = ("dense", "bias", "residual", "scale", "norm", "tied")
# Schedules by the number of stages that each rank has.
SCHEDULES: dict[int, list[Callable[[int], Schedule]]] = {
    1: [GPipe, Std1F1B, ZeroBubble],
    2: [lambda ranks: Interleaved1F1B(2 * ranks, ranks), lambda ranks: DualPipeV(2 * ranks, ranks)],
}


@dataclass(frozen=True)
class Program:
    """What one seed stands for.

    Args:
      layers: of each stage, the kinds of its layers.
      form: how the parameters get their types: by `in_specs`, in the step, or gathered from shards in the step.
    """

    seed: int
    layers: tuple[tuple[str, ...], ...]
    ranks: int
    schedule: Schedule
    microbatches: int
    form: str
    with_value: bool


def draw(seed: int) -> Program:
    rng = random.Random(seed)
    ranks, per_rank = rng.choice([1, 2, 3, 4]), rng.choice([1, 1, 2])
    return Program(
        seed=seed,
        layers=tuple(tuple(rng.choices(LAYERS, k=rng.choice([1, 2]))) for _ in range(ranks * per_rank)),
        ranks=ranks,
        schedule=rng.choice(SCHEDULES[per_rank])(ranks),
        microbatches=2 * ranks * rng.choice([1, 2]),
        form=rng.choice(["arguments", "in the step", "gathered"]),
        with_value=rng.random() < 0.5,
    )


def apply(kind: str, w: dict[str, jax.Array], tied: jax.Array, x: jax.Array) -> jax.Array:
    match kind:
        case "dense":
            return jnp.tanh(x @ w["kernel"])
        case "bias":
            return jnp.tanh(x @ w["kernel"] + w["vector"])
        case "residual":
            return x + jnp.sin(x @ w["kernel"]) @ w["kernel"].T
        case "scale":
            return x * w["vector"]
        case "norm":
            return x / jnp.sqrt(1.0 + (x**2).mean(-1, keepdims=True)) * w["vector"]
        case _:
            return jnp.tanh(x @ tied)


def loss_fn(program: Program, params: Any, x: jax.Array) -> jax.Array:
    for i, (kinds, stage) in enumerate(zip(program.layers, params["stages"], strict=True)):
        for kind, w in zip(kinds, stage, strict=True):
            x = apply(kind, w, params["tied"], x)
        if i < len(program.layers) - 1:
            x = jaxpp.mark_stage_end(x)
    return jnp.mean((x @ params["tied"]) ** 2)


def check(program: Program) -> None:
    rng = np.random.default_rng(program.seed)
    normal = lambda *shape: jnp.asarray(0.5 * rng.normal(size=shape), jnp.float32)  # noqa: E731
    layer = lambda: {"kernel": normal(WIDTH, WIDTH), "vector": 1 + normal(WIDTH)}  # noqa: E731
    params = {"stages": [[layer() for _ in kinds] for kinds in program.layers], "tied": normal(WIDTH, WIDTH)}
    batch, loss = normal(program.microbatches, 4, WIDTH), partial(loss_fn, program)

    typed = P(reduced={"data"})
    outside = {"arguments": typed, "in the step": P(), "gathered": P("data")}[program.form]
    back = P() if outside == typed else outside

    def by_kind(spec: P) -> Any:
        """The matrices' spec. JAX gives types of sums to products alone, so vectors have none."""
        return jax.tree.map(lambda w: spec if w.ndim == 2 else P(), params)

    def step(params: Any, batch: Any) -> Any:
        held = params if outside == typed else jax.tree.map(jax.sharding.reshard, params, by_kind(typed))
        taken = jax.value_and_grad(loss) if program.with_value else jax.grad(loss)
        summed = jaxpp.treduce(partial(taken, held), batch, schedule=program.schedule, operation=jaxpp.Add)
        value, grads = summed if program.with_value else (None, summed)
        return value, jax.tree.map(jax.sharding.reshard, grads, by_kind(back))

    devices = np.array(jax.devices()[: 2 * program.ranks]).reshape(program.ranks, 2)
    mesh = jaxpp.MpmdMesh(Mesh(devices, ("stage", "data"), axis_types=(AxisType.Explicit,) * 2), "stage")
    pipelined = jaxpp.mpmd_jit_with_loop(step, mesh, in_specs=(by_kind(outside), P(None, "data")))
    values, grads = jax.vmap(jax.value_and_grad(loss), in_axes=(None, 0))(params, batch)
    expected = (values.sum() if program.with_value else None), jax.tree.map(lambda g: g.sum(0), grads)
    tree_allclose(pipelined(params, batch), expected)


@pytest.mark.parametrize("seed", [0])
def test_a_random_program_of_typed_sums(seed: int):
    check(draw(seed))


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1000, 1200))
def test_many_random_programs_of_typed_sums(seed: int):
    check(draw(seed))
