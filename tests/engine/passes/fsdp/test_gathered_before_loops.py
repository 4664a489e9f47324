"""Parameters that a step changes before its loops are gathered once, or the user is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.engine.jit import mpmd_jit_with_loop
from jaxpp_flax.engine.passes.fsdp.rule import FsdpWarning
from jaxpp_flax.engine.tracing.markers import mark_stage_end
from jaxpp_flax.engine.tracing.treduce import Concat, treduce
from jaxpp_flax.schedules import Std1F1B
from tests.engine.toys import mesh_of
from tests.helpers import tree_allclose
from tests.matrix.test_fsdp import executed

DIM, HOST, DEVICE = 8, jax.memory.Space.Host, jax.memory.Space.Device
SPECS = ([P("fsdp")] * 2, P(None, "fsdp"))


def gradients(weights: Any, batch: Any) -> Any:
    def loss(w: Any, x: Any) -> Any:
        return jnp.mean((mark_stage_end(jnp.tanh(x @ w[0])) @ w[1]) ** 2)

    return treduce(lambda x: jax.value_and_grad(loss)(weights, x), batch, schedule=Std1F1B(2))


def arguments() -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    weights = [random.normal(size=(DIM, DIM)).astype(np.float32) for _ in range(2)]
    return weights, random.normal(size=(4, 4, DIM)).astype(np.float32)


def placed(step: Callable[..., Any], specs: Any = SPECS, mesh: MpmdMesh | None = None, *more: Any) -> None:
    """All passes over a step, and nothing compiled."""
    mpmd_jit_with_loop(step, mesh or mesh_of(2, fsdp=2), in_specs=specs, fsdp="step").place(*arguments(), *more)


def compared(step: Callable[..., Any]) -> Any:
    """Compare a step with plain `jax.jit`; return the compiled step."""
    pipelined = mpmd_jit_with_loop(step, mesh_of(2, fsdp=2), in_specs=SPECS, fsdp="step")
    found = jax.tree.map(np.asarray, pipelined(*arguments()))
    # Sums over two shards of the examples, in float32.
    tree_allclose(found, jax.jit(step)(*arguments()), rtol=1e-5, atol=1e-6)
    return pipelined.compile(*arguments())


def test_a_weight_that_is_transposed_and_scaled_is_gathered_once():
    compiled = compared(lambda w, b: gradients([-(w[0].T / 3), 0.5 * w[1]], b))
    assert "all-gather" not in executed(compiled, in_loop=True)
    assert executed(compiled, in_loop=False)["all-gather"] == 2


def test_weights_that_are_fetched_from_the_host_are_gathered_once():
    mesh = mesh_of(2, fsdp=2)
    host = NamedSharding(mesh.unstack[0], P("fsdp"), memory_kind="pinned_host")

    def step(w: Any, b: Any) -> Any:
        fetched = [jax.device_put(x, DEVICE) for x in w]
        losses, grads = gradients(fetched, b)
        return [jax.device_put(x - 0.1 * g, HOST) for x, g in zip(fetched, grads, strict=True)], losses

    pipelined = mpmd_jit_with_loop(step, mesh, in_shardings=([host] * 2, SPECS[1]), fsdp="step")
    weights, batch = arguments()
    found = pipelined(jax.device_put(weights, host), batch)
    assert {x.sharding.memory_kind for x in found[0]} == {"pinned_host"}
    expected = jax.jit(step)(weights, batch)
    tree_allclose(found, expected, rtol=1e-5, atol=1e-6)
    compiled = pipelined.compile(jax.device_put(weights, host), batch)
    assert "all-gather" not in executed(compiled, in_loop=True)
    assert executed(compiled, in_loop=False)["all-gather"] == 2


@pytest.mark.parametrize(
    "change", [lambda w: w[0].reshape(-1).reshape(DIM, DIM), lambda w: w[0] + w[1] @ w[1]], ids=["reshape", "lora"]
)
def test_other_changes_are_named(change: Callable[..., Any]):
    text = r"a loop reads float32\[8,8\], which is made before the loop of argument\S*\[0\], .* inside the loop"
    with pytest.warns(FsdpWarning, match=text):
        placed(lambda w, b: gradients([change(w), w[1]], b))


def test_a_norm_of_a_weight_is_no_weight():
    def step(w: Any, b: Any) -> Any:
        norm = jnp.sqrt(jnp.sum(w[0] ** 2, axis=0))
        return treduce(lambda x: (mark_stage_end(x @ w[0]) / norm) @ w[1], b, schedule=Std1F1B(2), operation=Concat())

    assert executed(compared(step), in_loop=False)["all-gather"] == 2


def test_the_order_of_axes_in_one_dimension_is_named():
    def step(w: Any, b: Any) -> Any:
        losses, grads = gradients(w, b)
        return [x - 0.1 * g for x, g in zip(w, grads, strict=True)], losses

    specs = ([P(("fsdp", "tensor"))] * 2, SPECS[1])
    with pytest.warns(
        FsdpWarning, match=r"argument\S*\[\d\], .* over \('fsdp', 'tensor'\) .* over \('tensor', 'fsdp'\)"
    ):
        placed(step, specs, mesh_of(2, fsdp=2, tensor=2))


def test_a_weight_of_two_loops_is_gathered_once():
    def step(w: Any, b: Any) -> Any:
        return gradients(w, b), gradients(w, 2 * b)

    assert executed(compared(step), in_loop=False)["all-gather"] == 2


def test_a_second_input_is_seen_and_a_placed_weight_is_left_alone():
    def step(w: Any, b: Any, mask: Any) -> Any:
        return gradients([mask * w[0], w[1]], b)

    mask = np.ones((DIM, DIM), np.float32)
    with pytest.warns(FsdpWarning, match="a sharded parameter"):
        placed(step, (*SPECS, P()), None, mask)

    def constrained(w: Any, b: Any, mask: Any) -> Any:
        whole = NamedSharding(mesh_of(2, fsdp=2).unstack[0].abstract_mesh, P())
        return gradients([jax.lax.with_sharding_constraint(mask * w[0], whole), w[1]], b)

    placed(constrained, (*SPECS, P()), None, mask)  # warnings are errors
