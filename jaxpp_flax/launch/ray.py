"""A run on a Ray cluster: one actor for each host, and a driver that receives their reports (extra ``ray``).

Example:
  On a machine of the cluster, with a function that trains and reports:

    def train(report, steps):
        trainer = PipelineTrainer(...)
        for _, metrics in trainer.training_steps(data, steps=steps):
            report({"loss": float(metrics["loss"])})
        trainer.save(directory)  # storage that every host sees
        return float(metrics["loss"])

    losses = run(train, 1000, num_processes=4, gpus=8, on_report=print)

Ray sends functions and values by pickle: keep its ports, like those of JAX, inside a trusted network.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxpp_flax.launch import coordinator
from jaxpp_flax.launch.process.connection import connect
from jaxpp_flax.launch.process.process_end import ProgramExitError, type_and_message
from jaxpp_flax.launch.settings import (
    LaunchError,
    LaunchSettings,
    describe_preemption,
    device_environment,
    join_host_and_port,
)
from jaxpp_flax.processes.failures import DEFAULT_FAILURE_TIMEOUT, PREEMPTED_STATUS, Failure
from jaxpp_flax.processes.group import process_group
from jaxpp_flax.processes.waits import call_with_limit, error_location

__all__ = ["Report", "run"]

Report = Callable[[Any], None]
"""The function by which a program sends a value to the driver. Process 0's reports arrive in order; the reports of the
other processes are dropped. Arrays arrive as NumPy's; process 0 must have the whole array."""

_POLL_SECONDS = 0.2
_TELL_SECONDS = 2.0


@dataclass(frozen=True)
class _Told:
    """A message from a process to the driver: a report, or the failure of another process that ends this one."""

    process: int
    report: Any = None
    failed: int | None = None
    why: str | None = None


@dataclass(frozen=True)
class _Preempted:
    """The result of a process that has saved after SIGTERM."""


@dataclass
class _News:
    """The messages and errors that the driver has received."""

    on_report: Callable[[Any], None] | None
    errors: dict[int, Exception] = field(default_factory=dict)
    told: dict[int, _Told] = field(default_factory=dict)  # from the processes that end because of another one


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
    """Run a function as one process on each of several hosts of a Ray cluster, connected as `initialize` does.

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
      The results of the function, by process; arrays as NumPy's.

    Raises:
      LaunchError: if Ray is missing or lacks the resources, or if a process fails: its `__cause__` is that error.
      SystemExit: with status 75, if the processes were asked to end by SIGTERM, and have saved.
    """
    if num_processes < 1:
        raise LaunchError(f"num_processes={num_processes}: at least one process is needed.")
    ray = _import_ray()
    if not ray.is_initialized():
        ray.init()
    resources = {"CPU": cpus, **({"GPU": gpus} if gpus else {})}
    variables = {**device_environment(os.environ, devices_per_process), **(environment or {})}
    with contextlib.ExitStack() as cleanup:
        group = _reserve(ray, cleanup, [resources] * num_processes, one_per_host, initialization_timeout_s)
        queue = importlib.import_module("ray.util.queue").Queue(actor_options={"num_cpus": 0})
        cleanup.callback(queue.shutdown)
        actors = _Actors(ray, cleanup, group)
        workers = [actors.start(_Worker, place, cpus, gpus, variables) for place in range(num_processes)]
        # Not by process 0, which may be killed; and it ends with this driver, or by it.
        service = actors.start(_Service, 0, 0.0, 0.0, {**variables, "TF_CPP_MIN_LOG_LEVEL": "2"})
        address, served = ray.get(
            service.serve.remote(num_processes, failure_timeout_s), timeout=initialization_timeout_s
        )
        settings = LaunchSettings(
            coordinator_address=address,
            num_processes=num_processes,
            process_id=0,
            failure_timeout=failure_timeout_s,
        )
        calls = [
            worker.execute.remote(place, initialization_timeout_s, served, queue, function, arguments)
            for worker, place in zip(workers, settings.for_every_process(), strict=True)
        ]
        return _follow(ray, calls, queue, _News(on_report), failure_timeout_s)


def _reserve(
    ray: Any, cleanup: contextlib.ExitStack, bundles: list[dict[str, float]], one_per_host: bool, timeout_s: float
) -> Any:
    """Reserve the resources of each process, until the cleanup."""
    group = ray.util.placement_group(bundles, strategy="STRICT_SPREAD" if one_per_host else "PACK")
    cleanup.callback(ray.util.remove_placement_group, group)
    if not group.wait(timeout_seconds=timeout_s):
        raise LaunchError(
            f"Ray did not find {len(bundles)} {'hosts' if one_per_host else 'places'} with {bundles[0]} within "
            f"{timeout_s:g} s; it has {ray.cluster_resources()}. Ask for less, or pass one_per_host=False."
        )
    return group


@dataclass(frozen=True)
class _Actors:
    """Starts actors in the places of a placement group; the cleanup kills them."""

    ray: Any
    cleanup: contextlib.ExitStack
    group: Any

    def start(self, kind: type[Any], place: int, cpus: float, gpus: float, variables: Mapping[str, str]) -> Any:
        strategy = importlib.import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
        options = self.ray.remote(kind).options(
            num_cpus=cpus,
            num_gpus=gpus,
            max_restarts=0,
            runtime_env={"env_vars": dict(variables)},
            scheduling_strategy=strategy(placement_group=self.group, placement_group_bundle_index=place),
        )
        actor = options.remote()
        self.cleanup.callback(self.ray.kill, actor)
        return actor


def _import_ray() -> Any:
    try:
        ray = importlib.import_module("ray")
        importlib.import_module("ray.util")
    except ImportError as error:
        raise LaunchError("Ray is not installed: pip install 'jaxpp-flax[ray]'.") from error
    return ray


def _follow(ray: Any, calls: list[Any], queue: Any, news: _News, failure_timeout_s: float) -> list[Any]:
    """Pass reports on until all processes have ended, or one has failed."""
    waiting = list(calls)
    while waiting:
        done, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=_POLL_SECONDS)
        _hear(ray, calls, done, queue, news)
        if news.errors:
            # The others end by themselves, and may do so before the one that failed first is known to have ended.
            late = ray.wait(waiting, num_returns=len(waiting), timeout=0.3 * failure_timeout_s)[0] if waiting else []
            _hear(ray, calls, late, queue, news)
            raise _first_failure(ray, news)
    results = ray.get(calls)
    if any(isinstance(result, _Preempted) for result in results):
        print(f"jaxpp_flax.launch: {describe_preemption(len(results))}", file=sys.stderr)
        raise SystemExit(PREEMPTED_STATUS)
    return results


def _hear(ray: Any, calls: list[Any], done: list[Any], queue: Any, news: _News) -> None:
    """Record the errors of calls that have ended, and the messages that their processes sent before."""
    for call in done:
        try:
            ray.get(call)
        except Exception as error:
            news.errors[calls.index(call)] = error
    for told in queue.get_nowait_batch(queue.qsize()):
        if told.why is not None:
            news.told[told.process] = told
        elif news.on_report is not None:
            news.on_report(told.report)


def _first_failure(ray: Any, news: _News) -> LaunchError:
    """The error of the process that failed first: its own exception, else its end, else the others' reports of it."""
    own = {index: error for index, error in news.errors.items() if index not in news.told}
    raised = {index: error for index, error in own.items() if isinstance(error, ray.exceptions.RayTaskError)}
    if own:
        index, error = min((raised or own).items())
        what = "raised" if raised else "was killed, or lost its host"
        failure = LaunchError(f"process {index} {what}, and the run has ended: {error}")
        failure.__cause__ = error
        return failure
    _, told = min(news.told.items())
    who = "the run" if told.failed is None else f"process {told.failed}"
    return LaunchError(f"{who} has failed, as process {told.process} found, and the run has ended: {told.why}")


class _Service:
    """The coordination service of the run, on the host of process 0; an actor."""

    def serve(self, num_processes: int, failure_timeout_s: float) -> tuple[str, bool]:
        """Choose an address of this host and serve there.

        Returns:
          The address, and whether the service runs here; if not, process 0 must serve.
        """
        host = importlib.import_module("ray").util.get_node_ip_address()
        with coordinator.reserve_port(host) as reserved:
            address = join_host_and_port(host, reserved.getsockname()[1])
        if num_processes == 1:
            return address, False
        # The service lives as long as this function that ends it.
        self._stop = coordinator.serve(address, num_processes, failure_timeout_s)
        return address, self._stop is not None


class _Worker:
    """One process of the run; an actor."""

    def execute(
        self,
        settings: LaunchSettings,
        timeout_s: float,
        served: bool,
        queue: Any,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
    ) -> Any:
        """Connect, run the function, and disconnect."""

        def report(value: Any) -> None:
            if settings.process_id == 0:
                queue.put(_Told(0, report=jax.device_get(value)))

        def tell(failure: Failure) -> None:
            """Tell the driver that this process ends because of `failure`."""
            told = _Told(settings.process_id, failed=failure.process, why=process_group().describe(failure))
            # With a limit of time: the driver's host may be the one that is gone.
            call_with_limit(lambda: queue.put(told), _TELL_SECONDS)

        raising = threading.Event()

        def end(failure: Failure) -> None:
            if raising.is_set():
                return  # its own error is on its way to the driver, which then ends this actor
            tell(failure)
            process_group().end_process(failure)

        if settings.num_processes == 1:
            return _call(function, report, arguments)
        process_end = connect(settings, None, timeout_s, served_elsewhere=served, on_failure=end)
        try:
            result = _call(function, report, arguments)
        except BaseException as error:
            process_end.group.place = error_location(error)
            if process_end.is_a_consequence(error) and (failure := process_end.group.failure) is not None:
                tell(failure)
            else:
                raising.set()
                process_end.group.report_failure(type_and_message(error))
            raise
        process_end.finish()
        return result


def _call(function: Callable[..., Any], report: Report, arguments: tuple[Any, ...]) -> Any:
    try:
        return jax.device_get(function(report, *arguments))
    except SystemExit as error:
        if error.code in (None, 0):
            return None
        if error.code == PREEMPTED_STATUS:
            return _Preempted()
        # Ray would end the actor by a SystemExit, as if the user had wished it.
        raise ProgramExitError(error.code) from None
