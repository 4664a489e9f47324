"""What moves arrays between processes: the interface, and the names by which both ends know what is meant."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import jax
from jax.sharding import Sharding

__all__ = ["Parcel", "Tag", "Transport", "TransportError"]


class TransportError(RuntimeError):
    """Arrays could not be moved between processes: a peer is gone, or silent for too long."""


@dataclass(frozen=True, slots=True)
class Tag:
    """What is being moved, the same on both ends.

    Attributes:
      program: its name, no other's.
      step: the step as the user counts them, for messages.
      number: the place of the transfer in the program's one global list of instructions, so it says which edge, which
        microbatch and which direction is meant. The leaves of a transfer go in one parcel, in the program's order.
      call: which call of the program it is; None: there is one for each step. After a restore, steps come again.

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
    call: int | None = None

    def id(self, source: int, target: int) -> int:
        """A number of 63 bits for what process `source` sends to process `target`: a hash, so that none comes twice."""
        call = self.step if self.call is None else self.call
        text = f"{self.program}/{call}/{self.number}/{source}/{target}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


@dataclass(frozen=True)
class Parcel:
    """The arrays that one process hands to another in one transfer, each on a single device.

    Attributes:
      source, target: the processes.
      shapes: types of the arrays, each with the sharding on `target`'s device where it arrives.
      origins: for each array, the sharding on `source`'s device where it lies.
      what: for errors: what the receiver waits for.
    """

    source: int
    target: int
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    origins: tuple[Sharding, ...]
    what: str

    @property
    def nbytes(self) -> int:
        """Bytes of all its arrays."""
        return sum(shape.size * shape.dtype.itemsize for shape in self.shapes)


class Transport(Protocol):
    """Moves parcels between this process and others; one object for each process.

    Nothing waits for a peer unless it says so: `send` returns at once, and `recv` gives arrays that become ready when
    they arrive, like the results of any computation. Arrays have a plain dtype and at least one element: PRNG keys and
    empty arrays are dealt with above (see `routes`).
    """

    name: ClassVar[str]
    # Whether every process, those between which nothing moves included, must walk all parcels in one order.
    needs_global_order: ClassVar[bool]
    # Whether a value may still be read after `send` returns, in a way that JAX does not know of: then it must be
    # neither donated nor deleted, and the caller sends a private copy of what others may give away.
    reads_later: ClassVar[bool]

    def connect(self, parcels: Sequence[Parcel], timeout_s: float) -> None:
        """Open the connections that these parcels of this process need; every process calls it at the same point."""
        ...

    def send(self, values: Sequence[jax.Array], parcel: Parcel, tag: Tag) -> None:
        """Let `parcel.target` have `values`."""
        ...

    def recv(self, parcel: Parcel, tag: Tag) -> list[jax.Array]:
        """The arrays that `parcel.source` sends under this tag."""
        ...

    def pass_by(self, parcel: Parcel, tag: Tag) -> None:
        """Take note of a parcel between two other processes; called only where `needs_global_order`."""
        ...

    def abandon(self, peer: int) -> None:
        """Give up on a peer: arrays that were to come from it become errors, and whoever waits for them gets these."""
        ...

    def close(self) -> None:
        """Close connections and listening sockets."""
        ...


def describe_type(value: Any) -> str:
    """`float32[2,3]`."""
    return f"{value.dtype}[{','.join(map(str, value.shape))}]"
