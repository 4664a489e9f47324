"""A pipelined training step computes what plain `jax.jit` computes: the same function, run both ways."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp_flax.engine.jit import MpmdFunction, mpmd_jit_with_loop
from jaxpp_flax.engine.tracing.treduce import treduce
from jaxpp_flax.schedules import (
    ZBV,
    DualPipeV,
    Eager1F1B,
    GPipe,
    Interleaved1F1B,
    Schedule,
    Std1F1B,
    ZeroBubble,
)
from tests.engine.toys import chain, chain_loss, mesh_of
from tests.helpers import batch_of, slow, tree_allclose

STEPS = 5
# Issue 2's bound. float32 rounds to 6e-8; five steps that sum microbatches in another order stay well below it.
RTOL = 1e-5


def step(state: Any, batch: Any, schedule: Schedule | None) -> Any:
    """Momentum, a learning rate that decays with the step, and clipping by the norm over all stages."""
    params, momentum, count = state
    losses, grads = treduce(lambda mb: jax.value_and_grad(chain_loss)(params, mb), batch, schedule)
    grads = jax.tree.map(lambda g: g / losses.size, grads)
    norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(grads)))
    scale = jnp.minimum(1.0, 0.05 / norm)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + scale * g, momentum, grads)
    rate = 0.5 / (1.0 + count)
    params = jax.tree.map(lambda p, m: p - rate * m, params, momentum)
    return (params, momentum, count + 1), losses, grads, norm


@functools.cache
def pipelined(num_ranks: int) -> MpmdFunction:
    """One function for all schedules, so that they share the executables of equal tasks."""
    return mpmd_jit_with_loop(step, mesh_of(num_ranks), donate_argnums=0, static_argnums=2)


def initial(num_stages: int) -> Any:
    params = chain(num_stages)
    return params, jax.tree.map(np.zeros_like, params), np.int32(0)


def train(one_step: Callable[..., Any], num_stages: int, num_microbatches: int) -> list[Any]:
    """The last state, and losses, gradients and norm of every step."""
    state, history = initial(num_stages), []
    for number in range(STEPS):
        state, *rest = one_step(state, batch_of(num_microbatches, seed=number))
        history.append(jax.tree.map(np.asarray, rest))
    return [jax.tree.map(np.asarray, state), history]


@functools.cache
def reference(num_stages: int, num_microbatches: int) -> list[Any]:
    return train(jax.jit(functools.partial(step, schedule=None)), num_stages, num_microbatches)


def check(schedule: Schedule, num_microbatches: int) -> None:
    actual = train(lambda *args: pipelined(schedule.num_ranks)(*args, schedule), schedule.num_stages, num_microbatches)
    tree_allclose(actual, reference(schedule.num_stages, num_microbatches), rtol=RTOL)


@pytest.mark.parametrize(
    ("schedule", "microbatches"),
    [
        (Std1F1B(1), 1),
        (Interleaved1F1B(4, 2), 4),
        slow(Eager1F1B(3), 5),
        slow(ZBV(4, 2), 4),
        *(slow(make(stages), count) for make in (GPipe, Std1F1B, Eager1F1B) for stages, count in [(2, 4), (4, 8)]),
        slow(Interleaved1F1B(8, 4), 8),
        slow(ZeroBubble(3), 8),
        slow(DualPipeV(4, 2), 8),
    ],
    ids=str,
)
def test_training(schedule: Schedule, microbatches: int):
    """A few kinds of schedules for five steps; `test_schedules.py` runs each of them once."""
    check(schedule, microbatches)


def test_the_reference_trains():
    """The comparisons above mean something: the model learns, clips, and its gradients are not zero."""
    (params, _, count), history = reference(4, 4)
    assert count == STEPS
    norms = np.array([norm for _, _, norm in history])
    assert (norms > 0.05).any()
    for before, after in zip(jax.tree.leaves(chain(4)), jax.tree.leaves(params), strict=True):
        assert np.abs(after - before).max() > 100 * RTOL * np.abs(after).max()
