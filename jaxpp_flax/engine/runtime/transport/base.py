"""The interface of a transport, which moves arrays between processes, and the names that both ends share."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import jax
from jax.sharding import Sharding

from jaxpp_flax.error_codes import documented

__all__ = ["Parcel", "Tag", "Transport", "TransportError"]


@documented("JPF505")
class TransportError(RuntimeError):
    """A transport could not move arrays between processes: a peer is gone, or silent for too long."""


@dataclass(frozen=True, slots=True)
class Tag:
    """The name of a transfer, the same on both ends.

    Attributes:
      program: the program's unique name.
      step: the step as the user counts them, for messages.
      number: the place of the transfer in the program's one global list of instructions. It identifies the edge, the
        microbatch and the direction. The leaves of a transfer go in one parcel, in the program's order.
      call: the number of the program's call. The step does not tell calls apart: after a restore, steps repeat.
      what: for errors: a description of what the receiver waits for.

    Example:
      >>> tag = Tag(program="0f3a", step=7, number=12)
      >>> tag.id(0, 1) == tag.id(0, 1), tag.id(0, 1) == tag.id(1, 0)
      (True, False)
      >>> Tag("0f3a", 7, 12, call=1).id(0, 1) == Tag("0f3a", 7, 12, call=2).id(0, 1)
      False
    """

    program: str
    step: int
    number: int
    call: int = 0
    what: str = ""

    @property
    def awaited(self) -> str:
        """What the receiver waits for in one step."""
        return f"{self.what}, in step {self.step}"

    def id(self, source: int, target: int) -> int:
        """Hash a transfer from process `source` to process `target` to 63 bits, so that no number comes twice."""
        text = f"{self.program}/{self.call}/{self.number}/{source}/{target}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


@dataclass(frozen=True)
class Parcel:
    """The arrays that one process hands to another in one transfer, each on a single device.

    Attributes:
      source, target: the processes.
      shapes: the types of the arrays, each with the sharding on its device of `target`.
      origins: for each array, the sharding on its device of `source`.
    """

    source: int
    target: int
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    origins: tuple[Sharding, ...]


class Transport:
    """Moves parcels between this process and others; one object for each process.

    No method waits for a peer unless its docstring says so: `send` returns at once, and `recv` returns arrays that
    become ready when they arrive, like the results of any computation. Arrays have a plain dtype and at least one
    element; the caller handles PRNG keys and empty arrays (see `routes`).

    A transport may still read a value after `send` returns, unknown to JAX. So the value must be neither donated nor
    deleted, and the caller sends a private copy of any value that others may give away.
    """

    # Whether every process must walk all parcels in one order, even parcels between two other processes.
    needs_global_order: ClassVar[bool] = False

    def connect(self, parcels: Sequence[Parcel], timeout_s: float) -> None:
        """Open the connections that these parcels of this process need; every process calls it at the same point."""
        raise NotImplementedError

    def send(self, values: Sequence[jax.Array], parcel: Parcel, tag: Tag) -> None:
        """Send `values` to `parcel.target`."""
        raise NotImplementedError

    def recv(self, parcel: Parcel, tag: Tag) -> list[jax.Array]:
        """Receive the arrays that `parcel.source` sends under this tag."""
        raise NotImplementedError

    def pass_by(self, parcel: Parcel, tag: Tag) -> None:
        """Take note of a parcel between two other processes; called only where `needs_global_order`."""

    def abandon(self, peer: int) -> None:
        """Give up on a peer: arrays still awaited from it become errors, and every wait for them raises."""

    def close(self) -> None:
        """Close connections and listening sockets."""
