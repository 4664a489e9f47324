"""A run on a Ray cluster (extra ``ray``), connected by `ray.init` or by its address in `RAY_ADDRESS`.

Ray sends functions and values by pickle: keep its ports, like those of JAX, inside a trusted network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, overload

from jaxpp_flax.launch.ray.function import run_function
from jaxpp_flax.launch.ray.program import RayJob, run_job
from jaxpp_flax.processes.failures import DEFAULT_FAILURE_TIMEOUT

__all__ = ["run"]


@overload
def run(
    what: Callable[..., Any],
    *arguments: Any,
    num_processes: int,
    cpus: float = 1.0,
    gpus: float = 0.0,
    strategy: str = "STRICT_SPREAD",
    environment: Mapping[str, str] | None = None,
    failure_timeout_s: float = DEFAULT_FAILURE_TIMEOUT,
    initialization_timeout_s: float = 300.0,
) -> list[Any]: ...


@overload
def run(
    what: str,
    *arguments: str,
    hosts: int,
    min_hosts: int | None = None,
    num_processes: int = 1,
    devices_per_process: int = 1,
    gpus: float = 0.0,
    environment: Mapping[str, str] | None = None,
    max_restarts: int = 0,
    wait: float = 60.0,
    failure_timeout: float = DEFAULT_FAILURE_TIMEOUT,
    grace: float = 120.0,
    forks: bool = True,
) -> int: ...


def run(what: Callable[..., Any] | str, *arguments: Any, **options: Any) -> list[Any] | int:
    """Run a function or a script as the processes of one run on several hosts of a Ray cluster.

    **A function** runs once, as one process in an actor on each host. **A script** runs as by
    ``python -m jaxpp_flax.launch --ray``, with the same options: an actor on each host starts its processes. After a
    failure all are started again, with a new host in place of one that is lost, or on fewer.

    Args:
      what, arguments: every process calls `what(*arguments)`; or the script's path, the same on each host, or "-m" and
        a module's name; and its arguments. It runs in the folder of this process, if the host has that.
      num_processes: of a function, in all; of a script, on each host.
      cpus, gpus: the resources to request from Ray: for each process of a function; on each host for a script.
      strategy: the strategy of Ray's placement group; by default each process of a function is on a host of its own.
      environment: more environment variables for the processes. A script's have this process's variables of JAX, XLA
        and NCCL too.
      failure_timeout_s, failure_timeout: seconds within which the failure of one process ends all of them. A host
        that does not answer for so long is lost, unless Ray knows it earlier.
      initialization_timeout_s: seconds for Ray to find the resources, and for all processes to connect.
      hosts, min_hosts: how many hosts to use; and the fewest with which the run goes on; None: all.
      devices_per_process: virtual devices on CPU, else accelerators.
      max_restarts: how often to start all processes again after a failure; a step that no life of the run has reached
        before sets the count back.
      wait: seconds to wait for a host that is missing, before the run goes on with those that there are.
      grace: seconds that a process has to end after Ctrl-C, SIGTERM or the program's end.
      forks: whether the processes are forks of one interpreter with the imports.

    Returns:
      Of a function, a list with the result of each process, in the order of their indices; arrays are NumPy arrays. Of
      a script, the exit status, as the command line has it: 0 if every process ended well; 75 if all saved after
      SIGTERM; else that of the first that failed.

    Raises:
      LaunchError: if Ray is missing, or lacks the resources or hosts, or its head is lost; or if a process of a
        function fails; then `__cause__` is its error.
      SystemExit: with status 75, if SIGTERM has ended the processes of a function, and all have saved.
    """
    if callable(what):
        return run_function(what, *arguments, **options)
    return run_job(RayJob(program=(what, *arguments), **options))
