"""An axis that divides batch and parameters, on described machines: what the compilers of TPUs and GPUs make of it."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpp_flax.planning.compilers.tasks import exchanges, read_task
from tests.compilers.machines import ONE_HOST, TWO_HOSTS, mesh_of
from tests.compilers.small import (
    KERNEL_BYTES,
    PARAMETER_BYTES,
    WIDTH,
    Block,
    around_loop,
    compiled_for,
    moved,
    of_loop,
    told,
)

pytestmark = pytest.mark.compilers

LAYERS, ROWS = 2, 24  # of a scan; on each shard of the batch
KERNELS = 4 * KERNEL_BYTES  # of two blocks
BIASES = 2 * PARAMETER_BYTES - KERNELS  # whole on every device
LOSS = 4


def sharded(rngs: nnx.Rngs) -> Block:
    return Block(rngs, ("fsdp", None))


class Scanned(nnx.Module):
    """A layer that is whole on every device, then blocks whose weights lie in one array each."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        make = nnx.vmap(sharded, in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: None})
        self.layers = make(rngs.split(LAYERS))

    def __call__(self, x: jax.Array) -> jax.Array:
        scan = nnx.scan(
            lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry,
            transform_metadata={nnx.PARTITION_NAME: None},
        )  # fmt: skip
        return scan(self.first(x), self.layers)


@pytest.mark.parametrize("machine", ONE_HOST)
def test_a_scan_of_layers_keeps_the_batch_divided(machine: str):
    """What the forward hands on and keeps; and it exchanges weights, not activations."""
    compiled = compiled_for(machine, {"fsdp": 2}, Scanned, rows=ROWS)
    ((forward, executable),) = [
        (task, executable)
        for task, executable in zip(compiled.program.tasks, compiled.executables.tasks, strict=True)
        if task.name == "fwd_0"
    ]
    shards = [
        (atom.aval.shape, sharding.shard_shape(atom.aval.shape))
        for atom, sharding in zip(forward.graph.outputs, executable.output_shardings, strict=True)
    ]
    held = [shard for shape, shard in shards if 2 * ROWS in shape]
    assert held
    assert all(ROWS in shard for shard in held), shards
    assert {kind for kind, _ in moved(of_loop(told(compiled)))} == {"all-gather", "reduce-scatter"}


@pytest.mark.parametrize("machine", TWO_HOSTS)
def test_gradients_of_sharded_weights_are_reduced_over_data_once_in_a_step(machine: str):
    """Each microbatch gathers weights, and scatters its gradients over `fsdp` alone."""
    report = told(compiled_for(machine, {"data": 2, "fsdp": 2}, sharded))
    assert {axes for _, axes in moved(of_loop(report))} == {("fsdp",)}
    assert moved(around_loop(report)) == {
        ("all-reduce", ("data",)): KERNELS // 2,
        ("all-reduce", ("data", "fsdp")): BIASES + LOSS,
    }


@pytest.mark.parametrize("machine", TWO_HOSTS)
def test_weights_are_gathered_before_the_loop_and_gradients_scattered_after_it(machine: str):
    """Also where the update reads every gradient for a norm first, and `data` is beside `fsdp`."""
    norm = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    report = told(
        compiled_for(machine, {"data": 2, "fsdp": 2}, sharded, fsdp="step", tx=norm)
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
