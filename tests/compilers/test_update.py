"""The update on described machines: gradients are reduced once, new parameters take over the memory of the old."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jaxpp_flax.api as jaxpp
from jaxpp_flax.engine.pipeline import CompiledPipeline
from jaxpp_flax.planning.compilers.tasks import read_task
from tests.compilers.machines import ONE_HOST, mesh_of
from tests.compilers.small import MICROBATCHES, PARAMETER_BYTES, WIDTH, around_loop, compiled_for, moved, of_loop, told

pytestmark = pytest.mark.compilers

LOSS = 4  # bytes


@cache
def trained(machine: str) -> CompiledPipeline:
    """Adam, on two stages of two shards of the batch."""
    return compiled_for(machine, {"data": 2})


@pytest.mark.parametrize("machine", ONE_HOST)
def test_gradients_are_reduced_over_data_once_in_a_step(machine: str):
    """The loss goes with them: beside a collective, NVIDIA's compiler lets a backward hold every activation."""
    report = told(trained(machine))
    assert not any(task.exchanges for task in of_loop(report))
    assert [len(task.exchanges) for task in around_loop(report) if task.exchanges] == [1, 1]
    assert moved(around_loop(report)) == {("all-reduce", ("data",)): 2 * PARAMETER_BYTES + LOSS}


def of_jaxpp(machine: str) -> CompiledPipeline:
    """The step of a program of JaxPP's, whose `treduce` stacks the losses: two stages, two shards of the batch."""
    mesh = jaxpp.MpmdMesh(mesh_of(machine, {"stage": 2, "data": 2}), "stage")

    def step(weights: Any, batch: Any) -> Any:
        def loss(weights: Any, x: jax.Array) -> jax.Array:
            for k, weight in enumerate(weights):
                x = jnp.tanh((jaxpp.pipeline_enter_stage(x) if k else x) @ weight)
            return (x**2).mean()

        losses, grads = jaxpp.treduce(partial(jax.value_and_grad(loss), weights), batch, jaxpp.Std1F1B(2))
        return jax.tree.map(lambda weight, grad: weight - 0.1 * grad, weights, grads), losses

    specs = PartitionSpec(), PartitionSpec(None, "data")
    weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), np.float32)] * 2
    batch = jax.ShapeDtypeStruct((MICROBATCHES, 32, WIDTH), np.float32)
    return jaxpp.mpmd_jit_with_loop(step, mpmd_mesh=mesh, in_specs=specs).compile(weights, batch)


@pytest.mark.parametrize("machine", ONE_HOST)
def test_stacked_losses_are_reduced_once_in_a_step(machine: str):
    report = told(of_jaxpp(machine))
    assert len(of_loop(report)) == 3
    assert not any(task.exchanges for task in of_loop(report))
    after = [exchange for task in around_loop(report) for exchange in task.exchanges]
    assert {(exchange.kind, exchange.axes) for exchange in after} == {("all-reduce", ("data",))}
    assert sum(exchange.nbytes for exchange in after) == 4 * (2 * WIDTH**2 + MICROBATCHES)


@pytest.mark.parametrize("machine", ONE_HOST)
def test_parameters_and_moments_are_donated_and_not_copied(machine: str):
    """NVIDIA's compiler may copy an accumulator in front of its all-reduce: no result takes over its memory."""
    compiled = trained(machine)
    aliased = [0, 0]
    for task, executable in zip(compiled.program.tasks, compiled.executables.tasks, strict=True):
        if task.stage is None:
            read = read_task(executable)
            assert not {c.argument for c in read.text.copies if c.what == "argument"}.intersection(read.text.aliased)
            aliased[task.rank] += read.memory.alias_size_in_bytes
    # Parameters and two moments; and Adam's counter, whose few bytes may be padded.
    for nbytes in aliased:
        assert 0 <= nbytes - 3 * PARAMETER_BYTES <= 4096
