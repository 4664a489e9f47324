"""What `fit` adds to the bare step: progress, callbacks, placing batches; and what `Logging(metrics=True)` adds.

Beside the time, which noise hides: the instructions of a step's program, and the calls that Python makes in the main
thread for one step. The same run gives nearly the same counts on every machine.

python benchmarks/host_cost.py
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from workload import parser, prepare, report, wait


def calls_per_step(run: Callable[[int], Any], steps: int = 10) -> float:
    """Return the calls of Python and C functions for a step of `run(steps)`, without its beginning and end."""

    def count(steps: int) -> int:
        found = 0

        def on_event(frame: Any, event: str, argument: Any) -> None:
            nonlocal found
            found += event in ("call", "c_call")

        sys.setprofile(on_event)
        try:
            run(steps)
        finally:
            sys.setprofile(None)
        return found

    return (count(2 * steps) - count(steps)) / steps


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
            num_microbatches=arguments.microbatches, mesh={}, logging=Logging(metrics=metrics, progress=False),
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

    def run_bare(steps: int) -> None:
        nonlocal state
        for _ in range(steps):
            state, metrics = compiled(state, placed)
        wait((state, metrics))

    calls = [calls_per_step(run_bare)]
    calls += [calls_per_step(lambda steps, made=made: made.fit([batch], steps=steps)) for made in (trainer, measured)]
    rows = [
        {
            "contestant": name,
            "ms per step": statistics.median(times) * 1e3,
            "over bare": statistics.median(f / b for f, b in zip(times, bare, strict=True)),
            "instructions": count,
            "calls per step": called,
        }
        for name, times, count, called in (
            ("the compiled step", bare, instructions[0], calls[0]),
            ("fit", fitted, instructions[0], calls[1]),
            ("fit, all metrics", with_metrics, instructions[1], calls[2]),
        )
    ]
    report("host cost of fit", rows, arguments.json)


if __name__ == "__main__":
    main()
