"""A run on a Ray cluster: one actor for each host, and a driver that hears of the loss (extra ``ray``).

Example:
  On a machine of the cluster, with a function that trains and tells:

    def train(report, steps):
        trainer = PipelineTrainer(...)
        for metrics in trainer.training_steps(data, steps=steps):
            report({"loss": float(metrics["loss"])})
        trainer.save(directory)  # storage that every host sees
        return float(metrics["loss"])

    losses = run(train, 1000, num_processes=4, gpus=8, on_report=print)

Ray sends functions and values by pickle: its ports, like those of JAX, belong inside of a trusted network.
"""

from __future__ import annotations

import importlib
import os
import re
import socket
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxpp_flax.engine.watch import DEFAULT_FAILURE_TIMEOUT
from jaxpp_flax.launch.ending import Ending
from jaxpp_flax.launch.settings import LaunchError, LaunchSettings
from jaxpp_flax.launch.starting import connect

__all__ = ["Report", "run"]

Report = Callable[[Any], None]
"""What a program tells the driver with. Process 0's reports arrive, in order; those of the others are dropped. Arrays
arrive as NumPy's, and must be whole in process 0."""

_POLL_SECONDS = 0.2


def run(
    function: Callable[..., Any],
    *arguments: Any,
    num_processes: int,
    devices_per_process: int = 1,
    cpus: float = 1.0,
    gpus: float = 0.0,
    one_per_host: bool = True,
    environment: Mapping[str, str] | None = None,
    on_report: Callable[[Any], None] | None = None,
    failure_timeout_s: float = DEFAULT_FAILURE_TIMEOUT,
    initialization_timeout_s: float = 300.0,
) -> list[Any]:
    """Run a function as one process on each of several hosts of a Ray cluster, connected as by `initialize`.

    Call `ray.init` before, or this machine becomes a cluster of its own.

    Args:
      function: called as `function(report, *arguments)` in every process; `report` is a `Report`.
      arguments: the same in every process.
      num_processes: how many.
      devices_per_process: virtual devices of each process on CPU; accelerators are counted by `gpus`.
      cpus: CPUs that each process asks Ray for.
      gpus: GPUs that each process asks Ray for, and gets.
      one_per_host: every process on another host; otherwise on as few as possible.
      environment: more environment variables for the processes.
      on_report: called here with each of process 0's reports, as they come.
      failure_timeout_s: seconds within which a failure of one process has ended all.
      initialization_timeout_s: seconds for Ray to find the resources, and for all processes to connect.

    Returns:
      What the function returned, by process; arrays as NumPy's.

    Raises:
      LaunchError: if Ray is missing or has not the resources, or if a process fails: that error is its cause.
    """
    if num_processes < 1:
        raise LaunchError(f"num_processes={num_processes}: at least one process is needed.")
    ray = _import_ray()
    if not ray.is_initialized():
        ray.init()
    resources = {"CPU": cpus, **({"GPU": gpus} if gpus else {})}
    group = ray.util.placement_group([resources] * num_processes, strategy="STRICT_SPREAD" if one_per_host else "PACK")
    workers: list[Any] = []
    reports: Any = None
    try:
        if not group.wait(timeout_seconds=initialization_timeout_s):
            raise LaunchError(
                f"Ray did not find {num_processes} {'hosts' if one_per_host else 'places'} with {resources} within "
                f"{initialization_timeout_s:g} s; it has {ray.cluster_resources()}. Ask for less, or pass "
                "one_per_host=False."
            )
        reports = importlib.import_module("ray.util.queue").Queue(actor_options={"num_cpus": 0})
        strategy = importlib.import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
        actor = ray.remote(_Worker)
        variables = {**_device_variables(devices_per_process), **(environment or {})}
        workers = [
            actor.options(
                num_cpus=cpus,
                num_gpus=gpus,
                max_restarts=0,
                runtime_env={"env_vars": variables},
                scheduling_strategy=strategy(placement_group=group, placement_group_bundle_index=index),
            ).remote()
            for index in range(num_processes)
        ]
        address = ray.get(workers[0].free_address.remote(), timeout=initialization_timeout_s)
        settings = [
            LaunchSettings(
                coordinator_address=address,
                num_processes=num_processes,
                process_id=index,
                failure_timeout=failure_timeout_s,
            )
            for index in range(num_processes)
        ]
        calls = [
            worker.execute.remote(place, initialization_timeout_s, reports, function, arguments)
            for worker, place in zip(workers, settings, strict=True)
        ]
        return _follow(ray, calls, reports, on_report, failure_timeout_s)
    finally:
        for worker in workers:
            ray.kill(worker)
        if reports is not None:
            reports.shutdown()
        ray.util.remove_placement_group(group)


def _import_ray() -> Any:
    try:
        ray = importlib.import_module("ray")
        importlib.import_module("ray.util")
    except ImportError as error:
        raise LaunchError("Ray is not installed: pip install 'jaxpp-flax[ray]'.") from error
    return ray


def _device_variables(devices_per_process: int) -> dict[str, str]:
    flags = re.sub(r"--xla_force_host_platform_device_count=\S*", "", os.environ.get("XLA_FLAGS", "")).strip()
    return {"JAX_NUM_CPU_DEVICES": str(devices_per_process), "XLA_FLAGS": flags}


def _follow(
    ray: Any, calls: list[Any], reports: Any, on_report: Callable[[Any], None] | None, failure_timeout_s: float
) -> list[Any]:
    """Pass reports on until all processes have ended, or one has failed."""
    waiting = list(calls)
    while waiting:
        done, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=_POLL_SECONDS)
        _pass_on(reports, on_report)
        errors = {calls.index(call): error for call in done if (error := _error_of(ray, call)) is not None}
        if errors:
            # The others end by themselves, and may do so before the one that failed first is known to have ended.
            late, _ = (
                ray.wait(waiting, num_returns=len(waiting), timeout=0.3 * failure_timeout_s) if waiting else ([], [])
            )
            errors |= {calls.index(call): error for call in late if (error := _error_of(ray, call)) is not None}
            raise _first_failure(ray, errors)
    _pass_on(reports, on_report)
    return ray.get(calls)


def _error_of(ray: Any, call: Any) -> Exception | None:
    try:
        ray.get(call)
    except Exception as error:
        return error
    return None


def _first_failure(ray: Any, errors: Mapping[int, Exception]) -> LaunchError:
    """An exception of the program's own comes before the ends of the processes that it brought about."""
    own = {index: error for index, error in errors.items() if isinstance(error, ray.exceptions.RayTaskError)}
    index, error = min((own or errors).items())
    what = "raised" if own else "was killed, or lost its host"
    failure = LaunchError(f"process {index} {what}, and the run has ended: {error}")
    failure.__cause__ = error
    return failure


def _pass_on(reports: Any, on_report: Callable[[Any], None] | None) -> None:
    for report in reports.get_nowait_batch(reports.qsize()):
        if on_report is not None:
            on_report(report)


class _Worker:
    """One process of the run; an actor."""

    def __init__(self) -> None:
        self._ending: Ending | None = None

    def free_address(self) -> str:
        """An address of this host, with a port that is free at the moment."""
        host = importlib.import_module("ray").util.get_node_ip_address()
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind((host, 0))
            port = probe.getsockname()[1]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def execute(
        self,
        settings: LaunchSettings,
        timeout_s: float,
        reports: Any,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
    ) -> Any:
        """Connect, run the function, and disconnect."""

        def report(value: Any) -> None:
            if settings.process_id == 0:
                reports.put(jax.device_get(value))

        if settings.num_processes == 1:
            return jax.device_get(function(report, *arguments))
        ending = connect(settings, None, timeout_s, served_elsewhere=False)
        try:
            result = jax.device_get(function(report, *arguments))
        except BaseException:
            ending.group.report_failure(traceback.format_exc().rstrip())
            raise
        ending.finish()
        return result
