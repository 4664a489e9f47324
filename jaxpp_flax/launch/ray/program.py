"""A program on a Ray cluster: which hosts take part in each life of its run."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import IO, Any

from rich.console import Console

from jaxpp_flax.launch.host.signals import handled_signals
from jaxpp_flax.launch.job import Job
from jaxpp_flax.launch.logs import Logs
from jaxpp_flax.launch.ray.cluster import RayHead, import_ray
from jaxpp_flax.launch.ray.hosts import HostActor, RayHost
from jaxpp_flax.launch.settings import LaunchError
from jaxpp_flax.launch.supervision import supervise

__all__ = ["RayJob", "run_job"]

# The driver's variables that hold for the processes too. All others are those of the host.
_SENT = ("JAX_", "JAXPP_FLAX_", "XLA_", "NCCL_", "LIBTPU_")
_POLL_SECONDS = 0.1
_SECONDS_BETWEEN_LOOKS = 0.5  # at the cluster's nodes
_SECONDS_TO_START = 60.0  # an actor, which imports JAX


@dataclass(frozen=True, kw_only=True)
class RayJob(Job):
    """A job on a Ray cluster: the options of the command line. `min_hosts` None: all."""

    num_processes: int = 1
    address: str | None = None
    hosts: int
    min_hosts: int | None = None
    wait: float = 60.0
    gpus: float = 0.0
    environment: Mapping[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hosts < 1:
            raise LaunchError(f"--hosts {self.hosts}: at least one host is needed. Give the number, as in `--hosts 4`.")
        if not 1 <= self.fewest <= self.hosts:
            raise LaunchError(f"--min-hosts {self.min_hosts}: it must be 1 to {self.hosts} (--hosts).")
        if not self.wait >= 0:
            raise LaunchError(f"--wait {self.wait}: it must be a number of seconds, 0 or more.")
        if not self.gpus >= 0:
            raise LaunchError(f"--gpus {self.gpus}: it must be 0 or more.")

    @property
    def fewest(self) -> int:
        """The number of hosts without which the run does not go on."""
        return self.hosts if self.min_hosts is None else self.min_hosts

    @property
    def resources(self) -> dict[str, float]:
        """What each host's actor requests of Ray."""
        return {"CPU": 1.0, **({"GPU": self.gpus} if self.gpus else {})}


def run_job(job: RayJob, *, out: IO[str] | None = None, console: Console | None = None) -> int:
    """Run a program on the cluster that Ray is connected to, or else finds; returns the exit status.

    Raises:
      LaunchError: if Ray is missing, has no cluster or too few hosts, or has lost its head.
    """
    (ray,) = import_ray()
    if not ray.is_initialized():
        try:
            ray.init(address="auto", logging_level="warning", log_to_driver=False)
        except ConnectionError as error:
            raise LaunchError(
                "Ray finds no cluster: start one (`ray start --head`), run this on one of its hosts, or give its "
                "address as RAY_ADDRESS."
            ) from error
    logs = Logs(job.hosts * job.num_processes, console or Console(stderr=True), out or sys.stdout)
    with handled_signals() as signals, closing(_Hosts(ray, job, logs)) as hosts:
        return supervise(job, logs, signals, lambda: hosts.gather(signals))


class _Hosts:
    """The hosts of the run. They stay the same from life to life, with their warm interpreters, while they live."""

    def __init__(self, ray: Any, job: RayJob, logs: Logs) -> None:
        self._ray, self._job, self._logs = ray, job, logs
        _, self._scheduling = import_ray("util.scheduling_strategies")
        self._head = RayHead(ray.get_runtime_context().gcs_address)
        self._hosts: list[RayHost] = []
        self._number, self._used = 0, job.hosts  # lives, and hosts of the last one
        self._looked = 0.0

    def gather(self, signals: list[int]) -> list[RayHost]:
        """The hosts of the next life, prepared; none if a signal has come meanwhile.

        If there are fewer than before, it waits for others; then the run goes on with those that are there.

        Raises:
          LaunchError: if these are too few.
        """
        for host in self._hosts:
            host.prepare()
        job, begun = self._job, time.monotonic()
        while not signals:
            self._look()
            for host in self._hosts:
                host.poll()
            self._hosts = [host for host in self._hosts if host.lost is None]
            now, coming = time.monotonic(), [host for host in self._hosts if not host.address]
            patient = now - begun < job.wait or any(now - host.asked < _SECONDS_TO_START for host in coming)
            enough = job.hosts if patient and coming else self._used if patient else 0
            if len(self._hosts) - len(coming) >= enough:
                return self._begin(job)
            time.sleep(_POLL_SECONDS)
        return []

    def _begin(self, job: RayJob) -> list[RayHost]:
        for host in self._hosts:
            if not host.address:
                host.give_up("it did not start")
        self._hosts = [host for host in self._hosts if host.lost is None]
        count = len(self._hosts)
        if count < job.fewest:
            total = self._ray.cluster_resources()
            has = ", ".join(f"{total.get(name, 0):g} {name}" for name in job.resources)
            raise LaunchError(
                f"Ray has given {count} of {job.hosts} hosts with {job.resources} within {job.wait:g} s (--wait); "
                f"{job.fewest} are needed (--min-hosts). Its hosts have {has} in all, and other runs may use them."
            )
        self._number, self._used = self._number + 1, count
        for place, host in enumerate(self._hosts):
            host.meet(self._number, self._hosts, place)
        names = ", ".join(host.name for host in self._hosts)
        self._logs.say(f"life {self._number} has {count * job.num_processes} processes on {count} hosts: {names}.")
        return list(self._hosts)

    def _look(self) -> None:
        """Take in the nodes that have come."""
        missing = self._job.hosts - len(self._hosts)
        if not missing or time.monotonic() - self._looked < _SECONDS_BETWEEN_LOOKS:
            return
        self._looked = time.monotonic()
        taken = {host.node for host in self._hosts}
        for node in self._ray.nodes():
            fits = all(node["Resources"].get(name, 0) >= count for name, count in self._job.resources.items())
            if missing and node["Alive"] and fits and node["NodeID"] not in taken:
                self._hosts.append(self._make(node))
                missing -= 1

    def _make(self, node: Mapping[str, Any]) -> RayHost:
        job = self._job
        sent = {name: value for name, value in os.environ.items() if name.startswith(_SENT)} | dict(job.environment)
        affinity = self._scheduling.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        actor = self._ray.remote(num_cpus=1, num_gpus=job.gpus, max_restarts=0)(HostActor)
        handle = actor.options(scheduling_strategy=affinity).remote(
            list(job.program), job.devices_per_process, job.forks, os.getcwd(), sent, job.max_restarts > 0
        )
        name = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}, node {node['NodeID'][:8]})"
        host = RayHost(self._ray, handle, name, node["NodeID"], self._logs, self._head, job.failure_timeout)
        host.prepare()
        return host

    def close(self) -> None:
        """End the actors, and with them all that is left of the run."""
        self._head.close()
        for host in self._hosts:
            host.give_up("the run is over")
