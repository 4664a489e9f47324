"""Run by `test_fetch_arguments.py` as two processes of two devices: arguments that lie elsewhere than they are read.

Each process compares with what it computes alone, on its own devices.
"""

from __future__ import annotations

import faulthandler
import time
from typing import Any

from tests.processes.running import join_run

join_run()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from jaxpp_flax import PipelineTrainer  # noqa: E402
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray, MpmdSharding  # noqa: E402
from jaxpp_flax.engine.arrays.placing import place_on_ranks  # noqa: E402
from jaxpp_flax.engine.jit import mpmd_jit_with_loop  # noqa: E402
from jaxpp_flax.engine.runtime.reshard import WantedArgument, bring  # noqa: E402
from jaxpp_flax.engine.runtime.transport.connection import DistributedProgram, process_connection  # noqa: E402
from jaxpp_flax.schedules import GPipe, Std1F1B  # noqa: E402
from tests.engine.toys import chain, sgd_step  # noqa: E402
from tests.helpers import batch_of, tree_allclose  # noqa: E402
from tests.processes.cases import mesh_of  # noqa: E402
from tests.trainers.models import Layers, squared_error  # noqa: E402

MESHES = {"rows": mesh_of(2, "rows"), "columns": mesh_of(2, "columns"), "single": mesh_of(4, "rows")}


def values() -> dict[str, Any]:
    """Random bits of each type, those of NaNs and infinities among them."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 256, 4096, np.uint8)
    return {
        "float32": bits.view(np.float32)[:24].reshape(4, 6),
        "bfloat16": bits.view(jnp.bfloat16)[:24].reshape(4, 6),
        "bool": rng.random((4, 3)) < 0.5,
        "int32": bits.view(np.int32)[:8].reshape(2, 4),
        "uint8": bits[:20].reshape(4, 5),
        "keys": jax.random.split(jax.random.key(3), 4),
        "key": jax.random.key(4),
        "scalar": np.float32(2.5),
        "empty": np.zeros((0, 3), np.int8),
        "large": rng.normal(size=(256, 1024)).astype(np.float32),
    }


def on_host(value: Any) -> np.ndarray:
    """Its values; of PRNG keys, their integers."""
    is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(value) if is_key else value)


def check_moves() -> None:
    """From some ranks to others and back: the same bits, with the same partition."""
    distributed = DistributedProgram(process_connection(), "test", "test")
    number = 0
    for mesh_name, mesh in MESHES.items():
        ranks = range(mesh.mpmd_dim)
        moves = [((0,), ranks), ((mesh.mpmd_dim - 1,), (0,)), ((0, 1), (1, mesh.mpmd_dim - 1))]
        for name, value in values().items():
            for spec in (P(), P("data")) if mesh_name != "single" and np.shape(value) else (P(),):
                for begin, wanted in moves:
                    leaf = place_on_ranks(value, MpmdSharding(mesh, begin, spec))
                    there = moved(leaf, wanted, distributed, number)
                    back = moved(there, begin, distributed, number + 1)
                    number += 2
                    for array in (there, back):
                        for rank, part in array._partially_addressable_arrays.items():
                            assert part.sharding.is_equivalent_to(array.sharding.local_sharding(rank), part.ndim)
                            for shard in part.addressable_shards:
                                where = f"{mesh_name}, {name}, {spec}, {begin} to {list(wanted)}, rank {rank}"
                                # Bytes, so that -0.0 and the kinds of NaN are told apart.
                                assert on_host(shard.data).tobytes() == on_host(value)[shard.index].tobytes(), where
        # What lies in host memory travels in device memory.
        value = values()["large"]
        hosted = place_on_ranks(value, MpmdSharding(mesh, {0}, P(), "pinned_host"))
        there = moved(hosted, (mesh.mpmd_dim - 1,), distributed, number)
        number += 1
        for part in there._partially_addressable_arrays.values():
            assert [np.array_equal(shard.data, value) for shard in part.addressable_shards].count(False) == 0
    print(f"{number} moves", flush=True)


def moved(leaf: MpmdArray, ranks: Any, distributed: DistributedProgram, number: int) -> MpmdArray:
    """The leaf on the ranks that it is brought to, and no others."""
    mesh = leaf.sharding.mpmd_mesh
    parts = bring(leaf, WantedArgument(mesh, tuple(ranks), leaf.spec, "['x']"), distributed, number, 0)
    assert set(parts) == {rank for rank in ranks if mesh.is_local(rank)}
    return MpmdArray(parts, MpmdSharding(mesh, ranks, leaf.spec), shape=leaf.shape, dtype=leaf.dtype)


def check_step() -> None:
    """A step whose arguments all lie on other ranks than those that read them."""
    state, batch = chain(2), batch_of(4)
    host = jax.tree.map(np.asarray, state)
    expected = jax.jit(sgd_step(None))(host, batch)
    for name in ("rows", "columns"):
        mesh = MESHES[name]
        step = mpmd_jit_with_loop(sgd_step(Std1F1B(2)), mesh, in_specs=(P("data"), P(None, "data")), donate_argnums=0)
        elsewhere = [MpmdSharding(mesh, {rank}, P("data")) for rank in (1, 0)]
        for _ in range(2):  # the second time, connections are there
            swapped = [
                jax.tree.map(lambda x, to=sharding: place_on_ranks(x, to), layer)
                for sharding, layer in zip(elsewhere, host, strict=True)
            ]
            actual = step(swapped, batch)
            for got, want in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
                for part in got._partially_addressable_arrays.values():
                    for shard in part.addressable_shards:
                        # Sums of float32 in another order, over the shards of a batch too.
                        tree_allclose(np.asarray(shard.data), np.asarray(want)[shard.index], rtol=1e-6)


def check_other_meshes() -> None:
    """From a mesh of other ranks to that of the step, partitioned anew."""
    state, batch = jax.tree.map(np.asarray, chain(2)), batch_of(4)
    expected = jax.tree.leaves(jax.jit(sgd_step(None))(state, batch)[0])
    for mesh, spec, begin in (
        (MESHES["rows"], P("data"), MpmdSharding(MESHES["single"], {3}, P())),
        (MESHES["rows"], P("data"), MpmdSharding(MESHES["rows"], {1}, P(None, "data"))),
        (MESHES["columns"], P(), MpmdSharding(MESHES["single"], {1, 2}, P())),
        # A part of each replica is in the other process.
        (MESHES["columns"], P(), MpmdSharding(MESHES["columns"], {0}, P("data"))),
        (MESHES["columns"], P(), MpmdSharding(MESHES["rows"], {0}, P(None, "data"))),
        (MESHES["columns"], P("data"), MpmdSharding(MESHES["rows"], {1}, P(None, "data"))),
    ):
        given = [{"w": place_on_ranks(state[0]["w"], begin), "b": state[0]["b"]}, state[1]]
        params = mpmd_jit_with_loop(sgd_step(GPipe(2)), mesh, in_specs=(spec, P()))(given, batch)[0]
        for got, want in zip(jax.tree.leaves(params), expected, strict=True):
            for part in got._partially_addressable_arrays.values():
                for shard in part.addressable_shards:
                    tree_allclose(np.asarray(shard.data), np.asarray(want)[shard.index], rtol=1e-6)


def check_refusals() -> None:
    """What does not move by itself is refused in every process, before anything is sent."""
    rows, columns = MESHES["rows"], MESHES["columns"]
    state, batch = jax.tree.map(np.asarray, chain(2)), batch_of(4)
    step = mpmd_jit_with_loop(sgd_step(GPipe(2)), columns, in_specs=(P(), P()))
    w = state[0]["w"]
    over_all = jax.make_array_from_callback(w.shape, NamedSharding(rows.jax_mesh, P("stage")), lambda index: w[index])
    try:
        step([{"w": over_all, "b": state[0]["b"]}, state[1]], batch)
    except ValueError as error:
        print(f"cut over all: {error}", flush=True)
    # The step is as it was.
    losses = step(state, batch)[1]
    tree_allclose(np.asarray(losses), np.asarray(jax.jit(sgd_step(None))(state, batch)[1]), rtol=1e-6)


class Model(Layers):
    """Four layers, one of which has a state of its own."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(4, 8, rngs=rngs)
        self.seen = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.seen.set_value(self.seen.get_value() + x.shape[0])
        return super().__call__(x)


def training(batches: Any, mesh: jax.sharding.Mesh) -> list[float]:
    """Losses and weights of a training in which schedule and number of stages change."""
    trainer = PipelineTrainer(
        Model(nnx.Rngs(0)),
        optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9)),
        squared_error,
        num_stages=2,
        num_microbatches=4,
        schedule="gpipe",
        mesh=mesh,
        logging=False,
    )
    found = [float(trainer.train_step(batch)["loss"]) for batch in batches[:2]]
    trainer.use_schedule("interleaved_1f1b", num_stages=4)
    found += [float(trainer.train_step(batch)["loss"]) for batch in batches[2:4]]
    trainer.use_schedule("gpipe", num_stages=2)
    found += [trainer.evaluate(batches[:1])["loss"]]  # moves the parameters too
    found += [float(trainer.train_step(batch)["loss"]) for batch in batches[4:]]
    leaves = jax.tree.leaves(nnx.state(trainer.gather_model()))
    return found + [float(np.abs(leaf).sum()) for leaf in leaves]


def check_schedules() -> None:
    """`use_schedule` moves the state; losses and weights are those of one process alone."""
    batches = [jax.tree.map(lambda leaf: np.asarray(leaf[0]), batch_of(1, seed=seed)) for seed in range(6)]
    first_of_each = MESHES["rows"].jax_mesh.devices[:, 0]
    alone, across = (jax.sharding.Mesh(np.array(d), ("stage",)) for d in (jax.local_devices(), first_of_each))
    tree_allclose(np.array(training(batches, across)), np.array(training(batches, alone)), rtol=1e-6)


def main() -> None:
    faulthandler.dump_traceback_later(200, exit=True)
    for check in (check_moves, check_step, check_other_meshes, check_refusals, check_schedules):
        begun = time.monotonic()
        check()
        print(f"{check.__name__}: {time.monotonic() - begun:.1f} s", flush=True)
    print("all done", flush=True)


main()
