"""Benchmarks of the schedules: the search against the named ones, and growth with size.

    python benchmarks/schedules.py search [--milp-seconds 20] [--evaluations 4000]
    python benchmarks/schedules.py growth
    python benchmarks/schedules.py study
    python benchmarks/schedules.py measured [--ranks 2] [--microbatches 8] [--width 512] [--draw steps.svg]

``search`` runs every case below, and exits with 1 if one of its promises does not hold: no worse
than any named schedule that fits; within 2 % of the optimum where the exact solver proves one;
strictly better than the best named schedule on most unbalanced or memory-limited cases.
``growth`` prints the processor time to validate and to simulate schedules of growing size.
``study`` prints the tables of docs/internals/schedule_study.md: a 70B and a 405B model on 64 to 16,384 GPUs.
``measured`` trains a model with real arithmetic under 1F1B, ZB-H1 and ZB-V in turn, on a virtual CPU device with one
thread for each rank, and prints bubbles as measured and as simulated. It needs a core for each rank.
"""

from __future__ import annotations

import argparse
import itertools
import random
import resource
import sys
import time
from dataclasses import dataclass, field
from statistics import median

from jaxpp_flax.planning import search
from jaxpp_flax.planning.schedule_search.search import problems_of
from jaxpp_flax.schedules import (
    Costs,
    Interleaved1F1B,
    Link,
    ScheduleError,
    Std1F1B,
    Timeline,
    Transfer,
    by_name,
    names,
    simulate,
    validate,
)


@dataclass(frozen=True)
class Case:
    name: str
    group: str
    ranks: int
    microbatches: int
    per_rank: int = 1
    costs: Costs = field(default_factory=Costs)
    transfer: Transfer | float | None = None
    limit: float | None = None
    split: bool = True
    exact: bool = False


def layers(stages: int, heavy: float, embed: float = 0.0) -> Costs:
    """Equal blocks, with a head (and an embedding) that adds to the last (first) stage."""
    f = [1.0] * stages
    f[0] += embed
    f[-1] += heavy
    return Costs(forward=f, backward_input=[1.05 * t for t in f], backward_weight=[0.9 * t for t in f])


def uneven(stages: int, seed: int, spread: float = 0.4) -> Costs:
    """Stages whose times differ at random, as when layers do not divide evenly."""
    rng = random.Random(seed)
    f = [round(1 + spread * (2 * rng.random() - 1), 2) for _ in range(stages)]
    return Costs(
        forward=f,
        backward_input=[round(t * (1 + 0.3 * rng.random()), 2) for t in f],
        backward_weight=[round(t * (0.7 + 0.3 * rng.random()), 2) for t in f],
    )


def cases() -> list[Case]:
    out: list[Case] = []
    for ranks, m, per_rank in [
        (2, 4, 1),
        (4, 8, 1),
        (4, 16, 1),
        (8, 16, 1),
        (8, 32, 1),
        (2, 4, 2),
        (4, 8, 2),
        (4, 16, 2),
    ]:
        out.append(Case(f"balanced {ranks}x{per_rank}, m={m}", "balanced", ranks, m, per_rank))
        measured = Costs(forward=1.0, backward_input=1.1, backward_weight=0.8)
        out.append(Case(f"measured ratio {ranks}x{per_rank}, m={m}", "balanced", ranks, m, per_rank, measured))
    for ranks, m in [(2, 6), (4, 8), (4, 16), (8, 16)]:
        whole = Case(f"whole backward {ranks}, m={m}", "balanced", ranks, m, split=False)
        out.append(whole)
    for seed, (ranks, m, per_rank) in enumerate(
        [
            (4, 8, 1),
            (4, 16, 1),
            (8, 16, 1),
            (8, 32, 1),
            (4, 8, 2),
            (4, 16, 2),
            (6, 12, 1),
            (3, 9, 3),
            (4, 12, 1),
            (5, 10, 1),
        ]
    ):
        costs = uneven(ranks * per_rank, seed)
        out.append(Case(f"uneven {ranks}x{per_rank}, m={m}", "unbalanced", ranks, m, per_rank, costs))
    for heavy in (0.5, 1.0):
        for ranks, m, per_rank in [(4, 8, 1), (8, 16, 1), (4, 8, 2), (4, 16, 2)]:
            costs = layers(ranks * per_rank, heavy, embed=0.2)
            out.append(Case(f"heavy head {heavy} {ranks}x{per_rank}, m={m}", "unbalanced", ranks, m, per_rank, costs))
    for latency in (0.3, 1.0):
        for ranks, m, per_rank in [(4, 8, 1), (8, 16, 1), (4, 8, 2)]:
            out.append(
                Case(f"links {latency} {ranks}x{per_rank}, m={m}", "slow links", ranks, m, per_rank, transfer=latency)
            )
    one_slow = Transfer(Link(0.05), {(1, 2): Link(1.5), (2, 1): Link(1.5)})
    for ranks, m, per_rank in [(4, 8, 1), (4, 16, 1), (4, 8, 2)]:
        out.append(
            Case(f"one slow link {ranks}x{per_rank}, m={m}", "slow links", ranks, m, per_rank, transfer=one_slow)
        )
    for ranks, m, per_rank, limit in [
        (4, 8, 1, 3), (4, 8, 1, 5), (4, 16, 1, 3), (4, 16, 1, 6), (8, 16, 1, 6), (8, 16, 1, 10), (4, 8, 2, 6),
        (4, 8, 2, 9), (4, 16, 2, 7), (6, 12, 1, 4), (6, 12, 1, 7),
    ]:  # fmt: skip
        measured = Costs(forward=1.0, backward_input=1.2, backward_weight=0.8)
        out.append(
            Case(f"memory {limit} {ranks}x{per_rank}, m={m}", "memory", ranks, m, per_rank, measured, limit=limit)
        )
    for seed, (ranks, m, limit) in enumerate([(4, 8, 4), (4, 12, 5), (6, 12, 6), (8, 16, 8)]):
        costs = uneven(ranks, 20 + seed)
        out.append(Case(f"uneven, memory {limit} {ranks}, m={m}", "memory", ranks, m, 1, costs, limit=limit))
    for seed, (ranks, m, limit, split) in enumerate(
        [(2, 3, None, True), (2, 4, 2, True), (3, 3, None, True), (3, 3, 2, True), (3, 4, 3, True), (3, 4, None, False),
         (2, 5, None, False), (3, 5, 2, False), (4, 3, None, True), (2, 4, None, True)]
    ):  # fmt: skip
        costs = uneven(ranks, 40 + seed)
        out.append(Case(f"small {ranks}, m={m}, memory {limit}", "small", ranks, m, 1, costs, 0.2, limit, split, True))
    return out


def run_search(milp_seconds: float, evaluations: int) -> int:
    from optimum import prove  # it needs SciPy

    failures: list[str] = []
    better = comparable = beatable = 0
    proved = 0
    listed = cases()
    print(f"{'case':34} {'best named':28} {'found':>9} {'bound':>9} {'gain':>7}  seconds")
    for case in listed:
        began = time.perf_counter()
        found = search(
            case.ranks, case.microbatches, case.per_rank, case.costs, case.transfer, case.limit,
            split_backward=case.split, evaluations=evaluations,
        )  # fmt: skip
        seconds = time.perf_counter() - began
        best = found.best_named
        name = "none fits" if best is None else f"{best.name} {best.makespan:.4g}"
        gain = "new" if best is None else f"{100 * (best.makespan / found.makespan - 1):.2f}%"
        note = ""
        if best is not None and found.makespan > best.makespan * (1 + 1e-9):
            failures.append(f"{case.name}: {found.makespan} is worse than {name}")
        if case.group in ("unbalanced", "memory"):
            comparable += 1
            better += best is None or found.makespan < best.makespan * (1 - 1e-9)
            beatable += best is None or best.makespan > found.lower_bound * (1 + 1e-9)
        if case.exact and milp_seconds:
            problems = problems_of(
                case.ranks, case.microbatches, case.per_rank, case.costs, Transfer.of(case.transfer), case.limit,
                case.split,
            )  # fmt: skip
            optimum = prove(problems, found.makespan, milp_seconds)
            if optimum is not None:
                proved += 1
                gap = found.makespan / optimum - 1
                note = f" optimum {optimum:.4g}, gap {100 * gap:.2f}%"
                if gap > 0.02:
                    failures.append(f"{case.name}: {100 * gap:.2f}% above the optimum")
            else:
                note = " optimum not proved in time"
        print(
            f"{case.name:34} {name:28} {found.makespan:9.4g} {found.lower_bound:9.4g} {gain:>7}  {seconds:.1f}{note}",
            flush=True,
        )
    print(
        f"{len(listed)} cases; strictly better than the best named one on {better} of {comparable} unbalanced or "
        f"memory-limited cases ({beatable} of them have a named best above the lower bound); {proved} optima proved"
    )
    if 2 * better <= comparable:
        failures.append(f"strictly better on {better} of {comparable} only")
    for failure in failures:
        print("FAILED:", failure)
    return 1 if failures else 0


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


@dataclass(frozen=True)
class Model:
    """A decoder with grouped-query attention and a gated feed-forward layer."""

    name: str
    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    ranks: int
    batch: int  # sequences
    vocabulary: int = 128_256
    length: int = 8192

    @property
    def layer_weights(self) -> float:
        head = self.width / self.heads
        attention = 2 * self.width * self.width + 2 * self.width * head * self.kv_heads
        return attention + 3 * self.width * self.hidden

    @property
    def weights(self) -> float:
        return self.layers * self.layer_weights + 2 * self.vocabulary * self.width


MODELS = [
    Model("70B", 80, 8192, 28_672, 64, 8, ranks=8, batch=512),
    Model("405B", 126, 16_384, 53_248, 128, 8, ranks=16, batch=2048),
]
TENSOR = 8  # GPUs that share each layer
RATE = 500e12  # operations per second of one GPU, inside a task
LINK = Link(latency=10e-6, bandwidth=40e9)  # between nodes, for each GPU
GIB = 2**30
CAPACITY = 80e9 - 6e9  # bytes of one GPU, less what the runtime and the kernels take


def layers_of(model: Model, stages: int) -> list[list[str]]:
    """Blocks, the embedding and the head, dealt out evenly by count, as published for the 405B model."""
    parts = ["embed", *["block"] * model.layers, "head"]
    ends = [round(i * len(parts) / stages) for i in range(stages + 1)]
    return [parts[a:b] for a, b in itertools.pairwise(ends)]


def model_costs(model: Model, stages: int) -> Costs:
    """Seconds and bytes of one GPU for one microbatch of one sequence."""
    tokens = model.length
    matmul = 2 * model.layer_weights * tokens
    attention = 2 * tokens * tokens * model.width  # causal: half of the two products
    head = 2 * model.width * model.vocabulary * tokens
    speed = RATE * TENSOR
    activation = 34 * tokens * model.width / TENSOR
    forward, inputs, weights, held = [], [], [], []
    for parts in layers_of(model, stages):
        blocks, heads = parts.count("block"), parts.count("head")
        forward.append((blocks * (matmul + attention) + heads * head) / speed)
        inputs.append((blocks * (matmul + 2 * attention) + heads * head) / speed)
        weights.append((blocks * matmul + heads * head) / speed)
        logits = 2 * tokens * model.vocabulary / TENSOR
        held.append(blocks * activation + heads * logits + 2 * tokens * model.width / TENSOR)
    sent = 2 * tokens * model.width / TENSOR
    return Costs(forward=forward, backward_input=inputs, backward_weight=weights, activation=held, sent=sent)


def study_case(model: Model, m: int, limit: float, evaluations: int) -> dict[tuple[str, int], Timeline]:
    """Every studied schedule, and the search's within the limit, for ``m`` microbatches."""
    rows: dict[tuple[str, int], Timeline] = {}
    links = Transfer(LINK)
    for per_rank in (1, 2, 4):
        stages = model.ranks * per_rank
        costs = model_costs(model, stages)
        for name in names(stages, model.ranks):
            if name in _STUDIED and (per_rank > 1 or name != "interleaved_1f1b"):
                schedule = by_name(name, stages, model.ranks)
                rows[name, per_rank] = simulate(schedule, costs, links, num_microbatches=m)
        if per_rank <= 2 and m <= 64 and limit > 0:
            try:
                found = search(model.ranks, m, per_rank, costs, links, limit, evaluations=evaluations)
            except ScheduleError:  # not even one microbatch fits
                continue
            rows["found by search", per_rank] = found.timeline
    return rows


def run_study(evaluations: int) -> int:
    """Markdown tables for docs/internals/schedule_study.md."""
    for model in MODELS:
        columns: dict[str, dict[tuple[str, int], str]] = {}
        for gpus in (64, 256, 1024, 4096, 16_384):
            replicas = gpus // (TENSOR * model.ranks)
            if not replicas:
                continue
            m = model.batch // replicas
            state = model.weights / (TENSOR * model.ranks) * (2 + 4 + 12 / replicas)
            limit = CAPACITY - state
            cells = columns[f"{gpus:,} GPUs, m={m}, {max(0.0, limit) / GIB:.0f} GiB"] = {}
            for key, step in study_case(model, m, limit, evaluations).items():
                peak = max(step.peak_memory)
                cell = f"{step.makespan:.2f} s, {step.bubble:.1%}, {peak / GIB:.0f} GiB"
                cells[key] = cell if peak <= limit else f"*{cell}*"
        print(f"\n### {model.name}\n\n| schedule | stages per rank | {' | '.join(columns)} |")
        print("|---|---:|" + "---|" * len(columns))
        every = sorted({key for cells in columns.values() for key in cells}, key=lambda key: (key[1], key[0]))
        for name, per_rank in every:
            cells = [cells.get((name, per_rank), "-") for cells in columns.values()]
            print(f"| {name} | {per_rank} | {' | '.join(cells)} |", flush=True)
    return 0


_STUDIED = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zero_bubble_h2", "zbv", "dualpipe_v")


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
    one = commands.add_parser("search", help="the search against the named schedules")
    one.add_argument("--milp-seconds", type=float, default=20.0, help="for the exact solver, for each small case")
    one.add_argument("--evaluations", type=int, default=4000)
    commands.add_parser("growth", help="time against size")
    three = commands.add_parser("study", help="the tables of docs/internals/schedule_study.md")
    three.add_argument("--evaluations", type=int, default=4000)
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
    if options.command == "search":
        return run_search(options.milp_seconds, options.evaluations)
    return run_study(options.evaluations) if options.command == "study" else run_growth()


if __name__ == "__main__":
    sys.exit(main())
