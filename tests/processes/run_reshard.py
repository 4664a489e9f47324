"""Run by `engine/runtime/test_reshard.py` as two processes: each owns one rank of two devices."""

from __future__ import annotations

from tests.processes.running import join_run

join_run()

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from jaxpp_flax.engine.arrays.mesh import MpmdMesh, MpmdSharding  # noqa: E402
from jaxpp_flax.engine.runtime.reshard import mpmd_to_spmd_reshard, spmd_to_mpmd_reshard  # noqa: E402

me = jax.process_index()
mesh = MpmdMesh(Mesh(np.array(jax.devices()).reshape(2, 2), ("stage", "fsdp")), "stage")
assert mesh.local_ranks == (me,)
assert mesh.lowering_mesh() == mesh.unstack[me]
value = np.arange(16, dtype=np.float32).reshape(8, 2)
everywhere = NamedSharding(mesh.jax_mesh, P(("stage", "fsdp")))
spread = jax.make_array_from_callback(value.shape, everywhere, lambda index: value[index])
places = ({0}, P("fsdp")), ({1}, P()), ({0, 1}, P())
shardings = [MpmdSharding(mesh, ranks, spec) for ranks, spec in places]
there = spmd_to_mpmd_reshard(mesh, [spread, value, np.int32(5)], shardings)
assert spread.is_deleted()
assert [x.is_partially_addressable for x in there] == [me == 0, me == 1, True]
assert there[0].is_fully_addressable == (me == 0)
assert there[0].shape == (8, 2)
if me == 1:
    with pytest.raises(RuntimeError, match="lives on rank 0, whose devices belong to process 0"):
        np.asarray(there[0])
    assert "mpmd_idxs=(0,), sharding=NamedSharding(" in repr(there[0])
    assert not there[0].as_jax_array().addressable_shards
else:
    np.testing.assert_array_equal(there[0], value)
assert int(there[2]) == 5
assert there[2].as_jax_array().sharding == shardings[2]
moved = spmd_to_mpmd_reshard(mesh, there, [shardings[1], shardings[0], shardings[2]])
back = mpmd_to_spmd_reshard(mesh, moved, NamedSharding(mesh.jax_mesh, P()))
for array, expected in zip(back, [value, value, np.int32(5)], strict=True):
    np.testing.assert_array_equal(array, expected)

# Every kind of value, from any partition to any other, with the same bits.
keys, bits = jax.random.split(jax.random.key(3), 4), np.array([-0.0, np.nan, np.inf, 1e-45], np.float32)
tree = {"keys": keys, "bits": bits, "empty": np.zeros((0, 4), np.int8), "bool": np.array([True, False, True, True])}
swapped = {name: MpmdSharding(mesh, {1}, P(None if name == "empty" else "fsdp")) for name in tree}
for kind in (None, "pinned_host"):
    there = spmd_to_mpmd_reshard(mesh, tree, MpmdSharding(mesh, {0}, P(), kind), donate=False)
    there = spmd_to_mpmd_reshard(mesh, there, swapped)
    whole = mpmd_to_spmd_reshard(mesh, there, NamedSharding(mesh.jax_mesh, P(), memory_kind=kind))
    for name, array in whole.items():
        data = [jax.random.key_data(x) if name == "keys" else np.asarray(x) for x in (array, tree[name])]
        assert np.asarray(data[0]).tobytes() == np.asarray(data[1]).tobytes(), name
        assert kind is None or array.sharding.memory_kind == kind
# An array of one process alone: the other one refuses it.
first = NamedSharding(mesh.unstack[0], P())
alone = jax.make_array_from_callback((2,), first, lambda index: np.zeros(2, np.float32), dtype=np.float32)
if me == 1:
    with pytest.raises(ValueError, match=r"leaf \(the whole tree\) is only on devices of process 0"):
        spmd_to_mpmd_reshard(mesh, alone, shardings[2])
print("good", flush=True)
