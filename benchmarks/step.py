"""The time of a step on a model with real arithmetic, over plain `jax.jit` on one device with all cores.

Beside it, the makespan that the simulator computes from the measured times of the step's tasks, but at least their sum
over the cores of this machine (on CPU; elsewhere over the devices). `--single-threaded` keeps XLA from
spreading one operation over several cores, which the simulator knows nothing of.

python benchmarks/step.py
python benchmarks/step.py --single-threaded
python benchmarks/step.py --platform gpu --width 2048 --length 512
"""

from __future__ import annotations

import os
import statistics
from typing import Any

from workload import (
    Contestant,
    batch,
    jaxpp,
    mesh,
    operations,
    parameters,
    parser,
    peak_operations,
    pipelined,
    prepare,
    race,
    report,
    train_step,
)


class Simulated:
    """The simulator's makespan of a contestant's loop, from the times that its own tasks take, step by step."""

    def __init__(self, contestant: Contestant, schedule: Any, processors: int) -> None:
        self.contestant, self.schedule, self.processors = contestant, schedule, processors
        self.ratios: list[float] = []
        self.seconds: list[float] = []

    def measure(self) -> None:
        """One step measured task by task, beside the step that was timed last."""

        from jaxpp_flax.planning.profile import task_costs
        from jaxpp_flax.schedules import Event, simulate

        timed = self.contestant
        compiled = timed.step.compile(timed.params, timed.data)  # type: ignore[attr-defined]
        results, timings = compiled.profile(timed.params, timed.data)
        timed.params, _ = results
        events: list[list[Event]] = [[] for _ in range(self.schedule.num_ranks)]
        for timing in timings:
            events[timing.rank].append(Event(timing.task, timing.rank, timing.start, timing.end))
        costs = task_costs([events], compiled.stages)
        microbatches = len(timed.data)
        step = simulate(self.schedule, costs, num_microbatches=microbatches)
        makespan = max(step.makespan, sum(step.busy) / self.processors)  # ranks may share cores
        self.seconds.append(makespan)
        self.ratios.append(timed.seconds[-1] / makespan)


def main() -> None:
    flags = parser(__doc__ or "")
    flags.set_defaults(blocks=8, width=256, length=256, microbatches=16, batch=1, repeats=7)
    flags.add_argument("--schedules", nargs="*", default=["1f1b", "interleaved_1f1b", "zero_bubble"])
    flags.add_argument("--single-threaded", action="store_true", help="one core for each operation (CPU)")
    arguments = flags.parse_args()
    if arguments.single_threaded:
        flag = "--xla_cpu_multi_thread_eigen=false"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    prepare(arguments, arguments.stages)
    import jax

    from jaxpp_flax.api import mpmd_jit_with_loop
    from jaxpp_flax.schedules import by_name

    params, data = parameters(arguments), batch(arguments)
    ranks = arguments.stages
    contestants = {
        "plain jax.jit, one device": Contestant(jax.jit(train_step(ranks, None), donate_argnums=0), params, data)
    }
    schedules: dict[str, Any] = {}
    for name in arguments.schedules:
        cut = 2 * ranks if name in ("interleaved_1f1b", "zbv", "dualpipe_v") else ranks
        schedules[name] = by_name(name, cut, ranks)
        step = train_step(cut, schedules[name])
        contestants[name] = Contestant(mpmd_jit_with_loop(step, mesh(ranks), donate_argnums=0), params, data)
    if (peer := jaxpp()) is not None:
        contestants["JaxPP, 1F1B"] = Contestant(pipelined("Std1F1B", ranks, ranks, peer), params, data)
        interleaved = pipelined("Interleaved1F1B", 2 * ranks, ranks, peer)
        contestants["JaxPP, interleaved"] = Contestant(interleaved, params, data)
    cores = len(os.sched_getaffinity(0)) if arguments.platform == "cpu" else min(ranks, len(jax.devices()))
    simulated = {name: Simulated(contestants[name], schedule, cores) for name, schedule in schedules.items()}
    race(contestants, 0)
    for _ in range(arguments.repeats):
        for name, contestant in contestants.items():
            contestant.time()
            if name in simulated:
                simulated[name].measure()
    plain = contestants["plain jax.jit, one device"].median
    tokens = arguments.microbatches * arguments.batch * arguments.length
    needed, peak = operations(arguments), peak_operations()
    rows: list[dict[str, object]] = []
    for name, c in contestants.items():
        row: dict[str, object] = {
            "contestant": name,
            "ms per step": c.median * 1e3,
            "over plain": c.median / plain,
            "tokens per second": tokens / c.median,
            "model TFLOP/s": needed / c.median / 1e12,
            "of the peak": needed / c.median / peak if peak else "",
        }
        model = simulated.get(name)
        row["simulated ms"] = statistics.median(model.seconds) * 1e3 if model else ""
        row["over simulated"] = statistics.median(model.ratios) if model else ""
        rows.append(row)
    report(f"step: {arguments.blocks} blocks of width {arguments.width}, {ranks} ranks", rows, arguments.json)


if __name__ == "__main__":
    main()
