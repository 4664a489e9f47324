"""Latency and bandwidth between two processes that share one device, by this library's transport and the bare server.

Each process takes a fifth of the device's memory. Ways that need a device for each process (NCCL does) end with an
error, which is a result too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import processes
import workload


def start_both(arguments: Any) -> int:
    """Start the two processes, and wait for both; 1 if one of them fails."""
    from jaxpp_flax.launch.coordinator import reserve_port

    with reserve_port("127.0.0.1") as reserved:
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
    more = {"XLA_CLIENT_MEM_FRACTION": "0.2", "JAXPP_FLAX_TRANSPORT": arguments.transport}
    command = [sys.executable, os.path.abspath(__file__), *sys.argv[1:], "--address", address]
    both = [subprocess.Popen([*command, "--role", str(role)], env={**os.environ, **more}) for role in (0, 1)]
    return max(abs(process.wait()) for process in both) and 1


def main() -> int:
    flags = workload.parser(__doc__ or "")
    flags.add_argument("--transport", default="transfer", choices=["transfer", "device_put", "nccl"])
    flags.add_argument("--role", type=int, help="for internal use")
    flags.add_argument("--address", help="for internal use")
    arguments = flags.parse_args()
    workload.prepare(arguments, 1)
    if arguments.role is None:
        return start_both(arguments)

    from jaxpp_flax.launch import initialize

    shared = None if arguments.platform == "cpu" else [0]
    initialize(
        coordinator_address=arguments.address, num_processes=2, process_id=arguments.role, local_device_ids=shared
    )
    found = processes.round_trips(arguments)
    rows = [
        {
            "one way": size,
            "µs": seconds["ours"] * 1e6,
            "GB/s": processes.SIZES[size] / seconds["ours"] / 1e9,
            "bare server µs": seconds["bare"] * 1e6,
            "over bare": seconds["ours"] / seconds["bare"],
        }
        for size, seconds in found.items()
    ]
    if arguments.role == 0:
        workload.report(f"two processes, one device, {arguments.transport}", rows, arguments.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
