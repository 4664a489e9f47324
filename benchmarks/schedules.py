"""Benchmarks of the schedules: growth with size, and measured bubbles.

    python benchmarks/schedules.py growth
    python benchmarks/schedules.py measured [--ranks 2] [--microbatches 8] [--width 512] [--draw steps.svg]

``growth`` prints the processor time to validate and to simulate schedules of growing size.
``measured`` trains a model with real arithmetic under 1F1B, ZB-H1 and ZB-V in turn, on a virtual CPU device with one
thread for each rank, and prints bubbles as measured and as simulated. It needs a core for each rank.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from statistics import median

from jaxpp_flax.schedules import (
    Interleaved1F1B,
    Std1F1B,
    simulate,
    validate,
)


def run_growth() -> int:
    sizes = [(16, 1, 128), (32, 1, 256), (64, 1, 512), (128, 1, 1024), (256, 1, 2048)]
    sizes += [(64, 4, 256), (64, 4, 1024)]
    columns = "{:18} {:>6} {:>6} {:>10} {:>11} {:>8} {:>11} {:>7}"
    print(columns.format("schedule", "ranks", "m", "passes", "simulate s", "us/pass", "validate s", "MiB"))
    for ranks, per_rank, m in sizes:
        schedule = Std1F1B(ranks) if per_rank == 1 else Interleaved1F1B(ranks * per_rank, ranks)
        passes = 2 * ranks * per_rank * m
        began = time.process_time()
        simulate(schedule, num_microbatches=m)
        simulated = time.process_time() - began
        began = time.process_time()
        validate(schedule, m)
        validated = time.process_time() - began
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        times = (f"{simulated:.2f}", f"{1e6 * simulated / passes:.2f}", f"{validated:.2f}")
        print(columns.format(type(schedule).__name__, ranks, m, passes, *times, f"{peak:.0f}"), flush=True)
    return 0


def run_measured(options: argparse.Namespace) -> int:
    import os

    # Before the first device is asked for. One thread for each device: a task must not take the other ranks' cores.
    flags = f"--xla_force_host_platform_device_count={options.ranks} --xla_cpu_multi_thread_eigen=false"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags} intra_op_parallelism_threads=1"
    import jax
    import numpy as np
    import optax
    from flax import nnx

    from jaxpp_flax import PipelineStage, PipelineTrainer
    from jaxpp_flax.schedules import draw
    from jaxpp_flax.trainers import MeshOptions

    jax.config.update("jax_platforms", "cpu")
    width, blocks = options.width, 2 * options.ranks

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.widen, self.narrow = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return x + self.narrow(nnx.relu(self.widen(x)))

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.blocks = nnx.List([PipelineStage(Block(rngs)) for _ in range(blocks)])

        def __call__(self, x: jax.Array) -> jax.Array:
            for block in self.blocks:
                x = block(x)
            return x

    def loss(model: Model, x: jax.Array) -> jax.Array:
        return (model(x) ** 2).mean()

    trainers: dict[str, PipelineTrainer] = {}
    for name in ("1f1b", "zero_bubble", "zbv"):
        stages = options.ranks * (2 if name == "zbv" else 1)
        trainers[name] = PipelineTrainer(
            Model(nnx.Rngs(0)), optax.sgd(1e-3), loss, num_stages=stages, num_microbatches=options.microbatches,
            schedule=name, mesh=MeshOptions(num_ranks=options.ranks, axes={}), logging=False,
        )  # fmt: skip
    rows = options.rows * options.microbatches
    batch = np.random.default_rng(0).normal(size=(rows, width)).astype(np.float32)
    profiles = {name: [] for name in trainers}
    whole: dict[str, list[float]] = {name: [] for name in trainers}
    for turn in range(options.steps + 2):  # in turn, so that a noisy machine is noisy for all
        for name, trainer in trainers.items():
            profile = trainer.profile_step(batch)
            jax.block_until_ready(trainer.state)
            began = time.perf_counter()
            float(trainer.train_step(batch)["loss"])
            jax.block_until_ready(trainer.state)
            if turn >= 2:
                profiles[name].append(profile)
                whole[name].append(time.perf_counter() - began)
    print(
        f"{options.ranks} ranks, {options.microbatches} microbatches of {options.rows}, {blocks} blocks of width "
        f"{width}; medians of {options.steps} steps, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    )
    columns = "{:12} {:>8} {:>12} {:>12} {:>13} {:>13} {:>10} {:>11}"
    print(columns.format("schedule", "task ms", "measured ms", "simulated ms", "bubble, meas.", "bubble, sim.",
                         "idle slots", "whole step"))  # fmt: skip
    panels = []
    for name, measured in profiles.items():
        ordered = [[event.task for event in rank] for rank in measured[-1].measured.events]
        halves = 2 if name == "zbv" else 1  # in slots of one length: a ZB-V task is half a stage's
        idle = sum(simulate(ordered).idle) / halves
        task = median(event.end - event.start for p in measured for rank in p.measured.events for event in rank)
        figures = [1e3 * task, 1e3 * median(p.measured.makespan for p in measured)]
        figures.append(1e3 * median(p.simulated.makespan for p in measured))
        bubbles = [median(getattr(p, of).bubble for p in measured) for of in ("measured", "simulated")]
        print(columns.format(name, *(f"{f:.1f}" for f in figures), *(f"{b:.1%}" for b in bubbles), f"{idle:.0f}",
                             f"{1e3 * median(whole[name]):.1f} ms"))  # fmt: skip
        panels += [(f"{name}, {title}", timeline) for title, timeline in measured[-1].panels]
    if options.draw:
        draw(panels, options.draw, microseconds=1e6)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("growth", help="time against size")
    four = commands.add_parser("measured", help="1F1B, ZB-H1 and ZB-V in real steps: bubbles measured and simulated")
    four.add_argument("--ranks", type=int, default=2)
    four.add_argument("--microbatches", type=int, default=8)
    four.add_argument("--width", type=int, default=512)
    four.add_argument("--rows", type=int, default=128, help="examples in a microbatch")
    four.add_argument("--steps", type=int, default=7)
    four.add_argument("--draw", help="also draw the last steps to this file: .svg, .json (Chrome trace) or .txt")
    options = parser.parse_args()
    if options.command == "measured":
        return run_measured(options)
    return run_growth()


if __name__ == "__main__":
    sys.exit(main())
