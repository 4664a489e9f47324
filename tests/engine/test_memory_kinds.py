"""Kinds of memory: what lies on the host comes in, goes through the step and comes out as under plain `jax.jit`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxpp_flax.checkpoint import restore, save
from jaxpp_flax.engine.arrays.mesh import MpmdMesh, MpmdSharding
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.engine.jit import mpmd_jit_with_loop
from jaxpp_flax.engine.program.program import Transfer
from jaxpp_flax.engine.runtime import instruction_loop
from jaxpp_flax.engine.runtime.reshard import WantedArgument, mpmd_to_spmd_reshard, spmd_to_mpmd_reshard
from jaxpp_flax.engine.tracing.markers import mark_stage_end
from jaxpp_flax.planning.predicted.placed_step import predict_memory
from jaxpp_flax.schedules import GPipe, Std1F1B
from tests.engine.toys import chain, gradients, mesh_of
from tests.helpers import batch_of, slow, tree_allclose

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
SPMD_HOST = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")


def stages(kind: AxisType = AxisType.Auto) -> MpmdMesh:
    return mesh_of(2, kind, x=2)


def momentum_step(params: Any, momentum: Any, batch: Any) -> Any:
    """SGD with momentum that is kept on the host and comes to the devices for its update."""
    losses, grads = gradients(Std1F1B(2))(params, batch)
    moved = jax.tree.map(lambda m: jax.device_put(m, DEVICE), momentum)
    moved = jax.tree.map(lambda m, g: 0.9 * m + g, moved, grads)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, params, moved)
    return params, jax.tree.map(lambda m: jax.device_put(m, HOST), moved), losses


def kinds(tree: Any) -> set[tuple[str | None, ...]]:
    """What a tree's shardings say of memory, and what its replicas do."""
    return {
        (x.sharding.memory_kind, *{part.sharding.memory_kind for part in x._partially_addressable_arrays.values()})
        for x in jax.tree.leaves(tree)
    }


def same(actual: Any, expected: Any) -> None:
    """A few sums of float32 in another order: 1e-6 is sixteen units in the last place."""
    tree_allclose(actual, expected, rtol=1e-6)


@pytest.mark.parametrize("kind", [AxisType.Auto, slow(AxisType.Explicit)])
def test_state_on_the_host_goes_in_and_out(kind: AxisType):
    mesh = stages(kind)
    on_host = NamedSharding(mesh.unstack[0], P("x" if kind is AxisType.Auto else None), memory_kind="pinned_host")
    momentum = jax.device_put(jax.tree.map(np.zeros_like, chain(2)), on_host)
    step = mpmd_jit_with_loop(momentum_step, mesh, donate_argnums=(0, 1))
    compiled = step.compile(chain(2), momentum, batch_of(2))
    (_, promised, _), _ = compiled.in_shardings
    assert {s.memory_kind for s in jax.tree.leaves(promised)} == {"pinned_host"}
    assert {s.memory_kind for s in jax.tree.leaves(compiled.out_shardings[1])} == {"pinned_host"}
    state = chain(2), momentum
    plain = (
        chain(2),
        jax.device_put(
            jax.tree.map(np.zeros_like, chain(2)), SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
        ),
    )
    for _ in range(2):
        *state, losses = step(*state, batch_of(2))
        *plain, expected = jax.jit(momentum_step)(*plain, batch_of(2))
        assert kinds(state[0]) == {("device", "device")}
        assert kinds(state[1]) == {("pinned_host", "pinned_host")}
        assert {x.sharding.memory_kind for x in jax.tree.leaves(plain[1])} == {"pinned_host"}
        same((*state, losses), (*plain, expected))


def test_memory_asked_for_by_shardings():
    """Of arguments however they come, of results wherever they come from, and back to the devices."""
    mesh = stages()
    host, device = (NamedSharding(mesh.unstack[0], P("x"), memory_kind=m) for m in ("pinned_host", "device"))

    def step(params: Any, batch: Any, extra: Any) -> Any:
        losses, grads = gradients(Std1F1B(2))(params, batch)
        doubled = jax.device_put(extra, DEVICE) * 2
        return losses, grads[1]["w"], grads[1]["w"], extra, extra, doubled, doubled

    pipelined = mpmd_jit_with_loop(
        step, mesh, in_shardings=(None, None, host), out_shardings=(host, host, None, device, None, host, device)
    )
    results = pipelined(chain(2), batch_of(2), np.arange(8, dtype=np.float32))
    found = [next(iter(kinds(result))) for result in results]
    wanted = ["pinned_host", "pinned_host", "device", "device", "pinned_host", "pinned_host", "device"]
    assert found == [(kind, kind) for kind in wanted]
    assert [r.spec for r in (results[0], results[1], results[3], results[5])] == [P("x")] * 4
    plain_extra = jax.device_put(jnp.arange(8.0), SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host"))
    same(results, jax.jit(step)(chain(2), batch_of(2), plain_extra))


@pytest.mark.parametrize("donate", [(), (0, 1)])
def test_bytes_on_the_host_are_counted(donate: tuple[int, ...]):
    """New momentum takes the place of donated momentum; else it takes as many bytes as the step was given."""
    momentum = jax.device_put(jax.tree.map(np.zeros_like, chain(2)), SPMD_HOST)
    plan = mpmd_jit_with_loop(momentum_step, mesh_of(2), donate_argnums=donate).place(chain(2), momentum, batch_of(2))
    each = sum(leaf.nbytes for leaf in jax.tree.leaves(chain(1)))
    assert [row.host_peak_bytes for row in predict_memory(plan)] == [0 if donate else each] * 2


def test_what_a_policy_offloads_is_counted():
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["h"], offload_src="device", offload_dst="pinned_host"
    )

    def loss(params: Any, mb: Any) -> jax.Array:
        def block(w: jax.Array, x: jax.Array) -> jax.Array:
            return jnp.tanh(checkpoint_name(jnp.sin(x @ w), "h"))

        x = mark_stage_end(jax.checkpoint(block, policy=policy)(params[0]["w"], mb["x"]))
        return jnp.mean((x @ params[1]["w"] - mb["y"]) ** 2)

    microbatches, batch = 3, batch_of(3)
    step = gradients(GPipe(2), loss)
    pipelined = mpmd_jit_with_loop(step, mesh_of(2))
    rows = pipelined.compile(chain(2), batch).memory_analysis()
    offloaded = batch["x"].nbytes // microbatches  # the layer is square
    assert [row.host_peak_bytes for row in rows] == [microbatches * offloaded, 0]
    same(pipelined(chain(2), batch), jax.jit(step)(chain(2), batch))


def offloading_loss(params: Any, batch: Any) -> jax.Array:
    """A skip connection that waits on the host, across a mark."""
    x = jnp.tanh(batch["x"] @ params[0]["w"])
    waiting = jax.device_put(x, HOST, src=DEVICE)  # without `src`, JAX itself leaves the gradient on the host
    x, waiting = mark_stage_end((x, waiting))
    x = jnp.tanh(x @ params[1]["w"]) + jax.device_put(waiting, DEVICE)
    return jnp.mean((x - batch["y"]) ** 2)


def test_values_on_the_host_between_stages():
    step = gradients(Std1F1B(2), offloading_loss)
    pipelined = mpmd_jit_with_loop(step, stages())
    same(pipelined(chain(2), batch_of(2)), jax.jit(step)(chain(2), batch_of(2)))
    compiled = pipelined.compile(chain(2), batch_of(2))
    sent = [
        compiled.executables.held[value].aval
        for instruction in compiled.program.instructions
        if isinstance(instruction, Transfer)
        for value in instruction.sent
    ]
    assert any("Host" in str(aval.memory_space) for aval in sent)
    with pytest.raises(ValueError, match=r"float32\[16, ?8\] in 'pinned_host' memory goes from rank 0 to rank 1.*sent"):
        instruction_loop._refuse_other_memory(compiled.program, compiled.executables)


def refused(text: str, step: Any, *args: Any, **options: Any) -> None:
    with pytest.raises(ValueError, match=text):
        mpmd_jit_with_loop(step, stages(), **options).compile(*args)


def test_refusals():
    step, params, batch = gradients(Std1F1B(2)), chain(2), batch_of(2)
    elsewhere = NamedSharding(stages().unstack[0], P(), memory_kind="unpinned_host")
    refused(r"out_specs\[0\]|out_shardings\[0\] has the memory kind 'unpinned_host'", step, params, batch,
            out_shardings=(elsewhere, None))  # fmt: skip
    refused(r"in_specs\[0\] has the memory kind 'unpinned_host'", step, params, batch, in_shardings=(elsewhere, None))
    refused(r"argument\['batch'\]\['x'\] has the memory kind 'unpinned_host'|argument\[1\]\['x'\] has", step, params,
            jax.device_put(batch, elsewhere))  # fmt: skip

    def on_host(params: Any, mb: Any) -> Any:
        params = jax.tree.map(lambda p: jax.device_put(p, DEVICE), params)
        return offloading_loss(params, mb)

    host = NamedSharding(stages().unstack[0], P(), memory_kind="pinned_host")
    refused(
        r"body returns float32\[8, 8\] in 'pinned_host' memory \(leaf \[1\]\[1\]\[0\]\['w'\]\).*Space.Device",
        gradients(Std1F1B(2), on_host), params, batch, in_shardings=(host, None),
    )  # fmt: skip


def test_from_mesh_to_mesh_and_to_disk(tmp_path: Any):
    """Resharding and checkpoints keep the memory that a sharding names."""
    mesh = stages()
    there = MpmdSharding(mesh, {1}, P("x"), "pinned_host")
    moved = spmd_to_mpmd_reshard(mesh, {"m": np.arange(8.0, dtype=np.float32)}, there)
    assert kinds(moved) == {("pinned_host", "pinned_host")}
    assert kinds(MpmdArray(moved["m"]._partially_addressable_arrays, moved["m"].sharding)) == kinds(moved)
    save(tmp_path / "checkpoint", moved)
    assert kinds(restore(tmp_path / "checkpoint", moved)) == {("pinned_host", "pinned_host")}
    back = mpmd_to_spmd_reshard(mesh, moved, NamedSharding(mesh.jax_mesh, P(), memory_kind="pinned_host"))
    assert back["m"].sharding.memory_kind == "pinned_host"
    np.testing.assert_array_equal(back["m"], np.arange(8.0))


def test_an_argument_in_another_memory_is_not_what_the_step_wants():
    mesh = stages()
    on_host = spmd_to_mpmd_reshard(
        mesh, np.arange(8.0, dtype=np.float32), MpmdSharding(mesh, {1}, P("x"), "pinned_host")
    )
    assert WantedArgument(mesh, (1,), P("x"), "", "pinned_host").is_met_by(on_host)
    assert not WantedArgument(mesh, (1,), P("x"), "").is_met_by(on_host)
