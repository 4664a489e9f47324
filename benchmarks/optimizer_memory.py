"""The optimizer's state on the devices or on the host: live bytes, equal weights, and the time of a step.

python benchmarks/optimizer_memory.py
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

from offload import largest_difference
from workload import parser, prepare, report


def trainer_of(arguments: Any, place: str | None) -> Any:
    """A trainer of linear layers with Adam, whose state lies in this memory."""
    import jax.numpy as jnp
    import optax
    from flax import nnx

    from jaxpp_flax import PipelineStage, PipelineTrainer
    from jaxpp_flax.trainers import Memory

    class Layers(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            width = arguments.width
            self.layers = nnx.List(
                [PipelineStage(nnx.Linear(width, width, rngs=rngs)) for _ in range(arguments.blocks)]
            )

        def __call__(self, x: Any) -> Any:
            for layer in self.layers:
                x = jnp.tanh(layer(x))
            return x

    def squared_error(model: Any, batch: Any) -> Any:
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    return PipelineTrainer(
        Layers(nnx.Rngs(0)), optax.adam(1e-3), squared_error, num_stages=arguments.stages,
        num_microbatches=arguments.microbatches, mesh={}, logging=False, memory=Memory(optimizer_state=place),
    )  # fmt: skip


def bytes_of(tree: Any) -> dict[str, float]:
    """The bytes of a tree's arrays on the fullest device, by the kind of memory."""
    import jax

    found: dict[tuple[Any, str], int] = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.as_jax_array().addressable_shards:
            key = shard.device, str(shard.data.sharding.memory_kind)
            found[key] = found.get(key, 0) + shard.data.nbytes
    return {kind: max(size for (_, k), size in found.items() if k == kind) for _, kind in found}


def main() -> None:
    flags = parser(__doc__ or "")
    flags.set_defaults(blocks=8, width=512, microbatches=8, batch=16, repeats=5)
    arguments = flags.parse_args()
    prepare(arguments, arguments.stages)
    import jax
    import numpy as np

    shape = (arguments.microbatches * arguments.batch, arguments.width)
    batch = {name: np.random.default_rng(0).normal(size=shape).astype(np.float32) for name in "xy"}
    trainers = {str(place or "device"): trainer_of(arguments, place) for place in (None, "pinned_host")}
    seconds: dict[str, list[float]] = {place: [] for place in trainers}
    for trial in range(1 + arguments.repeats):  # the first one compiles
        for place, trainer in trainers.items():
            start = time.perf_counter()
            trainer.train_step(batch)
            jax.block_until_ready(jax.tree.leaves(trainer.state))
            seconds[place] += [time.perf_counter() - start] if trial else []
    base = trainers["device"].state
    rows: list[dict[str, object]] = []
    for place, trainer in trainers.items():
        held = bytes_of(trainer.state)
        rows.append(
            {
                "optimizer's state on": place,
                "device MB between steps, fullest rank": held.get("device", 0) / 1e6,
                "host MB": held.get("pinned_host", 0) / 1e6,
                "weights differ by": largest_difference(trainer.state.params, base.params),
                "time over device": median(seconds[place]) / median(seconds["device"]),
            }
        )
    report(f"Adam's state for {arguments.blocks} layers of width {arguments.width}", rows, arguments.json)


if __name__ == "__main__":
    main()
