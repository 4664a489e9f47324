"""What a copy of the state in memory costs a step, beside an Orbax save: CPU seconds of all processes, GPTs with adamw.

    python benchmarks/state_in_memory.py                                   # 19M parameters in 4 processes of one stage
    python benchmarks/state_in_memory.py --blocks 16 --width 1024 --steps 5  # 202M
    python benchmarks/state_in_memory.py --hosts 2                         # over two raylets of this machine

All contestants run in the same processes, one after another, `--rounds` times; medians. CPU seconds, since other work
of the machine changes them less than the time. Over several hosts they are those of the whole machine, which should do
nothing else: it is Ray's own programs that bring the copies from host to host.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from workload import parser, report

CONTESTANTS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "a copy a step": {"memory_every": 1},
    "a save a step": {"every": 1},
}


def main() -> None:
    flags = parser(__doc__ or "")
    flags.set_defaults(blocks=8, width=448, length=64, microbatches=4, batch=4)
    flags.add_argument("--steps", type=int, default=10)
    flags.add_argument("--rounds", type=int, default=3)
    flags.add_argument("--only", nargs="+", default=list(CONTESTANTS), choices=list(CONTESTANTS))
    flags.add_argument("--hosts", type=int, default=1, help="each a raylet of this machine; 1: without Ray")
    flags.add_argument("--directory", default=None, help="of the checkpoints; in the launched processes")
    arguments = flags.parse_args()
    if arguments.stages % arguments.hosts:
        flags.error(f"--hosts {arguments.hosts}: {arguments.stages} processes (--stages) do not divide")
    if arguments.directory is not None:
        measure(arguments)
        return
    with tempfile.TemporaryDirectory() as directory, cluster(arguments.hosts) as options:
        launch = [sys.executable, "-m", "jaxpp_flax.launch", "-n", str(arguments.stages // arguments.hosts)]
        program = [str(Path(__file__).resolve()), *sys.argv[1:], "--directory", directory]
        command = [*launch, "--max-restarts", "1", *options, *program]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[0] {"))[4:])
    rows: list[dict[str, object]] = [
        {"contestant": name, "CPU seconds a step": seconds, "more": seconds - found["seconds"]["nothing"]}
        for name, seconds in found["seconds"].items()
    ]
    title = f"{found['parameters'] / 1e6:.0f}M parameters, {arguments.stages} processes on {arguments.hosts} host(s)"
    report(title, rows, arguments.json)


@contextmanager
def cluster(hosts: int) -> Iterator[list[str]]:
    """Yield the launcher's options for so many hosts, which run meanwhile."""
    if hosts == 1:
        yield []
        return
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    nodes = importlib.import_module("ray.cluster_utils").Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    try:
        for _ in range(hosts):
            nodes.add_node(num_cpus=1)
        os.environ["RAY_ADDRESS"] = nodes.address
        yield ["--ray", "--hosts", str(hosts)]
    finally:
        nodes.shutdown()


def cpu_seconds(hosts: int, process: int) -> float:
    """Of this process, or over several hosts those of the whole machine, which process 0 counts for all."""
    if hosts == 1:
        return time.process_time()
    if process:
        return 0.0
    user, nice, system, _, _, interrupts, soft_interrupts = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + interrupts + soft_interrupts) / os.sysconf("SC_CLK_TCK")


def measure(arguments: Any) -> None:
    """Train in each way, in this process of the run."""
    import jax
    import numpy as np
    import optax

    from jaxpp_flax import PipelineTrainer
    from jaxpp_flax.processes import exchange_values, process_group
    from jaxpp_flax.trainers import Callback, Checkpoints

    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
    example = importlib.import_module("train_gpt")

    config = example.Config(
        layers=arguments.blocks, width=arguments.width, heads=arguments.width // 64, length=arguments.length
    )
    tokens = np.random.default_rng(0).integers(0, 256, (arguments.batch * arguments.microbatches, config.length + 1))
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}

    class Spent(Callback):
        """The CPU seconds of this process after each step, which it waits for."""

        def __init__(self) -> None:
            super().__init__()
            self.seconds: list[float] = []

        def on_step(self, trainer: Any, record: Any) -> None:
            jax.block_until_ready(jax.tree.leaves(trainer.held.memory))
            self.seconds.append(cpu_seconds(arguments.hosts, jax.process_index()))

    found: dict[str, list[float]] = {name: [] for name in arguments.only}
    parameters = 0
    for turn in range(arguments.rounds):
        for name in arguments.only:
            spent = Spent()
            trainer = PipelineTrainer(
                lambda rngs: example.GPT(config, rngs=rngs), optax.adamw(1e-3), example.loss_fn,
                num_stages=arguments.stages, num_microbatches=arguments.microbatches, logging=False,
                checkpoints=Checkpoints(f"{arguments.directory}/{name}{turn}", keep=1, **CONTESTANTS[name]),
            )  # fmt: skip
            parameters = sum(leaf.size for leaf in jax.tree.leaves(trainer.held.memory.params))
            trainer.fit([batch] * (arguments.steps + 2), epochs=1, callbacks=[spent])
            # The first two steps compile and take memory.
            each = (spent.seconds[-1] - spent.seconds[1]) / arguments.steps
            found[name].append(sum(exchange_values(process_group(), "the CPU seconds", each)))
            del trainer
    if jax.process_index() == 0:
        seconds = {name: statistics.median(values) for name, values in found.items()}
        print(json.dumps({"parameters": parameters, "seconds": seconds}))


if __name__ == "__main__":
    main()
