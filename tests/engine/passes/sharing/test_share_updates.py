"""What the updates of all ranks have in common is one program; the rest of a rank is another."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp_flax.engine.jit import mpmd_jit_with_loop
from jaxpp_flax.engine.passes.placed import Segment
from jaxpp_flax.engine.tracing.fingerprint import Fingerprinter
from jaxpp_flax.engine.tracing.markers import mark_stage_end
from jaxpp_flax.schedules import Std1F1B
from tests.engine.toys import built, chain, gradients, mesh_of
from tests.helpers import DIM, batch_of, tree_allclose

share_updates = import_module("jaxpp_flax.engine.passes.sharing.share_updates")  # the package has the function's name
RANKS = 3


def model() -> list[dict[str, jax.Array]]:
    """Equal layers; the first rank also has a scale, and the last one another."""
    params = chain(RANKS)
    params[0]["first"] = jnp.ones((1, DIM))
    params[-1]["last"] = jnp.ones((2, 1, DIM))
    return params


def loss(params: Any, batch: Any) -> jax.Array:
    x = batch["x"] * params[0]["first"]
    for i, p in enumerate(params):
        x = jnp.tanh((mark_stage_end(x) if i else x) @ p["w"] + p["b"])
    return jnp.mean((x * params[-1]["last"].sum(0) - batch["y"]) ** 2)


def step(params: Any, moments: Any, count: jax.Array, batch: Any) -> Any:
    """Momentum with a bias correction, a number that all leaves read."""
    losses, grads = gradients(Std1F1B(RANKS), loss)(params, batch)
    count = count + 1
    moments = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments, grads)
    params = jax.tree.map(lambda p, m: p - 0.1 * m / (1 - 0.9**count), params, moments)
    return params, moments, count, losses


def clipped(params: Any, moments: Any, count: jax.Array, batch: Any) -> Any:
    """An update that depends on a norm over all leaves."""
    params, moments, count, losses = step(params, moments, count, batch)
    norm = jnp.sqrt(sum(jnp.sum(m * m) for m in jax.tree.leaves(moments)))
    return jax.tree.map(lambda p: p / (1 + norm), params), moments, count, losses


def arguments() -> tuple[Any, ...]:
    return model(), jax.tree.map(np.zeros_like, model()), jnp.float32(0), batch_of(2)


def updates(compiled: Any) -> list[set[Any]]:
    """For each rank, the keys of its programs outside the loop."""
    keys = Fingerprinter()
    found: list[set[Any]] = [set() for _ in range(RANKS)]
    for task in compiled.program.tasks:
        if task.name.startswith("outer_"):
            found[task.rank].add(keys.graph(task.graph))
    return found


@pytest.mark.parametrize("function", [step, clipped])
def test_the_common_part_is_one_program_and_the_results_stay(function: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(share_updates, "_FEWEST_EQUATIONS", 2)
    pipelined = mpmd_jit_with_loop(function, mesh_of(RANKS), donate_argnums=(0, 1))
    expected = jax.jit(function)(*arguments())
    compiled = pipelined.compile(*arguments())
    compiled.program.verify()
    first, middle, last = updates(compiled)
    if function is step:
        assert len(middle) == 1
        assert middle < first
        assert middle < last
    tree_allclose(jax.tree.map(np.asarray, pipelined(*arguments())), expected)


def test_small_updates_stay_whole():
    placed = built(step, RANKS, *arguments()).placed
    assert {s.rank for s in placed.steps if isinstance(s, Segment)} == {0, 1, 2}
    assert share_updates.share_updates(placed, Fingerprinter()) is placed


def test_updates_that_are_alike_stay_whole(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(share_updates, "_FEWEST_EQUATIONS", 2)

    def sgd(params: Any, batch: Any) -> Any:
        losses, grads = gradients(Std1F1B(RANKS))(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), losses

    placed = built(sgd, RANKS, chain(RANKS), batch_of(2)).placed
    assert share_updates.share_updates(placed, Fingerprinter()) is placed
