"""Work that fetches state from the host is divided, so that the devices never have all of it."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from jaxpp_flax.engine.jit import mpmd_jit_with_loop
from jaxpp_flax.engine.program.program import Program
from jaxpp_flax.engine.tracing.ir import from_jaxpr, memory_kind_of
from jaxpp_flax.schedules import Std1F1B
from tests.engine.toys import chain, gradients, mesh_of
from tests.helpers import batch_of, tree_allclose

stream_updates = import_module("jaxpp_flax.engine.passes.stream_updates")  # the package has the function's name
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
LAYERS = 4  # two on each of two ranks, with two arrays each


def step(params: Any, moments: Any, batch: Any) -> Any:
    """Two moments for each parameter, and updates that are scaled by their norm over all parameters."""
    losses, grads = gradients(Std1F1B(2))(params, batch)
    first, second = jax.tree.map(lambda m: jax.device_put(m, DEVICE), moments)
    first = jax.tree.map(lambda m, g: 0.9 * m + g, first, grads)
    second = jax.tree.map(lambda m, g: 0.9 * m + g * g, second, grads)
    updates = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + 1.0), first, second)
    norm = jnp.sqrt(sum(jnp.sum(u * u) for u in jax.tree.leaves(updates)))
    params = jax.tree.map(lambda p, u: p - 0.1 * u / norm, params, updates)
    return params, jax.tree.map(lambda m: jax.device_put(m, HOST), (first, second)), losses


def step_and_arguments() -> Any:
    moments = jax.tree.map(np.zeros_like, (chain(LAYERS), chain(LAYERS)))
    moments = jax.device_put(moments, SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host"))
    pipelined = mpmd_jit_with_loop(step, mesh_of(2), cut_policy=lambda marks, _: [1], donate_argnums=(0, 1))
    return pipelined, (chain(LAYERS), moments, batch_of(2))


def fetched(program: Program) -> list[int]:
    """The bytes that each program outside the loop fetches from the host."""
    return [
        sum(map(stream_updates._fetched_bytes, task.graph.equations))
        for task in program.tasks
        if any(memory_kind_of(v.aval) for v in task.graph.inputs)
    ]


def test_each_program_fetches_a_window(monkeypatch: pytest.MonkeyPatch):
    pipelined, arguments = step_and_arguments()
    expected = jax.jit(step)(*arguments)
    whole = pipelined.place(*arguments).program
    each = 2 * sum(leaf.nbytes for leaf in jax.tree.leaves(chain(LAYERS // 2)))  # two moments of a rank's parameters
    assert fetched(whole) == [each, each]

    weight = chain(1)[0]["w"].nbytes
    monkeypatch.setattr(stream_updates, "WINDOW_BYTES", 2 * weight)  # the moments of one weight
    divided, arguments = step_and_arguments()
    program = divided.place(*arguments).program
    moved = fetched(program)
    assert (sum(moved), max(moved), len(moved)) == (2 * each, 2 * weight, 8)
    # A leaf's moments leave in the program that fetched them.
    for task in program.tasks:
        counts = [
            sum(memory_kind_of(a.aval) is not None for a in atoms) for atoms in (task.graph.inputs, task.graph.outputs)
        ]
        assert counts[0] == counts[1]
    results = jax.tree.map(np.asarray, divided(*arguments))
    # XLA optimizes each program alone, and sums a norm in another order: 1e-6 is sixteen units in the last place.
    tree_allclose(results, expected, rtol=1e-6)


def test_work_within_the_window_stays_one_program():
    pipelined, arguments = step_and_arguments()
    outer = [task.graph.equations for task in pipelined.place(*arguments).program.tasks if task.stage is None]
    fetching = [equations for equations in outer if any(map(stream_updates._fetched_bytes, equations))]
    assert len(fetching) == 2
    for equations in fetching:
        assert stream_updates.stream_updates(equations) == [list(equations)]


def test_shared_work_waits_for_its_reader(monkeypatch: pytest.MonkeyPatch):
    """A gradient is scaled in the program that reads it: no scaled gradient lies between two programs."""

    def update(moments: Any, grads: Any) -> Any:
        grads = [g * 2 for g in grads]
        moments = [jax.device_put(m, DEVICE) + g for m, g in zip(moments, grads, strict=True)]
        norm = jnp.sqrt(sum(jnp.sum(m) for m in moments))
        return [jax.device_put(m, HOST) for m in moments], [m / norm for m in moments]

    moments = jax.device_put(
        [np.ones(8, np.float32)] * 3, SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    )
    graph, _ = from_jaxpr(jax.jit(update).trace(moments, [np.ones(8, np.float32)] * 3).jaxpr)
    monkeypatch.setattr(stream_updates, "WINDOW_BYTES", 1)
    programs = stream_updates.stream_updates(graph.equations)
    assert [sum(e.name == "device_put" for e in program) for program in programs] == [2, 2, 2]
    assert [sum(e.name == "mul" for e in program) for program in programs] == [1, 1, 1]
    assert [sum(e.name == "div" for e in program) for program in programs] == [0, 0, 3]
    replace(graph, equations=tuple(e for program in programs for e in program)).verify()
