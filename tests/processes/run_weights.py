"""Run by `test_weights.py` as several processes of two devices: weights go to samplers on devices of several processes.

A stage is on the first device of each process.
"""

from __future__ import annotations

import faulthandler
from collections.abc import Sequence
from typing import Any

from tests.processes.running import join_run, tell

join_run()

import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from jaxpp_flax import PipelineTrainer  # noqa: E402
from jaxpp_flax.checkpoint.format.paths import flatten  # noqa: E402
from jaxpp_flax.engine.runtime.transport.connection import process_connection  # noqa: E402
from jaxpp_flax.processes.comparison import ValuesMismatchError  # noqa: E402
from tests.trainers.models import Layers, make_xy, squared_error  # noqa: E402

ME, COUNT = jax.process_index(), jax.process_count()
SPECS = {"kernel": P(None, "tensor"), "bias": P("tensor")}


def first_devices(processes: Sequence[int]) -> list[Any]:
    return [next(device for device in jax.devices() if device.process_index == process) for process in processes]


def sampler_on(devices: Sequence[Any], stages: int) -> nnx.Module:
    """A plain model of zeros, its last dimensions in two parts, and each part on half of the devices."""
    mesh = Mesh(np.array(devices).reshape(-1, 2), ("data", "tensor"))
    model = Layers(stages, rngs=nnx.Rngs(7))
    for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        sharding = NamedSharding(mesh, SPECS[path[-1]])
        zeros = np.zeros(leaf.shape, np.float32)
        leaf.set_value(jax.make_array_from_callback(leaf.shape, sharding, zeros.__getitem__, dtype=zeros.dtype))
    return model


def whole_weights(trainer: PipelineTrainer) -> dict[str, np.ndarray]:
    """All leaves on this process."""
    found = flatten(nnx.state(trainer.gather_model(), nnx.Param))[0]
    return {path: np.asarray(leaf) for path, leaf in found.items()}


def needed_here(source: Any, sampler: nnx.Module) -> int:
    """The bytes that this process's devices need, and no device of this process has."""
    count = 0
    for path, leaf in flatten(nnx.state(sampler, nnx.Param))[0].items():
        needed = np.zeros(leaf.shape, bool)
        for index in leaf.sharding.addressable_devices_indices_map(leaf.shape).values():
            needed[index] = True
        for index in source[path].sharding.addressable_devices_indices_map(leaf.shape).values():
            needed[index] = False
        count += int(needed.sum()) * 4
    return count


def main() -> None:
    faulthandler.dump_traceback_later(200, exit=True)
    stages = COUNT
    trainer = PipelineTrainer(
        Layers(stages, rngs=nnx.Rngs(0)), optax.sgd(0.1), squared_error, num_stages=stages, num_microbatches=4,
        logging=False, mesh=Mesh(np.array(first_devices(range(COUNT))), ("stage",)),
    )  # fmt: skip
    batch = make_xy(8)
    trainer.train_step(batch)
    connection, received = process_connection(), [0]
    receive = connection.transport.recv

    def counting(parcel: Any, tag: Any) -> Any:
        arrays = receive(parcel, tag)
        received[0] += sum(array.nbytes for array in arrays)
        return arrays

    connection.transport.recv = counting  # type: ignore[method-assign]
    others = [device for device in jax.devices() if device not in first_devices(range(COUNT))]
    layouts = {"other devices": others, "all devices": jax.devices(), "the last process": jax.devices()[-2:]}
    for name, devices in layouts.items():
        sampler = sampler_on(devices, stages)
        received[0] = 0
        trainer.sync_weights(sampler)
        wanted = needed_here(flatten(trainer.state.params)[0], sampler)
        assert received[0] == wanted, (name, received, wanted)
        whole = whole_weights(trainer)
        trainer.train_step(batch)  # which donates the trainer's arrays
        for path, leaf in flatten(nnx.state(sampler, nnx.Param))[0].items():
            for shard in leaf.addressable_shards:
                np.testing.assert_array_equal(shard.data, whole[path][shard.index], err_msg=f"{name}: {path}")
    streamed = dict(trainer.stream_weights(NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P()), dtype=np.float16))
    assert all(leaf.dtype == np.float16 and leaf.is_fully_replicated for leaf in streamed.values())
    try:
        trainer.stream_weights(NamedSharding(Mesh(np.array(jax.devices()[ME : ME + 1]), ("x",)), P()))
    except ValuesMismatchError as error:
        tell(str(error).splitlines()[0])


main()
