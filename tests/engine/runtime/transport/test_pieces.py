"""Regions of arrays: a shard is cut, and joined again from a grid of regions."""

from __future__ import annotations

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp_flax.engine.runtime.transport import pieces

VALUES = {
    "float32": np.arange(24, dtype=np.float32).reshape(4, 6),
    "bfloat16": np.arange(24).astype(jnp.bfloat16).reshape(4, 6),
    "bool": np.arange(24).reshape(4, 6) % 3 == 0,
    "with a third dimension": np.arange(48, dtype=np.uint32).reshape(4, 6, 2),
}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("steps", [(1, 6), (4, 2), (2, 3)])
def test_what_is_cut_joins_in_any_order(name: str, steps: tuple[int, int]):
    array = jnp.asarray(VALUES[name])
    grid = product(*(range(0, size, step) for size, step in zip((4, 6), steps, strict=True)))
    parts = [tuple((start, start + step) for start, step in zip(starts, steps, strict=True)) for starts in grid]
    cuts = [(part, pieces.cut(array, part)) for part in parts]
    for part, piece in cuts:
        assert piece.shape == (*pieces.size_of(part), *array.shape[2:])
    np.testing.assert_array_equal(pieces.join(cuts[::-1]), array)


def test_the_devices_stay_and_a_mesh_around_the_call_does_not_matter():
    device = jax.devices()[3]
    array = jax.device_put(np.arange(8.0, dtype=np.float32), device)
    with jax.set_mesh(jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))):
        halves = [(part, pieces.cut(array, part)) for part in (((4, 8),), ((0, 4),))]
        whole = pieces.join(halves)
    assert {*halves[0][1].devices(), *whole.devices()} == {device}
    np.testing.assert_array_equal(whole, array)


def test_a_cut_has_memory_of_its_own():
    array = jnp.arange(8.0)
    half = pieces.cut(array, ((0, 4),))
    array.delete()
    np.testing.assert_array_equal(half, np.arange(4.0))
