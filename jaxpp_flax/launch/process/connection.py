"""`initialize`: connect this process to the others of its run, and make sure that they end together."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import jax

from jaxpp_flax import _compat
from jaxpp_flax.launch import coordinator
from jaxpp_flax.launch.process.process_end import Ending, end_at_once, listen_to_launcher
from jaxpp_flax.launch.settings import LaunchError, LaunchSettings
from jaxpp_flax.processes.failures import PEER_FAILED_STATUS, Failure
from jaxpp_flax.processes.group import ProcessGroup, process_group
from jaxpp_flax.processes.store import CoordinationError, own_address

__all__ = ["connect", "initialize", "join"]

# JAX aborts a process whose connection it gives up, without a word on why; our own deadline comes before that.
_AFTER_OUR_DEADLINE = 60
# A run before this one that ended well leaves its service for up to 5 s.
_WAIT_FOR_PORT_SECONDS = 10.0


def initialize(
    *,
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: Sequence[int] | None = None,
    bind_address: str | None = None,
    failure_timeout_s: float | None = None,
    initialization_timeout_s: float = 300.0,
) -> ProcessGroup:
    """Connect this process to the others of its run. To be called once, before the first use of a device.

    Needs no arguments under `python -m jaxpp_flax.launch` (which calls it before the script), and on SLURM, Open MPI,
    Kubernetes and TPU pods, which JAX detects. From then on, an uncaught exception ends every process, with its
    traceback; a process that is killed or stopped is named by the others, which end too; and the end of the program
    waits for all of them.

    Args:
      coordinator_address: host and port of process 0, the same in every process.
      num_processes: how many processes there are.
      process_id: which of them this one is, from 0.
      local_device_ids: the accelerators of this host that are this process's; None: all, or as the cluster says.
      bind_address: the address that this process's own sockets listen on; None: the one by which it reaches the
        coordinator. With "0.0.0.0", the coordination service (in process 0) listens on all addresses, and the other
        sockets, whose address the peers are told, on that one.
      failure_timeout_s: seconds within which a failure anywhere has ended every process; None: 30.
      initialization_timeout_s: seconds to wait for all processes.

    Returns:
      The processes of the run.

    Raises:
      LaunchError: if the processes' places are neither given nor found.

    Example:
      >>> initialize(coordinator_address="127.0.0.1:4321", num_processes=1, process_id=0).process_count
      1
    """
    ending = join(
        coordinator_address=coordinator_address,
        num_processes=num_processes,
        process_id=process_id,
        local_device_ids=local_device_ids,
        bind_address=bind_address,
        failure_timeout_s=failure_timeout_s,
        initialization_timeout_s=initialization_timeout_s,
    )
    return process_group() if ending is None else ending.group


def join(
    *,
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: Sequence[int] | None = None,
    bind_address: str | None = None,
    failure_timeout_s: float | None = None,
    initialization_timeout_s: float = 300.0,
) -> Ending | None:
    """`initialize`, for what runs a user's program: how this process ends; None for a single one, or one connected."""
    if jax.distributed.is_initialized():
        group = process_group()
        group.watch() if failure_timeout_s is None else group.watch(failure_timeout_s)
        return None
    settings = LaunchSettings.from_environment(os.environ)
    served_elsewhere = settings is not None
    if settings is None:
        settings, local_device_ids = _find_place(
            coordinator_address, num_processes, process_id, local_device_ids, round(initialization_timeout_s)
        )
    if settings.num_processes == 1:
        return None
    if (why := _compat.why_one_process()) is not None:
        raise LaunchError(why)
    for name in settings.to_environment():
        os.environ.pop(name, None)  # programs that this one starts are no processes of the run
    settings = replace(
        settings,
        bind_address=bind_address or settings.bind_address,
        failure_timeout=failure_timeout_s or settings.failure_timeout,
    )
    ending = connect(settings, local_device_ids, initialization_timeout_s, served_elsewhere=served_elsewhere)
    ending.install()
    return ending


def _find_place(
    coordinator_address: str | None,
    num_processes: int | None,
    process_id: int | None,
    local_device_ids: Sequence[int] | None,
    timeout_s: int,
) -> tuple[LaunchSettings, Sequence[int] | None]:
    if coordinator_address is None or num_processes is None or process_id is None:
        try:
            place = _compat.detect_cluster(timeout_s)
        except Exception as error:
            raise LaunchError(
                "JAX could not find this process's place among those that the cluster started: "
                f"{type(error).__name__}: {error}. Mend that, or give coordinator_address, num_processes and "
                "process_id."
            ) from error
        if place is None:
            missing = {"coordinator_address": coordinator_address, "num_processes": num_processes,
                       "process_id": process_id}  # fmt: skip
            raise LaunchError(
                "initialize() found no cluster (SLURM, Open MPI, Kubernetes, TPU pod) around this process, and was not "
                f"given {', '.join(name for name, value in missing.items() if value is None)}. Give all three, or "
                "start the program by `python -m jaxpp_flax.launch -n 4 script.py`."
            )
        coordinator_address = coordinator_address or place.coordinator_address
        num_processes = place.process_count if num_processes is None else num_processes
        process_id = place.process_index if process_id is None else process_id
        local_device_ids = place.local_device_ids if local_device_ids is None else local_device_ids
    settings = LaunchSettings(
        coordinator_address=coordinator_address, num_processes=num_processes, process_id=process_id
    )
    return settings, local_device_ids


def _own_address(coordinator_address: str) -> str:
    try:
        return own_address(coordinator_address)
    except OSError as error:
        raise LaunchError(
            f"the coordinator's address {coordinator_address!r} cannot be reached or resolved: {error}"
        ) from error


def connect(
    settings: LaunchSettings,
    local_device_ids: Sequence[int] | None,
    timeout_s: float,
    *,
    served_elsewhere: bool,
    on_failure: Callable[[Failure], None] | None = None,
) -> Ending:
    """Connect this process to the others.

    Args:
      settings: its place.
      local_device_ids: the accelerators of this host that are this process's; None: all.
      timeout_s: seconds to wait for all processes.
      served_elsewhere: whether something other than process 0 serves the coordination.
      on_failure: as in `ProcessGroup.watch`.

    Returns:
      How this process ends: to be installed, or called.
    """
    bind_address, listen_at = _listening_addresses(settings)
    _check_own(bind_address)
    serves = settings.process_id == 0 and not served_elsewhere
    serves = serves and _compat.private_names_in_use()["coordination_service"]
    place = _take_place(settings, listen_at if serves else None)
    late = threading.Timer(timeout_s, _end_unconnected, (settings, timeout_s))
    late.daemon = True
    late.start()
    watching = threading.Event()
    if settings.control_fd is not None:
        listen_to_launcher(
            settings.control_fd, lambda failure: _on_launcher_news(failure, watching), _end_with_the_launcher
        )
    service: subprocess.Popen[bytes] | None = None
    if serves:
        service = coordinator.start(
            listen_at,
            settings.num_processes,
            settings.failure_timeout,
            linger=settings.failure_timeout + 5.0,
        )
    # With a service elsewhere, JAX's own one in process 0 serves nobody, on a free port of loopback.
    alone = served_elsewhere or service is not None
    jax.distributed.initialize(
        settings.coordinator_address,
        settings.num_processes,
        settings.process_id,
        local_device_ids,
        cluster_detection_method="deactivate",
        initialization_timeout=round(timeout_s) + _AFTER_OUR_DEADLINE,
        heartbeat_timeout_seconds=coordinator.heartbeat_timeout(settings.failure_timeout),
        coordinator_bind_address="127.0.0.1:0" if alone else listen_at,
    )
    late.cancel()
    _take_sigterm_back()
    _compat.bind_cpu_collectives(bind_address)
    os.environ.setdefault("JAXPP_FLAX_BIND_ADDRESS", bind_address)  # for the engine's transports
    group = process_group()
    ending = Ending(group, settings.failure_timeout, lambda: _leave(service, place), settings.control_fd)
    try:
        group.watch(settings.failure_timeout, on_failure)
    except CoordinationError as error:
        # The end of Python would disconnect the other process with this one's index.
        print(f"jaxpp_flax: {error}", file=sys.stderr)
        end_at_once(1)
    watching.set()
    group.barrier("the start of all processes", timeout_s)
    return ending


def _take_sigterm_back() -> None:
    """JAX's preemption service has taken SIGTERM: without a `fit` that saves, a process would not end by it."""
    handler = signal.getsignal(signal.SIGTERM)
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def _listening_addresses(settings: LaunchSettings) -> tuple[str, str]:
    """Where this process's own sockets listen, and where the coordination service would."""
    if settings.bind_address in ("0.0.0.0", "::"):
        port = settings.coordinator_address.rpartition(":")[2]
        host = f"[{settings.bind_address}]" if ":" in settings.bind_address else settings.bind_address
        return _own_address(settings.coordinator_address), f"{host}:{port}"
    return settings.bind_address or _own_address(settings.coordinator_address), settings.coordinator_address


def _check_own(bind_address: str) -> None:
    try:
        family, kind, _, _, address = socket.getaddrinfo(bind_address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
    except OSError as error:
        raise LaunchError(
            f"bind_address={bind_address!r}: this host cannot listen there: {error}. Give one of its own addresses, or "
            "none: then it is the one by which it reaches the coordinator."
        ) from error


def _take_place(settings: LaunchSettings, listen_at: str | None) -> socket.socket:
    """Be the one process of this host with this index in the run.

    JAX takes two for one, or aborts either of them; and its services would share a port, and mix two runs.

    Args:
      settings: of this process.
      listen_at: where it serves the coordination, if it does.

    Returns:
      What keeps the place for as long as it is open.

    Raises:
      LaunchError: if another process has it, or the port.
    """
    place = socket.socket(socket.AF_UNIX)
    name = f"jaxpp_flax process {settings.process_id} of {settings.coordinator_address}"
    deadline = time.monotonic() + _WAIT_FOR_PORT_SECONDS
    while True:
        text = ""
        if listen_at is not None and coordinator.is_taken(int(listen_at.rpartition(":")[2])):
            text = (
                f"the coordination service cannot listen on {listen_at}: the port is taken, by another run or by what "
                "is left of one (it goes within the failure timeout), or by another process with process_id=0. Wait "
                "for that to end, or give another port."
            )
        elif not _binds(place, name):
            text = (
                f"another process of this host is process {settings.process_id} of the run at "
                f"{settings.coordinator_address}. Give each process a process_id of its own, from 0 to "
                f"{settings.num_processes - 1}; or wait until that one, which may be left of an earlier run, has ended."
            )
        if not text:
            return place
        if time.monotonic() > deadline:
            place.close()
            raise LaunchError(text)
        time.sleep(0.2)


def _binds(place: socket.socket, name: str) -> bool:
    if not sys.platform.startswith("linux"):
        return True  # only there are names that go with their process
    try:
        place.bind(f"\0{name}")
    except OSError as error:
        return error.errno != errno.EADDRINUSE
    return True


def _on_launcher_news(failure: Failure, watching: threading.Event) -> None:
    """The launcher is told by the operating system that a process has ended: sooner than heartbeats can tell."""
    if not watching.is_set():
        print(f"jaxpp_flax: the run has ended: {failure}\n(Processes were still connecting.)", file=sys.stderr)
        end_at_once(PEER_FAILED_STATUS)
    process_group().observe_end(failure)


def _end_with_the_launcher() -> None:
    """The launcher was killed: so are this process and those that it started."""
    os.killpg(0, signal.SIGKILL)


def _end_unconnected(settings: LaunchSettings, timeout_s: float) -> None:
    print(
        f"jaxpp_flax: process {settings.process_id} did not connect to all {settings.num_processes} processes through "
        f"{settings.coordinator_address} within {timeout_s:g} s. Do all of them run, with the same address, and each "
        "with a process_id of its own? Is it the address of process 0, and does a firewall let it through? If they "
        "start slowly, raise initialization_timeout_s.",
        file=sys.stderr,
    )
    end_at_once(1)


def _leave(service: subprocess.Popen[bytes] | None, place: socket.socket) -> None:
    jax.distributed.shutdown()
    place.close()
    if service is not None:
        coordinator.say_goodbye(service)
