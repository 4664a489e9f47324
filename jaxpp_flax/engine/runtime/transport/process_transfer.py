"""This process's part in one transfer between ranks of different processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxpp_flax.engine.runtime.transport.base import Tag
from jaxpp_flax.engine.runtime.transport.connection import Link
from jaxpp_flax.engine.runtime.transport.routes import Route

__all__ = ["Crossing"]


class Crossing:
    """Sends, receives or passes by; called once per step.

    Args:
      link: this process's link.
      route: the plan of the transfer.
      private: for each leaf, whether others may give the sender's array away: then a copy is sent.
    """

    def __init__(self, link: Link, route: Route, private: Sequence[bool]) -> None:
        self._link = link
        self._route = route
        reads_later = link.transport.reads_later
        self._private = tuple(flag and reads_later for flag in private)
        self._ordered = link.transport.needs_global_order
        self._outgoing = tuple(route.outgoing())
        self._incoming = tuple(route.incoming())

    def __call__(self, arrays: Sequence[Any], tag: Tag) -> list[Any]:
        """Move the arrays from source to target; return the target's, None for those without parts in this process."""
        if self._ordered:
            arrived = self._in_order(arrays, tag)
        else:
            for parcel, hops in self._outgoing:
                self._link.send(self._route.pack(arrays, hops, private=self._private), parcel, tag)
            arrived = [
                (hop, value)
                for parcel, hops in self._incoming
                for hop, value in zip(hops, self._link.recv(parcel, tag), strict=True)
            ]
        return self._route.assemble(arrays, arrived)

    def _in_order(self, arrays: Sequence[Any], tag: Tag) -> list[Any]:
        arrived: list[Any] = []
        for parcel, hops in self._route.parcels:
            if parcel.source == self._route.process:
                self._link.send(self._route.pack(arrays, hops, private=self._private), parcel, tag)
            elif parcel.target == self._route.process:
                arrived += zip(hops, self._link.recv(parcel, tag), strict=True)
            else:
                self._link.transport.pass_by(parcel, tag)
        return arrived
