"""Tensors of other libraries, arranged on the devices of their stage: the bits that a file would have."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxpp_flax.engine.arrays.mesh import MpmdMesh, MpmdSharding
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.engine.arrays.placing import place_on_ranks
from jaxpp_flax.pretrained import NameMap, Rule
from jaxpp_flax.trainers.weight_transfer.outgoing import outgoing_leaves, tensors_of

RULES = {
    "as it is": (Rule("w", "w"), (4, 6), lambda w: {"w": w}),
    "transposed": (Rule("w", "t", transpose=(1, 0)), (4, 6), lambda w: {"t": w.T}),
    "heads merged": (
        Rule("w", "q", merge=(2, 1), transpose=(2, 0, 1)), (4, 2, 6),
        lambda w: {"q": w.transpose(1, 2, 0).reshape(12, 4)},
    ),
    "a dimension more": (Rule("w", "c", merge=(1, 0, 1)), (4, 6), lambda w: {"c": w.reshape(4, 1, 6)}),
    "a stack": (
        Rule("w", "l.#", transpose=(1, 0), stack=1), (4, 2, 6),
        lambda w: {"l.0": w[:, 0].T, "l.1": w[:, 1].T},
    ),
}  # fmt: skip


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("name", RULES)
def test_tensors_of_leaves_in_parts(name: str, axis_type: AxisType):
    """Each dimension in parts, in turn: also one that the tensor has not as a whole."""
    rule, shape, expected = RULES[name]
    grid = np.array(jax.devices()[:4]).reshape(2, 2)
    mesh = MpmdMesh(Mesh(grid, ("stage", "fsdp"), axis_types=(axis_type,) * 2), "stage")
    value = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    for spec in (P(), *(P(*[None] * dim, "fsdp") for dim in range(len(shape)))):
        leaf = place_on_ranks(value, MpmdSharding(mesh, {1}, spec))
        tensors, faults = tensors_of(outgoing_leaves({"w": leaf}, {"w": leaf}), NameMap((rule,)))
        assert not faults
        wanted = expected(value)
        assert tensors.keys() == wanted.keys()
        for key, tensor in tensors.items():
            made = tensor.cast(jnp.bfloat16).make()
            assert isinstance(made, MpmdArray)
            assert made.shape == tensor.shape == wanted[key].shape
            assert made.dtype == jnp.bfloat16
            np.testing.assert_array_equal(tensor.make(), wanted[key], err_msg=f"{name}, {spec}")
            np.testing.assert_array_equal(made, wanted[key].astype(jnp.bfloat16))
            assert made.mpmd_idxs == (1,)


def test_faults_of_the_map():
    shapes = {"w": jax.ShapeDtypeStruct((2, 3), jnp.float32)}
    _, faults = tensors_of(outgoing_leaves(shapes, {}), NameMap((Rule("v", "v"),)))
    assert faults == ["w: no rule of the map fills it. Add a Rule for it, or name it in keep="]
