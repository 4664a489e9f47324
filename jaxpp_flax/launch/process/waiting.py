"""What a process says while it waits for its connection to all others, and its end if that does not come."""

from __future__ import annotations

import socket
import subprocess
import threading
import time

from jaxpp_flax.launch.coordinator import is_taken
from jaxpp_flax.launch.host.signals import describe_end
from jaxpp_flax.launch.process.place import why_not_own
from jaxpp_flax.launch.process.process_end import end_at_once
from jaxpp_flax.launch.settings import LaunchSettings
from jaxpp_flax.processes.waits import print_notice

__all__ = ["await_connection"]

# Until the user is told what the connection waits for.
_SECONDS_IN_SILENCE = 10.0
_POLL_SECONDS = 0.2


def await_connection(
    connected: threading.Event,
    settings: LaunchSettings,
    timeout_s: float,
    service: subprocess.Popen[bytes] | None,
    listen_at: str,
) -> None:
    """Tell what a connection waits for, after ten seconds, twenty, forty, ...; end this process after the limit.

    Args:
      connected: set once it has come, or is given up.
      settings: of this process.
      timeout_s: the limit.
      service: the coordination service, if this process has started it; once that has ended, this process ends.
      listen_at: where the service listens.
    """
    address, waited, due = settings.coordinator_address, 0.0, min(_SECONDS_IN_SILENCE, timeout_s)
    begun = time.monotonic()
    while not connected.wait(min(_POLL_SECONDS, max(0.0, begun + due - time.monotonic()))):
        if service is not None and service.poll() is not None and not connected.is_set():
            print_notice(_why_service_ended(service, listen_at))
            end_at_once(1)
        if time.monotonic() < begun + due:
            continue
        waited, due = due, min(2 * due, timeout_s)
        text = (
            f"process {settings.process_id} did not connect to all {settings.num_processes} processes through "
            f"{address} within {waited:g} s: {_what_is_at(address)}"
        )
        if waited < timeout_s:
            print_notice(f"{text} It waits for up to {timeout_s:g} s.")
            continue
        print_notice(
            f"{text} Check that all of them run, with the same address, and each with a process_id of its own; that "
            "the address is that of process 0; and that no firewall blocks it. If they start slowly, raise "
            "initialization_timeout_s."
        )
        end_at_once(1)


def _why_service_ended(service: subprocess.Popen[bytes], address: str) -> str:
    """What the user is told of the coordination service that has ended before all have connected."""
    host, _, port = address.rpartition(":")
    text = f"the coordination service of process 0 cannot listen on {address}: "
    if (error := why_not_own(host.strip("[]"))) is not None:
        return f"{text}this host has no such address ({error}). Give all processes the address of process 0's host."
    if is_taken(int(port)):
        return f"{text}the port is taken. Give all processes another one."
    return f"the coordination service of process 0, at {address}, {describe_end(service.returncode)}."


def _what_is_at(address: str) -> str:
    """What a connection to the coordinator's address meets now, as a sentence."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5.0).close()
    except ConnectionRefusedError:
        return "nothing listens there; process 0 has not started, or the address or its port is another."
    except OSError as error:
        return f"it cannot be reached ({error}); the address is wrong, its host is down, or a firewall blocks it."
    return "somebody listens there, and other processes are still missing."
