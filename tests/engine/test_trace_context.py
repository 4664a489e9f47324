"""JAX's settings around a call: a step is traced again for each, as under `jax.jit`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp_flax import _compat
from jaxpp_flax.engine.jit import MpmdFunction, mpmd_jit_with_loop
from jaxpp_flax.engine.tracing.treduce import treduce
from jaxpp_flax.schedules import Std1F1B
from tests.engine.toys import chain, forward, mesh_of
from tests.helpers import batch_of, tree_allclose

Context = Callable[[], AbstractContextManager[Any]]
# What each changes in the step below: its numbers, its types, or whether it can be traced.
CHANGES: dict[str, Context] = {
    "x64": lambda: jax.enable_x64(True),
    "matmul precision": lambda: jax.default_matmul_precision("float32"),
    "threefry": lambda: jax.threefry_partitionable(False),
}
REFUSES: dict[str, Context] = {
    "dtype promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "rank promotion": lambda: jax.numpy_rank_promotion("raise"),
}


def loss(params: Any, mb: Any, key: jax.Array) -> jax.Array:
    noise = jax.random.bits(key, mb["x"].shape).astype(jnp.float32) / 2.0**32
    x = forward(params, mb["x"]) + noise * jnp.bfloat16(1)
    # A NumPy scalar is of float64 where JAX has it.
    return jnp.mean((x * np.float64(1.5) - mb["y"]) ** 2)


def step(params: Any, batch: Any, key: jax.Array) -> Any:
    precision = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    losses, grads = treduce(lambda mb: jax.value_and_grad(loss)(params, mb, key), batch, Std1F1B(2))
    return losses, grads, jnp.int32(0 if precision is None else 1)


def arguments() -> Any:
    return chain(2), batch_of(2), jax.random.key(3)


@pytest.fixture(scope="module")
def pipelined() -> MpmdFunction:
    """A step that has been traced without any setting."""
    compiled = mpmd_jit_with_loop(step, mesh_of(2))
    compiled(*arguments())
    return compiled


def as_plain(pipelined: MpmdFunction) -> None:
    expected, actual = jax.jit(step)(*arguments()), pipelined(*arguments())
    assert [x.dtype for x in jax.tree.leaves(actual)] == [x.dtype for x in jax.tree.leaves(expected)]
    # Products of 8 and means of 128 numbers of float32, summed in another order.
    tree_allclose(actual, expected, rtol=1e-5)


@pytest.mark.parametrize("setting", CHANGES.values(), ids=CHANGES)
def test_the_numbers_are_those_of_jit_under_the_same_setting(pipelined: MpmdFunction, setting: Context):
    before = pipelined.compile(*arguments())
    with setting():
        as_plain(pipelined)
        assert pipelined.compile(*arguments()) is not before
    as_plain(pipelined)
    assert pipelined.compile(*arguments()) is before


@pytest.mark.parametrize("setting", REFUSES.values(), ids=REFUSES)
def test_what_a_setting_forbids_is_refused_after_a_call_without_it(pipelined: MpmdFunction, setting: Context):
    with setting():
        for function in (jax.jit(step), pipelined):
            with pytest.raises(ValueError, match="promotion"):
                function(*arguments())
    as_plain(pipelined)


@pytest.mark.parametrize("setting", [*CHANGES.values(), *REFUSES.values()], ids=[*CHANGES, *REFUSES])
def test_without_the_private_name_the_public_settings_tell(monkeypatch: pytest.MonkeyPatch, setting: Context):
    monkeypatch.setattr(_compat, "_trace_context", None)
    before = _compat.trace_context()
    assert hash(before) == hash(_compat.trace_context())
    with setting():
        assert _compat.trace_context() != before
    assert _compat.trace_context() == before


def test_the_public_settings_see_the_mesh(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_compat, "_trace_context", None)
    before = _compat.trace_context()
    with jax.sharding.use_abstract_mesh(mesh_of(2).jax_mesh.abstract_mesh):
        assert _compat.trace_context() != before


def test_the_public_settings_are_all_settings(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_compat, "_trace_context", None)
    for name in ("jax_auto_pcast", "jax_threefry_gpu_kernel_lowering", "jax_remove_size_one_mesh_axis_from_type"):
        before, value = _compat.trace_context(), getattr(jax.config, name)
        jax.config.update(name, not value)
        try:
            assert _compat.trace_context() != before, name
        finally:
            jax.config.update(name, value)
        assert _compat.trace_context() == before
