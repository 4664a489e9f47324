"""A function on a Ray cluster, in one actor on each host: `losses = run(train, 1000, num_processes=4, gpus=8)`."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax

from jaxpp_flax.launch import coordinator
from jaxpp_flax.launch.process.connection import await_all, connect
from jaxpp_flax.launch.process.process_end import ProgramExitError, type_and_message
from jaxpp_flax.launch.ray.cluster import import_ray
from jaxpp_flax.launch.settings import LaunchError, LaunchSettings, describe_preemption, join_host_and_port
from jaxpp_flax.messages import error_location
from jaxpp_flax.processes.failures import DEFAULT_FAILURE_TIMEOUT, PREEMPTED_STATUS
from jaxpp_flax.processes.store import ProcessFailedError

__all__ = ["run_function"]

_PREEMPTED = "jaxpp_flax: saved after SIGTERM"  # the result of such a process


def run_function(
    function: Callable[..., Any],
    *arguments: Any,
    num_processes: int,
    cpus: float = 1.0,
    gpus: float = 0.0,
    strategy: str = "STRICT_SPREAD",
    environment: Mapping[str, str] | None = None,
    failure_timeout_s: float = DEFAULT_FAILURE_TIMEOUT,
    initialization_timeout_s: float = 300.0,
) -> list[Any]:
    """As `run` describes it."""
    ray, strategies = import_ray("util.scheduling_strategies")
    scheduling = strategies.PlacementGroupSchedulingStrategy
    resources = {"CPU": cpus, **({"GPU": gpus} if gpus else {})}
    with contextlib.ExitStack() as cleanup:
        group = ray.util.placement_group([resources] * num_processes, strategy=strategy)
        cleanup.callback(ray.util.remove_placement_group, group)
        if not group.wait(timeout_seconds=initialization_timeout_s):
            raise LaunchError(
                f"Ray did not find {num_processes} places ({strategy}) with {resources} within "
                f"{initialization_timeout_s:g} s; it has {ray.cluster_resources()}. Ask for less."
            )
        workers = list[Any]()
        for place in range(num_processes):
            actor = ray.remote(num_cpus=cpus, num_gpus=gpus, max_restarts=0)(_Worker).options(
                runtime_env={"env_vars": dict(environment or {})}, scheduling_strategy=scheduling(group, place)
            )
            workers.append(actor.remote())
            cleanup.callback(ray.kill, workers[-1])
        address = ray.get(workers[0].free_address.remote(), timeout=initialization_timeout_s)
        first = LaunchSettings(coordinator_address=address, num_processes=num_processes, process_id=0)
        settings = replace(first, failure_timeout=failure_timeout_s)
        calls = [
            worker.execute.remote(place, initialization_timeout_s, function, arguments)
            for worker, place in zip(workers, settings.for_every_process(), strict=True)
        ]
        return _results(ray, calls, failure_timeout_s)


def _results(ray: Any, calls: list[Any], failure_timeout_s: float) -> list[Any]:
    """What all processes return; the error of the one that failed first, if one fails."""
    errors: dict[int, Exception] = {}  # in the order of the ends
    waiting, timeout_s = list(calls), None
    while waiting and (done := ray.wait(waiting, timeout=timeout_s)[0]):
        waiting.remove(done[0])
        try:
            ray.get(done[0])
        except Exception as error:
            errors[calls.index(done[0])] = error
            timeout_s = 0.3 * failure_timeout_s  # the others end by themselves, and one may know the reason
    if errors:
        raised = {i: e for i, e in errors.items() if isinstance(e, ray.exceptions.RayTaskError)}
        own = {i: e for i, e in raised.items() if not isinstance(e, ProcessFailedError)}
        # Its own exception says most, then what another process says of it, then its end.
        index, error = next(iter((own or raised or errors).items()))
        what = "raised" if raised else "was killed, lost its host, or ended as its output says"
        raise LaunchError(f"process {index} {what}, and the run has ended: {error}") from error
    results = ray.get(calls)
    if any(isinstance(result, str) and result == _PREEMPTED for result in results):
        print(f"jaxpp_flax.launch: {describe_preemption(len(results))}", file=sys.stderr)
        raise SystemExit(PREEMPTED_STATUS)
    return results


class _Worker:
    """One process of the run; an actor."""

    def free_address(self) -> str:
        """An address of this host, with a free port."""
        host = importlib.import_module("ray").util.get_node_ip_address()
        with coordinator.reserve_port(host) as reserved:
            return join_host_and_port(host, reserved.getsockname()[1])

    def execute(
        self, settings: LaunchSettings, timeout_s: float, function: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> Any:
        """Connect, run the function, and disconnect."""
        if settings.num_processes == 1:
            return _call(function, arguments)
        end = connect(settings, None, timeout_s, served_elsewhere=False)
        try:
            await_all(end, timeout_s)
            result = _call(function, arguments)
        except BaseException as error:
            end.group.place = error_location(error)
            if end.is_a_consequence(error):
                end.group.check(error)
            end.group.report_failure(type_and_message(error))
            raise
        end.finish()
        return result


def _call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    try:
        return jax.device_get(function(*arguments))
    except SystemExit as error:
        if error.code in (None, 0, PREEMPTED_STATUS):
            return _PREEMPTED if error.code else None
        # Ray would end the actor by a SystemExit, as if the user had wished it.
        raise ProgramExitError(error.code) from None
