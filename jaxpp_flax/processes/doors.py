"""The doors of processes: sockets at which nobody ever speaks, and which the system closes when their processes end.

A killed process says nothing, and its heartbeats only stay away, as those of a process that is slow. Its door is known
to be closed: the system of its host refuses the connection.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable

from jaxpp_flax.processes.store import own_address

__all__ = ["Doors", "is_closed", "open_door", "open_own_door"]

# A network that is reset for a second refuses for that time, too.
_CERTAIN_SECONDS = 2.0
# Nobody takes the connections of those who try the door: room for one of each process of a large run, and for more.
_MOST_TRIES = 4096


def open_door(host: str) -> tuple[socket.socket, str]:
    """Open a door at an address of this host: the socket, to be kept, and the address at which others find it.

    Example:
      >>> door, address = open_door("127.0.0.1")
      >>> is_closed(address, 5.0), door.close(), is_closed(address, 5.0)
      (False, None, True)
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    door = socket.create_server((host, 0), family=family, backlog=_MOST_TRIES)
    return door, f"{host}:{door.getsockname()[1]}"


def open_own_door(service_address: str) -> tuple[socket.socket | None, str]:
    """Open the door of this process where the coordination service's host can reach it; without one, "" is its address.

    The silence of a process without a door has to say that it has ended.
    """
    host = os.environ.get("JAXPP_FLAX_BIND_ADDRESS")
    try:
        if host or service_address:
            door, address = open_door(host or own_address(service_address))
            # The worker of a data loader, a fork that may outlive this process, would hold the door open.
            os.register_at_fork(after_in_child=door.close)
            return door, address
    except OSError:
        pass
    return None, ""


def is_closed(address: str, timeout_s: float) -> bool | None:
    """Whether nothing listens at an address; None if no answer comes, or another one."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError):
        return None
    return False


class Doors:
    """What one process knows of others' doors. A firewall may refuse too: only a door that was open once can close."""

    def __init__(self) -> None:
        self._was_open: dict[str, bool] = {}
        self._closed_since: dict[str, float] = {}

    def learn(self, addresses: Iterable[str], seconds: float) -> None:
        """Try doors that are new, of which some may not answer, for this time; the rest at later calls."""
        end = time.monotonic() + seconds
        for address in addresses:
            if address and address not in self._was_open:
                if time.monotonic() > end:
                    return
                self._was_open[address] = is_closed(address, seconds) is False

    def has_closed(self, address: str, seconds: float, heard: float) -> bool:
        """Whether a door has closed for good, and so its process has ended; to be asked repeatedly.

        Args:
          seconds: how long to wait for an answer.
          heard: when the process gave its last sign of life.
        """
        if not self._was_open.get(address, False) or not is_closed(address, seconds):
            self._closed_since.pop(address, None)
            return False
        now = time.monotonic()
        if self._closed_since.get(address, heard) <= heard:
            self._closed_since[address] = now
        return now - self._closed_since[address] >= _CERTAIN_SECONDS
