"""What it costs to run a pipeline as several processes: step time over one process, latency and bandwidth.

The step is timed as one process with a virtual device for each rank, and as one process for each rank; the two take
turns, started anew each time, on the same cores. Between two processes, arrays are then sent there and back: by this
library's transport, and by the bare transfer server.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import workload

SIZES = {"4 KiB": 1 << 12, "1 MiB": 1 << 20, "64 MiB": 1 << 26}


def main() -> None:
    flags = workload.parser(__doc__ or "")
    flags.set_defaults(stages=2, microbatches=16, blocks=8, width=256, length=256)
    flags.add_argument("--schedule", default="Std1F1B")
    flags.add_argument("--rounds", type=int, default=3, help="how often the contestants are started in turn")
    flags.add_argument("--role", default="all", choices=["all", "one", "each", "wire"], help="for internal use")
    arguments = flags.parse_args()
    if arguments.role == "all":
        compare(arguments)
    elif arguments.role == "one":
        workload.prepare(arguments, arguments.stages)
        report("one", step_seconds(arguments))
    elif arguments.role == "each":
        report("each", step_seconds(arguments))
    else:
        report("wire", round_trips(arguments))


def compare(arguments: Any) -> None:
    """Start the others, and print what they found."""
    own = [os.path.abspath(__file__), *sys.argv[1:]]
    launch = [sys.executable, "-m", "jaxpp_flax.launch", "-n"]
    rounds = [
        (
            run([sys.executable, *own, "--role", "one"], "one"),
            run([*launch, str(arguments.stages), *own, "--role", "each"], "each"),
        )
        for _ in range(arguments.rounds)
    ]
    one, each = (statistics.median(times) for times in zip(*rounds, strict=True))
    wire = run([*launch, "2", *own, "--role", "wire"], "wire")
    print(f"step, {arguments.stages} stages, {arguments.schedule}, {arguments.microbatches} microbatches")
    print(f"  one process         {one * 1e3:9.1f} ms")
    ratio = statistics.median(several / single for single, several in rounds)
    print(
        f"  {arguments.stages} processes         {each * 1e3:9.1f} ms   {ratio:.3f} x (median of {len(rounds)} rounds)"
    )
    for name, figures in wire.items():
        nbytes = SIZES[name]
        ours, bare = figures["ours"], figures["bare"]
        print(
            f"{name:>7}: one way {ours * 1e6:9.0f} us {nbytes / ours / 1e9:6.2f} GB/s; bare transfer server "
            f"{bare * 1e6:9.0f} us {nbytes / bare / 1e9:6.2f} GB/s; {ours / bare:.2f} x"
        )
    row = {"step_one_process": one, "step_processes": each, "ratio": ratio, "rounds": rounds, "wire": wire}
    print(json.dumps(row))
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(row, file)


def run(command: list[str], role: str) -> Any:
    """Run a command to its end; what it reported."""
    env = {**os.environ, "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    lines = [line for line in done.stdout.splitlines() if f"RESULT {role} " in line]
    if done.returncode or not lines:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return json.loads(lines[0].partition(f"RESULT {role} ")[2])


def report(role: str, result: Any) -> None:
    """Print a result for `run`; process 0 speaks."""
    import jax

    if jax.process_index() == 0:
        print(f"RESULT {role} {json.dumps(result)}", flush=True)


def step_seconds(arguments: Any) -> float:
    """The median time of a train step, waited for on every process."""
    step = workload.pipelined(arguments.schedule, arguments.stages, arguments.stages, workload.ours())
    params, data = workload.parameters(arguments), workload.batch(arguments)
    contestant = workload.Contestant(step, params, data)
    for _ in range(3):
        contestant.run()
    for _ in range(arguments.repeats):
        contestant.time()
    return contestant.median


def round_trips(arguments: Any) -> dict[str, dict[str, float]]:
    """Seconds for one way, half of there and back, for each size: by our transport and by the bare server."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import transfer
    from jax.sharding import SingleDeviceSharding

    from jaxpp_flax.engine.runtime.transport.base import Parcel, Tag
    from jaxpp_flax.engine.runtime.transport.connection import process_connection

    link, me = process_connection(), jax.process_index()
    devices = [next(d for d in jax.devices() if d.process_index == process) for process in (0, 1)]
    places = [SingleDeviceSharding(device) for device in devices]
    server = transfer.start_transfer_server(
        devices[me].client, "127.0.0.1:0", ["127.0.0.1:0"] * 4, transfer_size=4 << 20
    )
    addresses = [a.decode() for a in link.group.exchange("bare servers", server.address().encode(), 60.0)]
    connection = server.connect(addresses[1 - me])
    found: dict[str, dict[str, float]] = {}
    for name, nbytes in SIZES.items():
        value = jax.device_put(jnp.ones(nbytes // 4, jnp.float32), devices[me])
        shapes = [jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=place) for place in places]
        parcels = [Parcel(a, 1 - a, (shapes[1 - a],), (places[a],)) for a in (0, 1)]
        link.connect([parcels[0], parcels[1]])
        rounds = arguments.repeats if nbytes > 1 << 20 else 10 * arguments.repeats

        def ours(number: int, x: Any, parcels: Any = parcels, name: str = name) -> Any:
            tags = [Tag(f"bench-{name}", number, way, number, "a round trip") for way in (0, 1)]
            if me == 0:
                link.transport.send([x], parcels[0], tags[0])
                return link.recv(parcels[1], tags[1])[0]
            got = link.recv(parcels[0], tags[0])[0]
            got.block_until_ready()
            link.transport.send([got], parcels[1], tags[1])
            return got

        def bare(number: int, x: Any, shapes: Any = shapes, offset: int = nbytes << 20) -> Any:
            first, second = offset + 2 * number, offset + 2 * number + 1
            if me == 0:
                server.await_pull(first, [x])
                return connection.pull(second, [shapes[0]])[0]
            got = connection.pull(first, [shapes[1]])[0]
            got.block_until_ready()
            server.await_pull(second, [got])
            return got

        seconds: dict[str, list[float]] = {"ours": [], "bare": []}
        contestants = [("ours", ours), ("bare", bare)]
        for number in range(rounds + 2):
            # The second of two finds the memory that the first has freed: each is second as often as first.
            for which, one in contestants if number % 2 else reversed(contestants):
                start = time.perf_counter()
                one(number, value).block_until_ready()
                if number >= 2:
                    seconds[which].append((time.perf_counter() - start) / 2)
        link.group.barrier(f"the end of {name}", 120.0)
        found[name] = {which: statistics.median(times) for which, times in seconds.items()}
    return found


if __name__ == "__main__":
    main()
