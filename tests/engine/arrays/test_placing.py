"""Arguments onto their ranks: where ranks share devices, no two of them give one buffer away."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.engine.arrays.placing import place
from jaxpp_flax.engine.jit import mpmd_jit_with_loop
from jaxpp_flax.schedules import Std1F1B
from tests.engine.toys import chain, gradients
from tests.helpers import batch_of, slow, tree_allclose


def counting_step(state: Any, batch: Any) -> Any:
    """SGD whose rate falls with a count, as Adam's correction does: every rank reads the count, and makes the next."""
    params, count = state
    losses, grads = gradients(Std1F1B(2))(params, batch)
    rate = 0.1 / (count + 1).astype(jnp.float32)
    return (jax.tree.map(lambda p, g: p - rate * g, params, grads), count + 1), losses


def ranks_on(*devices: Any) -> MpmdMesh:
    """A row of devices for each rank."""
    return MpmdMesh(Mesh(np.array(devices), ("stage", "data")), "stage")


ONE, TWO = jax.devices()[:2]


ON_ONE, CROSSWISE = ranks_on([ONE], [ONE]), ranks_on([ONE, TWO], [TWO, ONE])


@pytest.mark.parametrize(
    ("mesh", "committed"), [(ON_ONE, False), slow(ON_ONE, True), slow(CROSSWISE, False), (CROSSWISE, True)], ids=str
)
def test_a_donated_array_that_ranks_of_one_device_read(mesh: MpmdMesh, committed: bool):
    """Adam's count, as it comes before the first step: a plain array, of which each rank wants a replica."""
    count = jax.device_put(jnp.int32(0), ONE) if committed else jnp.int32(0)
    state, expected = (chain(2), count), (chain(2), jnp.int32(0))
    step = mpmd_jit_with_loop(counting_step, mesh, donate_argnums=0)
    for _ in range(2):
        state, losses = step(state, batch_of(2))
        expected, expected_losses = jax.jit(counting_step)(expected, batch_of(2))
    # A few sums of float32 in another order: 1e-6 is sixteen units in the last place.
    tree_allclose(
        (state, losses),
        (expected, expected_losses),
        rtol=1e-6,
    )
    assert count.is_deleted()


def test_an_array_that_comes_back_as_it_went_in_may_be_donated_to_the_next_step():
    """Both ranks return the count that they were given: their replicas share no memory that one could give away."""
    mesh = ON_ONE

    def same(state: Any, batch: Any) -> Any:
        (params, _), losses = counting_step(state, batch)
        return params, state[1], losses

    _, count, losses = mpmd_jit_with_loop(same, mesh)((chain(2), jnp.int32(3)), batch_of(2))
    assert count.mpmd_idxs == (0, 1)
    step = mpmd_jit_with_loop(counting_step, mesh, donate_argnums=0)
    (_, counted), again = step((chain(2), count), batch_of(2))
    assert int(counted) == 4
    np.testing.assert_array_equal(again, losses)


def test_memory_of_its_own_where_an_array_is_partitioned_anew():
    """`jax.device_put` copies only what has to move, even with `may_alias=False`."""
    whole = jax.device_put(jnp.arange(4.0), ONE)
    target = NamedSharding(Mesh(np.array([ONE, TWO]), ("data",)), PartitionSpec())
    copy = place(whole, target, may_alias=False)
    whole.delete()
    np.testing.assert_array_equal(copy, np.arange(4.0))


def test_memory_of_its_own_for_an_aligned_numpy_array():
    """On CPU `jax.device_put` takes the memory of an array that begins at a multiple of 64 bytes."""
    memory = np.zeros(64 + 64, np.uint8)
    begin = -memory.ctypes.data % 64
    users = memory[begin : begin + 64].view(np.float32)
    copy = place(users, jax.sharding.SingleDeviceSharding(ONE), may_alias=False)
    replicas = place(users, NamedSharding(Mesh(np.array([ONE, TWO]), ("data",)), PartitionSpec()), may_alias=False)
    users[:] = 5
    np.testing.assert_array_equal(copy, np.zeros(16))
    np.testing.assert_array_equal(replicas, np.zeros(16))
    first, second = (shard.data.unsafe_buffer_pointer() for shard in replicas.addressable_shards)
    assert first != second
