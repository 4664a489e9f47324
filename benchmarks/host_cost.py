"""What `fit` adds to the bare step: progress, callbacks, placing batches; and what `Logging(metrics=True)` adds.

python benchmarks/host_cost.py
"""

from __future__ import annotations

import statistics
import time

from workload import parser, prepare, report, wait


def main() -> None:
    flags = parser(__doc__ or "")
    flags.set_defaults(stages=2, width=128, length=128, microbatches=4, batch=2, repeats=40)
    arguments = flags.parse_args()
    prepare(arguments, arguments.stages)
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx

    from jaxpp_flax import PipelineStage, PipelineTrainer
    from jaxpp_flax.trainers import Logging

    width = arguments.width

    class MLP(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.layers = nnx.List([PipelineStage(nnx.Linear(width, width, rngs=rngs)) for _ in range(16)])

        def __call__(self, x: jax.Array) -> jax.Array:
            for layer in self.layers:
                x = jnp.tanh(layer(x))
            return x

    def loss_fn(model: MLP, batch: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    examples = arguments.microbatches * arguments.batch * arguments.length * 8
    rng = np.random.default_rng(0)
    batch = {name: rng.normal(size=(examples, width)).astype(np.float32) for name in "xy"}
    trainer, measured = (
        PipelineTrainer(
            MLP(nnx.Rngs(0)), optax.sgd(0.01), loss_fn, num_stages=arguments.stages,
            num_microbatches=arguments.microbatches, logging=Logging(metrics=metrics, progress=False),
        )
        for metrics in (False, True)
    )  # fmt: skip
    compiled = trainer.compile(batch)
    instructions = [len(made.compile(batch).program.instructions) for made in (trainer, measured)]
    split = {k: v.reshape(arguments.microbatches, -1, width) for k, v in batch.items()}
    placed = {k: jax.device_put(v) for k, v in split.items()}
    trainer.fit([batch], steps=3)
    measured.fit([batch], steps=3)
    state = jax.tree.map(lambda x: jnp.array(np.asarray(x)), trainer.state)
    state, _ = compiled(state, placed)
    bare: list[float] = []
    fitted: list[float] = []
    with_metrics: list[float] = []
    for _ in range(5):  # in turn, so that a noisy machine is noisy for both
        start = time.perf_counter()
        for _ in range(arguments.repeats):
            state, metrics = compiled(state, placed)
        wait((state, metrics))
        bare.append((time.perf_counter() - start) / arguments.repeats)
        for made, times in ((trainer, fitted), (measured, with_metrics)):
            start = time.perf_counter()
            made.fit([batch], steps=arguments.repeats)
            times.append((time.perf_counter() - start) / arguments.repeats)
    rows = [
        {
            "contestant": name,
            "ms per step": statistics.median(times) * 1e3,
            "over bare": statistics.median(f / b for f, b in zip(times, bare, strict=True)),
            "instructions": count,
        }
        for name, times, count in (
            ("the compiled step", bare, instructions[0]),
            ("fit", fitted, instructions[0]),
            ("fit, all metrics", with_metrics, instructions[1]),
        )
    ]
    report("host cost of fit", rows, arguments.json)


if __name__ == "__main__":
    main()
