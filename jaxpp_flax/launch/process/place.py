"""The place of a process in its run, which no other one of its host may have, and the addresses where it listens."""

from __future__ import annotations

import errno
import os
import socket
import sys
import time

from jaxpp_flax.launch import coordinator
from jaxpp_flax.launch.settings import LaunchError, LaunchSettings, join_host_and_port
from jaxpp_flax.processes.store import own_address

__all__ = ["check_own", "listening_addresses", "take_place", "why_not_own"]

# The service of an earlier run that ended well stays for up to 5 s.
_WAIT_FOR_PORT_SECONDS = 10.0


def listening_addresses(settings: LaunchSettings) -> tuple[str, str]:
    """Where this process's own sockets listen, and where the coordination service would."""
    bind_address, coordinator_address = settings.bind_address, settings.coordinator_address
    if bind_address and bind_address not in ("0.0.0.0", "::"):
        return bind_address, coordinator_address
    try:
        own = own_address(coordinator_address)
    except OSError as error:
        raise LaunchError(
            f"the coordinator's address {coordinator_address!r} cannot be reached or resolved: {error}"
        ) from error
    if bind_address:  # all addresses
        return own, join_host_and_port(bind_address, coordinator_address.rpartition(":")[2])
    return own, coordinator_address


def check_own(bind_address: str) -> None:
    """Refuse an address at which this host cannot listen.

    Raises:
      LaunchError: naming it.
    """
    if (error := why_not_own(bind_address)) is not None:
        raise LaunchError(
            f"bind_address={bind_address!r}: this host cannot listen there: {error}. Give one of its own addresses, or "
            "leave bind_address out: then sockets listen on the address by which it reaches the coordinator."
        ) from error


def why_not_own(host: str) -> OSError | None:
    """Why this host cannot listen at an address; None: it can.

    >>> why_not_own("127.0.0.1")  # returns None
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
    except OSError as error:
        return error
    return None


def take_place(settings: LaunchSettings, listen_at: str | None) -> socket.socket:
    """Make sure that no other process of this host has this index in the run, or its port; returns what holds both.

    JAX could not tell two of them apart, or would abort one; and two services on one port would mix two runs.

    Args:
      settings: of this process.
      listen_at: the address where this process serves the coordination; None: it does not serve.
    """
    place = socket.socket(socket.AF_UNIX)
    # The worker of a data loader, a fork that may outlive this process, would hold the place.
    os.register_at_fork(after_in_child=place.close)
    name = f"jaxpp_flax process {settings.process_id} of {settings.coordinator_address}"
    deadline = time.monotonic() + _WAIT_FOR_PORT_SECONDS
    while True:
        text = ""
        if listen_at is not None and coordinator.is_taken(int(listen_at.rpartition(":")[2])):
            text = (
                f"the coordination service cannot listen on {listen_at}: the port is taken by another run, by the "
                "remains of one (they end within the failure timeout), or by another process with process_id=0. Wait "
                "until it is free, or give another port."
            )
        elif not _binds(place, name):
            text = (
                f"another process of this host is process {settings.process_id} of the run at "
                f"{settings.coordinator_address}. Give each process a process_id of its own, from 0 to "
                f"{settings.num_processes - 1}; or wait until that process, which may belong to an earlier run, has "
                "ended."
            )
        if not text:
            return place
        if time.monotonic() > deadline:
            place.close()
            raise LaunchError(text)
        time.sleep(0.2)


def _binds(place: socket.socket, name: str) -> bool:
    if not sys.platform.startswith("linux"):
        return True  # only Linux has names of sockets that vanish with their process
    try:
        place.bind(f"\0{name}")
    except OSError as error:
        return error.errno != errno.EADDRINUSE
    return True
