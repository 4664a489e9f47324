"""This process's connection to the others: one transport, chosen once, with its watchdog and its window."""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache

import jax

from jaxpp_flax import _compat
from jaxpp_flax.engine.runtime.transport.base import Parcel, Tag, Transport
from jaxpp_flax.engine.runtime.transport.device_put import CrossHostDevicePut
from jaxpp_flax.engine.runtime.transport.flow_control import Window
from jaxpp_flax.engine.runtime.transport.nccl import NcclTransport
from jaxpp_flax.engine.runtime.transport.transfer_server import TransferServer
from jaxpp_flax.engine.runtime.transport.watchdog import Watchdog
from jaxpp_flax.processes.group import ProcessGroup, process_group
from jaxpp_flax.processes.store import CoordinationError, own_address
from jaxpp_flax.processes.waits import seconds_from_environment

__all__ = ["Connection", "DistributedProgram", "ConnectionSettings", "process_connection"]


@dataclass(frozen=True, kw_only=True)
class ConnectionSettings:
    """Settings of the connection; each field is read from the environment, and is the same on every process.

    Args:
      transport: a name in the table at the end of this file; None: "transfer" on CPU, else "device_put"
        (`JAXPP_FLAX_TRANSPORT`).
      bind_address: the address that this process listens on; None: its own address towards the coordinator, which is
        loopback if the coordinator's is (`JAXPP_FLAX_BIND_ADDRESS`).
      start_timeout: seconds that processes wait for one another before the first step; the slowest compilation must
        fit (`JAXPP_FLAX_START_TIMEOUT`).

    Example:
      >>> ConnectionSettings.read({"JAXPP_FLAX_TRANSPORT": "transfer"}).transport
      'transfer'
    """

    transport: str | None = None
    bind_address: str | None = None
    start_timeout: float = 1800.0

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> ConnectionSettings:
        """Read the settings from environment variables.

        Raises:
          ValueError: for an unknown transport, or a time that is not a positive number.
        """
        transport = environment.get("JAXPP_FLAX_TRANSPORT") or None
        if transport is not None and transport not in _TRANSPORTS:
            raise ValueError(f"JAXPP_FLAX_TRANSPORT={transport!r}: it must be one of {', '.join(_TRANSPORTS)}.")
        return cls(
            transport=transport,
            bind_address=environment.get("JAXPP_FLAX_BIND_ADDRESS") or None,
            start_timeout=seconds_from_environment(environment, "JAXPP_FLAX_START_TIMEOUT", cls.start_timeout),
        )


class Connection:
    """Moves arrays between this process and the others, for the runtime."""

    def __init__(self, group: ProcessGroup, transport: Transport, settings: ConnectionSettings) -> None:
        self.group, self.transport, self.settings = group, transport, settings
        # Until all processes have ended their programs, others may still receive parcels of this process.
        group.when_closed(transport.close)
        self.watchdog = Watchdog(transport, group)
        self.window = Window(group)
        self._programs = 0

    def next_program(self) -> int:
        """Return the number of a new program; programs are compiled in the same order on every process."""
        self._programs += 1
        return self._programs

    def connect(self, parcels: Iterable[Parcel]) -> None:
        """Open connections for this process's parcels; every process calls it at the same point of its program."""
        self.transport.connect(tuple(parcels), self.settings.start_timeout)

    def recv(self, parcel: Parcel, tag: Tag) -> list[jax.Array]:
        """Receive a parcel for this process; the watchdog follows it until it has arrived."""
        self.watchdog.receiving = parcel.source
        arrays = self.transport.recv(parcel, tag)
        self.watchdog.follow(parcel, tag, arrays)
        self.watchdog.receiving = None
        self.window.received(arrays[-1], parcel, tag)
        return arrays


@dataclass(frozen=True)
class DistributedProgram:
    """A program of several processes: this process's connection to the others, and the program's names.

    `title` is for people ("program 2"). `name` is unique to this program, even after a change of the code.
    """

    connection: Connection
    title: str
    name: str

    def tag(self, number: int, call: int, what: str, part: str = "") -> Tag:
        """Return the name of a transfer in one call; `part` names one that is no instruction of the program."""
        step = self.connection.group.step
        return Tag(f"{self.name}{part}", call if step is None else step, number, call, what)


@cache
def process_connection() -> Connection:
    """Return the one connection of this process; the first call makes it, when JAX's processes and devices exist."""
    group = process_group()
    mine = not group.is_watched  # else the code that began the watch ends it
    group.watch()
    settings = ConnectionSettings.read(os.environ)
    connection = Connection(group, _make(settings, group), settings)
    # Threads that are inside JAX when Python ends would abort the process.
    atexit.register(_end, connection, end_watch=mine)
    return connection


def _end(connection: Connection, *, end_watch: bool) -> None:
    connection.watchdog.stop()
    if end_watch:
        # A failure has been reported by then: the watch ends the process.
        with contextlib.suppress(CoordinationError):
            connection.group.close()


def _make(settings: ConnectionSettings, group: ProcessGroup) -> Transport:
    name = settings.transport or ("transfer" if jax.default_backend() == "cpu" else "device_put")
    return _TRANSPORTS[name](settings, group)


def _transfer(settings: ConnectionSettings, group: ProcessGroup) -> Transport:
    # Without a coordinator, there is only one process, or this JAX hides the coordinator.
    address = settings.bind_address or own_address(_compat.coordinator_address() or "127.0.0.1:1")
    return TransferServer(address, group)


# How to make each transport; the keys are the values of `JAXPP_FLAX_TRANSPORT`.
_TRANSPORTS: dict[str, Callable[[ConnectionSettings, ProcessGroup], Transport]] = {
    "transfer": _transfer,
    "device_put": lambda _settings, _group: CrossHostDevicePut(),
    "nccl": lambda _settings, group: NcclTransport(group=group),
}
