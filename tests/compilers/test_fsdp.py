"""`fsdp="step"` on described machines: what the compilers of TPUs and GPUs make of it, and why it has passes."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpp_flax.planning.compilers.tasks import exchanges, read_task
from tests.compilers.machines import TWO_HOSTS, mesh_of
from tests.compilers.small import KERNEL_BYTES, PARAMETER_BYTES, Block, around_loop, compiled_for, moved, of_loop, told

pytestmark = pytest.mark.compilers

KERNELS = 4 * KERNEL_BYTES  # of two blocks
BIASES = 2 * PARAMETER_BYTES - KERNELS  # whole on every device


@pytest.mark.parametrize("machine", TWO_HOSTS)
def test_weights_are_gathered_before_the_loop_and_gradients_scattered_after_it(machine: str):
    """Also where the update reads every gradient for a norm first, and `data` is beside `fsdp`."""
    norm = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    report = told(
        compiled_for(
            machine, {"data": 2, "fsdp": 2}, lambda rngs: Block(rngs, ("fsdp", None)), fsdp="step", tx=norm
        )
    )  # fmt: skip
    assert moved(of_loop(report)) == {}
    assert moved(around_loop(report)) == {
        ("all-gather", ("fsdp",)): KERNELS,
        ("reduce-scatter", ("fsdp",)): KERNELS,
        ("all-reduce", ("data",)): KERNELS // 2,
        ("all-reduce", ("data", "fsdp")): BIASES,
    }


@pytest.mark.parametrize("machine", TWO_HOSTS)
def test_a_plain_sum_of_partial_gradients_is_not_scattered(machine: str):
    """The reason for `scatter_gradients`: over two axes, both compilers reduce the whole gradient onto each device.

    A compiler that fails this test makes the pass superfluous.
    """
    mesh = Mesh(mesh_of(machine, {"stage": 2, "data": 2, "fsdp": 2}).devices[0], ("data", "fsdp"))
    shards, parts = NamedSharding(mesh, P("fsdp")), NamedSharding(mesh, P(("data", "fsdp")))

    def update(weight: jax.Array, gradient: jax.Array) -> jax.Array:
        return weight - 0.1 * jax.lax.with_sharding_constraint(gradient.sum(0), shards)

    shape = (1024, 1024)
    structs = (jax.ShapeDtypeStruct(shape, np.float32), jax.ShapeDtypeStruct((4, *shape), np.float32))
    jitted = jax.jit(update, in_shardings=(shards, parts), out_shardings=shards, donate_argnums=0)
    (found,) = exchanges(read_task(jitted.lower(*structs).compile()).text.collectives, mesh.shape)
    assert (found.kind, found.axes, found.nbytes) == ("all-reduce", ("data", "fsdp"), 4 * 1024 * 1024)
