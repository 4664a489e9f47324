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
    by_name,
    names,
)
from tests.engine.toys import chain, chain_loss, mesh_of
from tests.helpers import batch_of, tree_allclose

STEPS = 5
# Issue 2's bound. float32 rounds to 6e-8; five steps that sum microbatches in another order stay well below it.
RTOL = 1e-5

ONE_STAGE_PER_RANK = [(1, 1), (2, 4), (4, 4), (4, 8), (3, 5)]


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


@pytest.mark.parametrize(("stages", "microbatches"), ONE_STAGE_PER_RANK)
@pytest.mark.parametrize("make", [GPipe, Std1F1B, Eager1F1B], ids=lambda make: make.__name__)
def test_one_stage_per_rank(make: Callable[[int], Schedule], stages: int, microbatches: int):
    check(make(stages), microbatches)


@pytest.mark.parametrize(("ranks", "stages", "microbatches"), [(2, 4, 8), (4, 8, 8)])
def test_interleaved(ranks: int, stages: int, microbatches: int):
    check(Interleaved1F1B(stages, ranks), microbatches)


@pytest.mark.parametrize(
    "schedule", [ZeroBubble(3), ZBV(4, 2), DualPipeV(4, 2)], ids=lambda schedule: type(schedule).__name__
)
def test_split_backward(schedule: Schedule):
    check(schedule, 8)


# By name, with the stages of each rank; with those above these are all. They share the executables of two ranks.
OTHERS = {
    "gpipe_1f1b_last": 1,
    "zero_bubble_h2": 1,
    "zero_bubble_h2_half_latency": 1,
    "zero_bubble_h2_full_latency": 1,
    "interleaved_gpipe": 2,
    "kimi_k2": 2,
    "circular": 2,
    "circular_reversed": 2,
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_other_schedules(name: str):
    check(by_name(name, 2 * OTHERS[name], 2), 4)


def test_every_schedule_is_among_these():
    above = {"gpipe", "1f1b", "eager_1f1b", "interleaved_1f1b", "zero_bubble", "zbv", "dualpipe_v"}
    assert above | OTHERS.keys() == set(names())


def test_the_reference_trains():
    """The comparisons above mean something: the model learns, clips, and its gradients are not zero."""
    (params, _, count), history = reference(4, 8)
    assert count == STEPS
    norms = np.array([norm for _, _, norm in history])
    assert (norms > 0.05).any()
    for before, after in zip(jax.tree.leaves(chain(4)), jax.tree.leaves(params), strict=True):
        assert np.abs(after - before).max() > 100 * RTOL * np.abs(after).max()
