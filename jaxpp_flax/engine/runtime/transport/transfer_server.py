"""The default transport: JAX's transfer server. A process offers arrays, and its peers fetch them.

An array is fetched by an id, so the order of calls is free. This file depends on measured facts. A fetch returns at
once with an array that is not ready; computations may take this array. The server holds an offered array, so the
caller may drop its reference, but neither donate nor delete the array. Arrays from a killed peer become errors by
themselves; arrays from a stopped peer become errors only when the connection is poisoned.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import jax

from jaxpp_flax import _compat
from jaxpp_flax.engine.runtime.transport.base import Parcel, Tag, Transport, TransportError
from jaxpp_flax.processes.group import ProcessGroup

__all__ = ["TransferServer"]

# Large arrays are sent in pieces of this size; measured on loopback, the pieces halve the time of 64 MiB.
_PIECE_BYTES = 4 << 20
_STREAMS = 4
# Long enough for three lost packets; the other end's system answers, however busy its process is.
_REACH_SECONDS = 10.0


class TransferServer(Transport):
    """Transport over `jax.experimental.transfer`.

    Args:
      address: the host or IP address to listen on, without a port; a free port is taken.
      group: the processes, for the exchange of addresses.
    """

    def __init__(self, address: str, group: ProcessGroup) -> None:
        from jax.experimental import transfer

        address = f"[{address}]" if ":" in address and not address.startswith("[") else address
        client = jax.local_devices()[0].client
        self._server: Any = transfer.start_transfer_server(
            client, f"{address}:0", [f"{address}:0"] * _STREAMS, transfer_size=_PIECE_BYTES
        )
        self._group = group
        self._addresses: list[str] = []
        self._connections: dict[int, Any] = {}
        self._reached: set[int] = set()

    def connect(self, parcels: Sequence[Parcel], timeout_s: float) -> None:
        """Tell all processes this process's address, and connect to the processes from which it receives."""
        if not self._addresses:
            mine = self._server.address().encode()
            every = self._group.exchange("the addresses of transfer servers", mine, timeout_s)
            self._addresses = [address.decode() for address in every]
        me = self._group.process_index
        for peer in sorted(
            {end for parcel in parcels for end in (parcel.source, parcel.target)} - {me} - self._reached
        ):
            self._reach(peer, min(timeout_s, _REACH_SECONDS))
        for peer in sorted({parcel.source for parcel in parcels} - {me} - self._connections.keys()):
            self._connections[peer] = self._server.connect(self._addresses[peer])

    def _reach(self, peer: int, timeout_s: float) -> None:
        """Check that a peer can be reached, else JAX would wait without end; the servers connect to each other."""
        address = self._addresses[peer]
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
        except OSError as error:
            raise TransportError(
                f"process {self._group.process_index} cannot reach process {peer}, whose transfer server listens on "
                f"{address}: {error}. Let a firewall between the two through; or if that is not the address by which "
                f"others reach its host, give the right one in process {peer}: initialize(bind_address=...), or "
                "--address after --cluster."
            ) from error
        self._reached.add(peer)

    def send(self, values: Sequence[jax.Array], parcel: Parcel, tag: Tag) -> None:
        """Offer the values; the server holds them until they are fetched."""
        self._server.await_pull(tag.id(parcel.source, parcel.target), list(values))

    def recv(self, parcel: Parcel, tag: Tag) -> list[jax.Array]:
        """Fetch a parcel; its arrays become ready when they arrive."""
        connection = self._connections[parcel.source]
        return connection.pull(tag.id(parcel.source, parcel.target), list(parcel.shapes))

    def abandon(self, peer: int) -> None:
        """Turn the arrays awaited from `peer` into errors."""
        connection = self._connections.get(peer)
        if connection is not None:
            _compat.poison(connection)

    def close(self) -> None:
        """Drop the server; it ends with its last connection."""
        self._connections.clear()
        self._server = None
