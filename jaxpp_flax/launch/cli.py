"""Starting a program as several processes, from a terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from jaxpp_flax.launch import child
from jaxpp_flax.launch.local import LOOPBACK, LocalJob, run
from jaxpp_flax.launch.settings import LaunchError
from jaxpp_flax.processes.failures import DEFAULT_FAILURE_TIMEOUT

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the processes that the arguments describe; returns the exit status. A user's error is one line on stderr.

    >>> main(["-n", "0", __file__])
    2
    """
    options = _parser().parse_args(arguments)
    program = options.program[1:] if options.program[:1] == ["--"] else options.program
    if options.module is not None:
        program = ["-m", *options.module]
    try:
        if options.cluster:
            if options.num_processes is not None:
                raise LaunchError("-n and --cluster exclude each other: the cluster says how many processes there are.")
            child.main(program, bind_address=options.address, failure_timeout_s=options.failure_timeout)
            return 0
        if options.num_processes is None:
            raise LaunchError(
                "nothing says how many processes to start. Give their number, as in `-n 4 train.py`; or `--cluster`, "
                "if SLURM, Open MPI or Kubernetes has started this one."
            )
        job = LocalJob(
            program=program,
            num_processes=options.num_processes,
            devices_per_process=options.devices_per_process,
            address=options.address or LOOPBACK,
            failure_timeout=options.failure_timeout,
            grace=options.grace,
            max_restarts=options.max_restarts,
            forks=options.fork,
        )
        return run(job)
    except LaunchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxpp_flax.launch",
        description="Run a program as several processes on this machine, or as this host's process on a cluster.",
        usage="%(prog)s (-n N | --cluster) [options] (script.py | -m module) [arguments...]",
    )
    parser.add_argument("-n", "--num-processes", type=int, help="how many processes to start on this machine")
    parser.add_argument(
        "--cluster", action="store_true", help="run as one process of a run that SLURM, Open MPI or Kubernetes started"
    )
    parser.add_argument(
        "--devices-per-process", type=int, default=1, help="virtual devices on CPU, else accelerators (default: 1)"
    )
    parser.add_argument(
        "--address",
        help="the address that sockets listen on (default: 127.0.0.1; with --cluster, the one that reaches the "
        "coordinator)",
    )
    parser.add_argument(
        "--failure-timeout",
        type=float,
        default=DEFAULT_FAILURE_TIMEOUT,
        help="seconds within which the failure of one process ends all of them (default: 30)",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=120.0,
        help="seconds that a process has to end after Ctrl-C, SIGTERM or the program's end (default: 120)",
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        help="how often to start all processes again after a failure; a step that no life before has reached sets the "
        "count back (default: 0)",
    )
    parser.add_argument(
        "--no-fork",
        dest="fork",
        action="store_false",
        default=sys.platform.startswith("linux"),
        help="start each process as an interpreter of its own, not as a fork of one that has imported JAX and Flax",
    )
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="a module to run, and its arguments")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="the script to run, and its arguments")
    return parser
