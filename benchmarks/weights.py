"""What a transfer of weights to a sampler costs beside a plain copy of the same bytes in memory, in one process.

A model of dense layers lies on stages, one device each. `trainer.sync_weights` moves it into a plain model on a mesh of
data 2 x tensor 2, on the same devices and on others, each kernel cut in two parts by rows (one piece of memory) or by
columns (a piece for each row). The copy beside it writes each shard of the sampler once, from one piece of memory, with
NumPy. Each row has the bytes that the sampler holds, those that cross devices, the most that is live above the sampler
while the weights move (in bytes of the largest leaf at the target), and the transfer's rate over that of the copy, by
CPU seconds and by the clock: medians, in turn.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

STAGES = 4
PLACES = {"the same devices": 0, "other devices": STAGES}


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--width", type=int, default=2048, help="of the layers: a kernel has width x width numbers")
    flags.add_argument("--layers", type=int, default=8)
    flags.add_argument("--repeats", type=int, default=9)
    flags.add_argument("--json", default=None, help="also write the rows to this file")
    arguments = flags.parse_args()
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2 * STAGES)
    layouts = [(name, first, cut) for cut in ("rows", "columns") for name, first in PLACES.items()]
    rows = [measure(arguments, *layout) for layout in layouts]
    for row in rows:
        print(", ".join(f"{name}: {value}" for name, value in row.items()))
    result = {"benchmark": "weights", "rows": rows}
    print(json.dumps(result))
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)


def measure(arguments: argparse.Namespace, name: str, first: int, cut: str) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from jaxpp_flax import PipelineStage, PipelineTrainer
    from jaxpp_flax.engine.runtime.transport import routes

    def make(rngs: nnx.Rngs) -> nnx.Module:
        width = arguments.width
        layers = (nnx.Linear(width, width, use_bias=False, rngs=rngs) for _ in range(arguments.layers))
        return nnx.Sequential(*map(PipelineStage, layers))

    devices = np.array(jax.devices())
    trainer = PipelineTrainer(
        make, optax.sgd(0.1), lambda model, x: jnp.mean(model(x) ** 2), num_stages=STAGES, num_microbatches=STAGES,
        logging=False, mesh=Mesh(devices[:STAGES], ("stage",)),
    )  # fmt: skip
    spec = P("tensor") if cut == "rows" else P(None, "tensor")
    sharding = NamedSharding(Mesh(devices[first : first + 4].reshape(2, 2), ("data", "tensor")), spec)
    sampler = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), nnx.state(sampler))
    nnx.update(sampler, state)
    trainer.sync_weights(sampler)
    parts = [
        np.asarray(shard.data) for leaf in jax.tree.leaves(nnx.state(sampler)) for shard in leaf.addressable_shards
    ]
    parts = [part.copy() for part in parts]
    copies = [part.copy() for part in parts]

    def copy() -> None:  # as the sampler's leaves, each is replaced by a new one
        for number, part in enumerate(parts):
            copies[number] = part.copy()

    spent: dict[str, list[tuple[float, float]]] = {"transfer": [], "copy": []}
    for _ in range(arguments.repeats):
        spent["transfer"].append(timed(lambda: trainer.sync_weights(sampler)))
        spent["copy"].append(timed(copy))
    crossed, peaks, join, plan = [], [], routes.join_on_host, routes.plan

    def counted_join(*given: Any) -> Any:
        joined = join(*given)
        peaks.append(live_bytes())
        return joined

    del copies[:], parts[:]
    before, largest = live_bytes(), 2 * 4 * arguments.width**2
    routes.join_on_host = counted_join
    trainer.sync_weights(sampler)
    routes.join_on_host = join
    for source, target in zip(leaves_of(trainer), jax.tree.leaves(nnx.state(sampler)), strict=True):
        leaf = routes.SentLeaf(source.shape, source.dtype, source.as_jax_array().sharding, target.sharding)
        for hop in plan((leaf,), 0).local:
            size = int(np.prod([stop - start for start, stop in hop.piece])) * source.dtype.itemsize
            crossed.append(size * sum(device != hop.source for device in hop.targets))
    held = sum(shard.data.nbytes for leaf in jax.tree.leaves(nnx.state(sampler)) for shard in leaf.addressable_shards)
    over = [
        statistics.median(b[i] for b in spent["copy"]) / statistics.median(a[i] for a in spent["transfer"])
        for i in (0, 1)
    ]
    return {
        "sampler on": name,
        "kernels cut in": cut,
        "MiB held": round(held / 2**20, 1),
        "MiB across devices": round(sum(crossed) / 2**20, 1),
        "peak above the sampler, in leaves": round((max(peaks) - before) / largest, 2),
        "rate over a memory copy, CPU seconds": round(over[0], 2),
        "rate over a memory copy, clock": round(over[1], 2),
    }


def leaves_of(trainer: Any) -> list[Any]:
    import jax

    return jax.tree.leaves(trainer.state.params)


def timed(function: Callable[[], Any]) -> tuple[float, float]:
    """CPU seconds of this process, and seconds."""
    used, begin = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    function()
    now = resource.getrusage(resource.RUSAGE_SELF)
    return now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime, time.perf_counter() - begin


def live_bytes() -> int:
    """The bytes of all arrays of JAX; arrays of the same memory count once."""
    import jax

    shards = [shard.data for array in jax.live_arrays() for shard in array.addressable_shards]
    return sum({shard.unsafe_buffer_pointer(): shard.nbytes for shard in shards}.values())


if __name__ == "__main__":
    main()
