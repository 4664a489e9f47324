"""The address of this host that its peers can reach."""

from __future__ import annotations

import socket

__all__ = ["own_address"]


def own_address(coordinator_address: str) -> str:
    """The address by which this host reaches the coordinator: one that its peers can reach, and no wildcard.

    Args:
      coordinator_address: its host, or IP address (version 6 in brackets), and port.

    Raises:
      OSError: if it cannot be resolved, or there is no way to it.

    Example:
      >>> own_address("127.0.0.1:4321")
      '127.0.0.1'
    """
    host, _, port = coordinator_address.rpartition(":")
    family, kind, _, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        # Nothing is sent: a datagram socket only chooses its route.
        probe.connect(target)
        return probe.getsockname()[0]
