"""`initialize`: connect this process to the others of its run, and make sure that all of them end together."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax

from jaxpp_flax import _compat
from jaxpp_flax._compat_processes import cache, coordination
from jaxpp_flax.launch import coordinator
from jaxpp_flax.launch.host.progress import Progress
from jaxpp_flax.launch.process.place import check_own, listening_addresses, take_place
from jaxpp_flax.launch.process.process_end import ProcessEnd, end_at_once, listen_to_launcher
from jaxpp_flax.launch.process.waiting import await_connection
from jaxpp_flax.launch.settings import LaunchError, LaunchSettings
from jaxpp_flax.processes.failures import PEER_FAILED_STATUS, Failure
from jaxpp_flax.processes.group import ProcessGroup, process_group
from jaxpp_flax.processes.memory_link import MemoryLink
from jaxpp_flax.processes.store import CoordinationError
from jaxpp_flax.processes.waits import print_notice, reporting_thread

__all__ = ["ConnectionOptions", "await_all", "connect", "connect_program", "initialize"]

# JAX aborts a process whose connection it gives up, without a reason; our own deadline, with a reason, comes first.
_AFTER_OUR_DEADLINE = 60
# After half of this many failure timeouts JAX aborts a process whose service does not answer, without a reason. By then
# this package has ended it, with the reason; if it could, that is: a call may hold Python's lock for ever. A heartbeat
# that a short break of the network hits aborts too, so there are few where this package watches the service.
_IN_PROCESS_0, _APART = 2, 40
# Names of a run, of this package's user, SLURM, and Open MPI.
_RUN_IDS = ("JAXPP_FLAX_RUN_ID", "SLURM_JOB_ID", "PMIX_NAMESPACE")


@dataclass(frozen=True, kw_only=True)
class ConnectionOptions:
    """The arguments of `initialize`. None: the value of the launcher or of the cluster, or a default."""

    coordinator_address: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    local_device_ids: Sequence[int] | None = None
    bind_address: str | None = None
    failure_timeout_s: float | None = None
    initialization_timeout_s: float = 300.0


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
    """Connect this process to the others of its run. Call it once, before the first use of a device.

    It needs no arguments under `python -m jaxpp_flax.launch` (which calls it before the script), and on SLURM, Open
    MPI, Kubernetes and TPU pods, which JAX detects. After this call, an uncaught exception in one process ends all of
    them, and each prints its type and message. If a process is killed or stopped, the others name it, and end too. At
    the end of its program, each process waits for all others.

    Args:
      coordinator_address: host and port of process 0, the same in every process.
      num_processes: the number of processes.
      process_id: the index of this process, from 0.
      local_device_ids: the accelerators of this host that this process uses; None: all, or the cluster's choice.
      bind_address: the address that this process's own sockets listen on; None: the address by which it reaches the
        coordinator. With "0.0.0.0", the coordination service (in process 0) listens on all addresses, and the other
        sockets listen as with None, because the other processes need one address.
      failure_timeout_s: seconds within which the failure of one process ends all of them; None: 30.
      initialization_timeout_s: seconds to wait until all processes have connected.

    Returns:
      The processes of the run.

    Raises:
      LaunchError: if the address, the number and the index are neither given nor found; if the coordinator's address
        cannot be resolved, or this host cannot listen on `bind_address`; if another process of this host has the same
        index or port.

    Example:
      >>> initialize(coordinator_address="127.0.0.1:4321", num_processes=1, process_id=0).process_count
      1
    """
    end = connect_program(
        ConnectionOptions(
            coordinator_address=coordinator_address,
            num_processes=num_processes,
            process_id=process_id,
            local_device_ids=local_device_ids,
            bind_address=bind_address,
            failure_timeout_s=failure_timeout_s,
            initialization_timeout_s=initialization_timeout_s,
        )
    )
    return process_group() if end is None else end.group


def connect_program(options: ConnectionOptions) -> ProcessEnd | None:
    """`initialize` for code that runs a user's program.

    Returns:
      The end of this process, installed; None for a single process, or one that is connected already.
    """
    if _is_connected():
        group, timeout_s = process_group(), options.failure_timeout_s
        group.watch() if timeout_s is None else group.watch(timeout_s)
        return None
    settings = LaunchSettings.from_environment(os.environ)
    served_elsewhere, local_device_ids = settings is not None, options.local_device_ids
    if settings is None:
        settings, local_device_ids = _find_place(options)
    for name in settings.to_environment():
        os.environ.pop(name, None)  # programs that this process starts do not belong to the run
    if settings.num_processes == 1:
        _listen(settings, lambda _: None)
        _take_part(process_group(), settings)
        _tell_launcher(settings)
        return None
    if (why := _compat.why_one_process() or coordination.why_no_mtls()) is not None:
        raise LaunchError(why)
    settings = replace(
        settings,
        bind_address=options.bind_address or settings.bind_address,
        failure_timeout=options.failure_timeout_s or settings.failure_timeout,
    )
    end = connect(settings, local_device_ids, options.initialization_timeout_s, served_elsewhere=served_elsewhere)
    end.install()
    await_all(end, options.initialization_timeout_s)
    _tell_launcher(settings)
    return end


def _is_connected() -> bool:
    """Whether this process takes part in a run. Asking makes no group: `jax.distributed.initialize` must come first."""
    takes_part = process_group.cache_info().currsize > 0 and process_group().run_id != ""
    return jax.distributed.is_initialized() or takes_part


def _find_place(options: ConnectionOptions) -> tuple[LaunchSettings, Sequence[int] | None]:
    """The place of this process by the options, else by the cluster; and its devices."""
    address, count, index = options.coordinator_address, options.num_processes, options.process_id
    local_device_ids = options.local_device_ids
    if address is None or count is None or index is None:
        found = _ask_cluster(options)
        address = address or found.coordinator_address
        count = found.process_count if count is None else count
        index = found.process_index if index is None else index
        local_device_ids = found.local_device_ids if local_device_ids is None else local_device_ids
    # What the cluster calls this run, so that no other one takes part in it.
    run_id = next(filter(None, (os.environ.get(name) for name in _RUN_IDS)), "")
    settings = LaunchSettings(coordinator_address=address, num_processes=count, process_id=index, run_id=run_id)
    return settings, local_device_ids


def _ask_cluster(options: ConnectionOptions) -> _compat.ClusterPlace:
    try:
        place = _compat.detect_cluster(round(options.initialization_timeout_s))
    except Exception as error:
        raise LaunchError(
            "JAX could not find this process's place among those that the cluster started: "
            f"{type(error).__name__}: {error}. Fix that, or give coordinator_address, num_processes and process_id."
        ) from error
    if place is None:
        names = ("coordinator_address", "num_processes", "process_id")
        missing = ", ".join(name for name in names if getattr(options, name) is None)
        raise LaunchError(
            "initialize() found no cluster (SLURM, Open MPI, Kubernetes, TPU pod) around this process, and was not "
            f"given {missing}. Give all three, or start the program by `python -m jaxpp_flax.launch -n 4 script.py`."
        )
    return place


def connect(
    settings: LaunchSettings,
    local_device_ids: Sequence[int] | None,
    timeout_s: float,
    *,
    served_elsewhere: bool,
) -> ProcessEnd:
    """Connect this process to the others; returns its end, for the caller to install or to call.

    If it is served elsewhere, process 0 does not serve the coordination.
    """
    bind_address, listen_at = listening_addresses(settings)
    check_own(bind_address)
    # The service has a process of its own: the launcher's, or process 0 starts it. Else JAX's own one is in process 0.
    apart = served_elsewhere or _compat.private_names_in_use()["coordination_service"]
    serves = settings.process_id == 0 and apart and not served_elsewhere
    place = take_place(settings, listen_at if serves else None)
    connected, watching = threading.Event(), threading.Event()
    service: subprocess.Popen[bytes] | None = None
    with contextlib.ExitStack() as undone:  # a program that catches the error, as a notebook does, goes on without it
        undone.callback(place.close)
        if serves:
            service = coordinator.start(settings, linger=settings.failure_timeout + 5.0, address=listen_at)
            undone.callback(coordinator.end, service)
        undone.callback(connected.set)
        awaits = partial(await_connection, connected, settings, timeout_s, service, listen_at)
        reporting_thread("jaxpp_flax connecting", awaits, print_notice).start()
        _listen(settings, lambda failure: _on_launcher_news(failure, watching))
        jax.distributed.initialize(
            settings.coordinator_address,
            settings.num_processes,
            settings.process_id,
            local_device_ids,
            cluster_detection_method="deactivate",
            initialization_timeout=round(timeout_s) + _AFTER_OUR_DEADLINE,
            heartbeat_timeout_seconds=max(2, round((_APART if apart else _IN_PROCESS_0) * settings.failure_timeout)),
            # JAX's own service in process 0 is unused then: it gets a free port of loopback.
            coordinator_bind_address="127.0.0.1:0" if apart else listen_at,
        )
        if apart:
            coordination.outlive_broken_connections(round(timeout_s))
        undone.pop_all()
    connected.set()
    _take_sigterm_back()
    cache.write_in_every_process()
    _compat.bind_cpu_collectives(bind_address)
    os.environ.setdefault("JAXPP_FLAX_BIND_ADDRESS", bind_address)  # for the engine's transports
    group = process_group()
    group.serves = settings.process_id == 0 and not apart
    _take_part(group, settings)
    end = ProcessEnd(group, settings.failure_timeout, lambda: _leave(service, place), settings.control_fd)
    try:
        group.watch(settings.failure_timeout)
    except CoordinationError as error:
        # A normal exit of Python would disconnect the other process that has this index.
        print_notice(str(error))
        end_at_once(1)
    watching.set()
    return end


def await_all(end: ProcessEnd, timeout_s: float) -> None:
    """Wait for the other processes; if one of them fails, this one ends as in the program."""
    end.group.barrier("the start of all processes", timeout_s)


def _listen(settings: LaunchSettings, on_failure: Callable[[Failure], None]) -> None:
    if settings.control_fd is not None:
        # If the launcher was killed, kill this process and those that it started.
        listen_to_launcher(settings.control_fd, on_failure, partial(os.killpg, 0, signal.SIGKILL))


def _take_part(group: ProcessGroup, settings: LaunchSettings) -> None:
    """Tell the group of which run it is, and let the launcher see its steps."""
    group.run_id, group.attempt = settings.run_id, settings.attempt
    group.memory_file = settings.memory_fd
    if settings.memory_link_fd is not None:
        group.memory_link = MemoryLink(settings.memory_link_fd, settings.processes_per_host)
    if settings.progress_fd is not None:
        progress = Progress(settings.progress_fd)
        group.on_step, group.on_memory = progress.begin, progress.goes_on_from_memory


def _tell_launcher(settings: LaunchSettings) -> None:
    """Say that this process and all others have started."""
    if settings.control_fd is not None:
        with contextlib.suppress(OSError):  # the launcher has gone
            os.write(settings.control_fd, b"connected\n")


def _take_sigterm_back() -> None:
    """Install Python's handler of SIGTERM again: with that of JAX's preemption service a process would not end."""
    handler = signal.getsignal(signal.SIGTERM)
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def _on_launcher_news(failure: Failure, watching: threading.Event) -> None:
    """Record the end of a process. The operating system tells the launcher, sooner than heartbeats could."""
    if not watching.is_set():
        print_notice(f"the run has ended: {failure}\n(Processes were still connecting.)")
        end_at_once(PEER_FAILED_STATUS)
    process_group().observe_end(failure)


def _leave(service: subprocess.Popen[bytes] | None, place: socket.socket) -> None:
    jax.distributed.shutdown()
    place.close()
    if service is not None:
        coordinator.say_goodbye(service)
