"""Time to the first step of the Linen transformer, each contestant in a process of its own, in turn.

python benchmarks/start.py                                # no cache
python benchmarks/start.py --different                    # no two blocks are alike
python benchmarks/start.py --microbatches 512
python benchmarks/start.py --cache /tmp/new_folder        # the second start: a first round, not counted, fills it

A row gives the median over the rounds, of wall time and of CPU time, from the call to the end of the first step. A
longer loop also makes the first step longer; "less a second step" leaves that out.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from linen import SCHEDULES, first_step, schedule_of, state_and_batch, train_step, with_model
from workload import Contestant, mesh, ours, parser, prepare, report, use_cache

PLAIN = "plain jax.jit"
FIGURES = ("seconds to first step", "CPU seconds", "less a second step")


def measure(arguments: Any, name: str) -> list[float]:
    """The figures of one contestant, in this process."""
    prepare(arguments, arguments.stages)
    import jax

    from jaxpp_flax import mpmd_jit_with_loop

    use_cache(arguments.cache)
    if name == PLAIN:
        stages, step = arguments.stages, jax.jit(train_step(None, ours()), donate_argnums=0)
    else:
        schedule = schedule_of(name, arguments.stages, ours())
        stages = schedule.num_stages
        step = mpmd_jit_with_loop(train_step(schedule, ours()), mesh(arguments.stages, ours()), donate_argnums=(0,))
    contestant = Contestant(step, *state_and_batch(arguments, stages))
    jax.jit(lambda x: x + 1)(1.0).block_until_ready()  # the backend is there
    begun = time.process_time()
    wall, cpu = first_step(contestant), time.process_time() - begun
    contestant.time()
    return [wall, cpu, wall - contestant.seconds[0]]


def main() -> None:
    flags = with_model(parser(__doc__ or ""))
    flags.set_defaults(width=64, microbatches=8, repeats=3)
    flags.add_argument("--schedules", nargs="+", default=["1F1B", "interleaved"], choices=list(SCHEDULES))
    flags.add_argument("--cache", default=None, help="directory of JAX's persistent compilation cache")
    flags.add_argument("--only", default=None, help="measure this contestant here, and print its figures")
    arguments = flags.parse_args()
    if arguments.only:
        print(json.dumps(measure(arguments, arguments.only)))
        return
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    found: dict[str, list[list[float]]] = {name: [] for name in (PLAIN, *arguments.schedules)}
    for _ in range(arguments.repeats + bool(arguments.cache)):
        for name, rounds in found.items():
            command = [sys.executable, *sys.argv, "--only", name]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            rounds.append(json.loads(done.stdout.splitlines()[-1]))
    rows: list[dict[str, object]] = []
    medians = {
        name: [*map(statistics.median, zip(*rounds[-arguments.repeats :], strict=True))]
        for name, rounds in found.items()
    }
    for name, figures in medians.items():
        over = {"over plain": figures[0] / medians[PLAIN][0]}
        rows.append({"contestant": name, **dict(zip(FIGURES, figures, strict=True)), **over})
    title = f"{arguments.blocks} Linen blocks of width {arguments.width} on {arguments.stages} ranks"
    report(f"{title}, {arguments.microbatches} microbatches", rows, arguments.json)


if __name__ == "__main__":
    main()
