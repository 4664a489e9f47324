"""JAX's switches for debugging around a pipelined step."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.engine.jit import MpmdFunction, mpmd_jit_with_loop
from jaxpp_flax.engine.runtime.profile import collect_task_times_ms
from jaxpp_flax.schedules import Std1F1B
from tests.engine.toys import chain, gradients, mesh_of
from tests.helpers import batch_of, tree_allclose


def step(params: Any, batch: Any) -> Any:
    """One with values that are not finite and reach no result: the logarithms of negative numbers."""
    losses, grads = gradients(Std1F1B(2))(params, batch)
    masked = jnp.where(losses > 0, losses, jnp.log(-losses))
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), masked


def batch_with(value: float, microbatch: int) -> dict[str, jax.Array]:
    """A batch of two with one bad target."""
    batch = batch_of(2)
    y = np.array(batch["y"])
    y[microbatch, 0, 0] = value
    return {"x": batch["x"], "y": jnp.asarray(y)}


@pytest.fixture(scope="module")
def pipelined() -> MpmdFunction:
    return mpmd_jit_with_loop(step, mesh_of(2), donate_argnums=0)


@pytest.mark.parametrize("called_before", [False, True], ids=["new", "called before"])
@pytest.mark.parametrize(("kind", "value"), [("nan", np.nan), ("inf", np.inf)], ids=["nan", "inf"])
def test_a_special_value_is_the_error_of_jit(pipelined: MpmdFunction, kind: str, value: float, called_before: bool):
    if called_before:
        pipelined(chain(2), batch_of(2))
    params, batch = chain(2), batch_with(value, microbatch=1)
    with jax.debug_nans(kind == "nan"), jax.debug_infs(kind == "inf"):
        with pytest.raises(FloatingPointError):
            jax.jit(step)(params, batch)
        place = rf"invalid value \({kind}\) encountered in task fwd_bwd_1 \(rank 1, stage 1, microbatch 1\)"
        with pytest.raises(FloatingPointError, match=place):
            pipelined(params, batch)
    assert not any(x.is_deleted() for x in jax.tree.leaves(params))


@pytest.mark.parametrize("timed", [False, True], ids=["", "timed"])
def test_values_that_reach_no_result_are_none(pipelined: MpmdFunction, timed: bool):
    with jax.debug_nans(True), jax.debug_infs(True), collect_task_times_ms(timed) as times:
        expected = jax.jit(step)(chain(2), batch_of(2))
        actual = pipelined(chain(2), batch_of(2))
    assert (times is not None) == timed
    # One step in float32, summed in another order.
    tree_allclose(actual, expected, rtol=1e-6)


def test_a_donated_array_on_a_device_of_no_rank_is_kept_too(pipelined: MpmdFunction):
    params = jax.device_put(chain(2), jax.devices()[5])
    with jax.debug_nans(True):
        pipelined(params, batch_of(2))
    assert not any(x.is_deleted() for x in jax.tree.leaves(params))
    pipelined(params, batch_of(2))
    assert all(x.is_deleted() for x in jax.tree.leaves(params))


@pytest.mark.parametrize("by_context", [True, False], ids=["context", "config"])
def test_a_measured_step_looks_at_its_results(pipelined: MpmdFunction, by_context: bool):
    params, good, bad = chain(2), batch_of(2), batch_with(np.nan, microbatch=1)
    compiled = pipelined.compile(params, good)
    with jax.debug_nans(True) if by_context else switched_on("jax_debug_nans"):
        compiled.profile(params, good)  # holds NaNs that reach no result
        with pytest.raises(FloatingPointError, match=r"\(nan\) .* in task .* \(rank 1, stage 1, microbatch 1\)"):
            compiled.profile(params, bad)
    assert not any(x.is_deleted() for x in jax.tree.leaves(params))


@contextmanager
def switched_on(name: str) -> Generator[None]:
    """For all threads, where the context manager is for one."""
    jax.config.update(name, True)
    try:
        yield
    finally:
        jax.config.update(name, False)


@pytest.mark.parametrize("called_before", [False, True], ids=["new", "called before"])
def test_disable_jit_is_refused(called_before: bool):
    step_of_its_own = mpmd_jit_with_loop(step, mesh_of(2))
    if called_before:
        step_of_its_own(chain(2), batch_of(2))
    with jax.disable_jit(), pytest.raises(RuntimeError, match=r"jax\.disable_jit is on .* switch it off around"):
        step_of_its_own(chain(2), batch_of(2))


def test_parts_on_several_devices_are_looked_at():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("stage", "data"))
    rows = jax.sharding.PartitionSpec(None, "data")
    sharded = mpmd_jit_with_loop(step, MpmdMesh(mesh, "stage"), in_specs=(None, rows))
    params, batch = chain(2), batch_with(np.nan, microbatch=1)  # made here: JAX looks at what it is given, too
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"task fwd_bwd_1 \(rank 1, stage 1"):
        sharded(params, batch)
