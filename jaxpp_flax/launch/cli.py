"""Starting a program as several processes, from a terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpp_flax.launch import child
from jaxpp_flax.launch.job import LOOPBACK, Job, check_module
from jaxpp_flax.launch.ray.program import RayJob, run_job
from jaxpp_flax.launch.settings import LaunchError
from jaxpp_flax.launch.supervision import run
from jaxpp_flax.processes.failures import DEFAULT_FAILURE_TIMEOUT

__all__ = ["main"]

# Options that are None if they are not given; `Job` and `RayJob` have the defaults.
_OF_A_START = {
    "num_processes": "-n", "devices_per_process": "--devices-per-process", "grace": "--grace",
    "max_restarts": "--max-restarts", "forks": "--no-fork",
}  # fmt: skip
_OF_RAY = {"ray": "--ray", "hosts": "--hosts", "min_hosts": "--min-hosts", "wait": "--wait", "gpus": "--gpus"}


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
        if not options.cluster:
            return _start(options, program)
        _check_cluster(options, program)
    except LaunchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    # What hinders a connection may pass, as the remains of another run: that has another status than wrong options.
    child.main(program, bind_address=options.address, failure_timeout_s=options.failure_timeout)
    return 0


def _given(options: argparse.Namespace, flags: Mapping[str, str]) -> dict[str, Any]:
    """Those of the options that the user has given, by name."""
    return {name: getattr(options, name) for name in flags if getattr(options, name) is not None}


def _check_cluster(options: argparse.Namespace, program: list[str]) -> None:
    """Refuse what --cluster does not take, and a program that is not there, before this process connects."""
    flags = {**_OF_A_START, **_OF_RAY}
    if given := ", ".join(flags[name] for name in _given(options, flags)):
        raise LaunchError(
            f"{given} and --cluster exclude each other: the cluster says how many processes there are and what each "
            "has, and it starts and ends them."
        )
    Job(program=program, num_processes=1, failure_timeout=options.failure_timeout)
    check_module(program)


def _start(options: argparse.Namespace, program: list[str]) -> int:
    """Start the processes, here or on Ray; returns the exit status."""
    of_ray = _given(options, _OF_RAY)
    if of_ray and not options.ray:
        given = ", ".join(_OF_RAY[name] for name in of_ray)
        raise LaunchError(f"{given}: for --ray alone. `--ray --hosts 4 train.py` runs on four hosts of a Ray cluster.")
    if options.ray and options.hosts is None:
        raise LaunchError("--ray needs the number of hosts, as in `--ray --hosts 4 train.py`.")
    if options.ray and options.num_processes is None:
        options.num_processes = 1
    if options.num_processes is None:
        raise LaunchError(
            "nothing says how many processes to start. Give their number, as in `-n 4 train.py`; or `--cluster`, "
            "if SLURM, Open MPI or Kubernetes has started this one."
        )
    chosen = {"program": program, "failure_timeout": options.failure_timeout, **_given(options, _OF_A_START)}
    if not options.ray:
        job = Job(**chosen, address=options.address or LOOPBACK)
        check_module(program)
        return run(job)
    if options.address is not None:
        raise LaunchError("--address and --ray exclude each other: hosts listen where they reach one another.")
    del of_ray["ray"]
    return run_job(RayJob(**chosen, **of_ray))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxpp_flax.launch",
        description="Run a program as several processes on this machine or on Ray, or as this host's one on a cluster.",
        usage="%(prog)s (-n N | --cluster | --ray --hosts N) [options] (script.py | -m module) [arguments...]",
    )
    parser.add_argument(
        "-n", "--num-processes", type=int, help="how many processes to start on this machine; with --ray, on each host"
    )
    parser.add_argument(
        "--cluster", action="store_true", help="run as one process of a run that SLURM, Open MPI or Kubernetes started"
    )
    parser.add_argument(
        "--devices-per-process", type=int, help="virtual devices on CPU, else accelerators (default: 1)"
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
        help="seconds that a process has to end after Ctrl-C, SIGTERM or the program's end (default: 120)",
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        help="how often to start all processes again after a failure; a step that no life before has reached sets the "
        "count back (default: 0)",
    )
    parser.add_argument(
        "--no-fork",
        dest="forks",
        action="store_false",
        default=None,
        help="start each process as an interpreter of its own, not as a fork of one that has imported JAX and Flax",
    )
    ray = parser.add_argument_group("on a Ray cluster")
    ray.add_argument(
        "--ray", action="store_true", default=None, help="run the program on hosts of a running Ray cluster"
    )
    ray.add_argument("--hosts", type=int, help="on how many hosts")
    ray.add_argument("--min-hosts", type=int, help="the fewest with which the run goes on (default: all)")
    ray.add_argument("--wait", type=float, help="seconds to wait for a host that is missing (default: 60)")
    ray.add_argument("--gpus", type=float, help="GPUs that the run requests on each host (default: 0)")
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="a module to run, and its arguments")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="the script to run, and its arguments")
    return parser
