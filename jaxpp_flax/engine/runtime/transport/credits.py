"""A limit on the parcels that a process offers ahead of a peer that sends nothing back.

In training with 1F1B, gradients come back, so a stage cannot run far ahead of the next one. A loop of forwards alone
has no such tie: its first process would offer all microbatches at once, and its transport would hold them. So where
many parcels go one way, the receiver confirms every few of them with an array of one number, and the sender waits for
it. All processes follow one global order, and each wait is for an earlier instruction: waits are never circular.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from jaxpp_flax.engine.runtime.transport.base import Parcel, Tag
from jaxpp_flax.engine.runtime.transport.connection import DistributedProgram

__all__ = ["AHEAD", "Credits"]

AHEAD = 4
"""The most parcels that a process offers before its peer has asked for them."""
_EVERY = 2


@dataclass(frozen=True)
class Confirmation:
    """A sign from a receiver that it has come to transfer `number`."""

    number: int
    parcel: Parcel


@dataclass(frozen=True)
class Credits:
    """The confirmations of a program in this process, by the transfer before which it waits, or after which it sends.

    Example:
      >>> Credits.of([], process=0).parcels
      []
    """

    waits: dict[int, list[Confirmation]] = field(default_factory=dict[int, list[Confirmation]])
    sends: dict[int, list[Confirmation]] = field(default_factory=dict[int, list[Confirmation]])

    @classmethod
    def of(cls, transfers: Iterable[tuple[int, Sequence[Parcel]]], process: int) -> Credits:
        """Make them from this process's transfers, in the program's order, each with its number and parcels."""
        credits = cls()
        for run in _one_way(transfers):
            for (number, parcel), (waiting, _) in zip(run[_EVERY - 1 :: _EVERY], run[AHEAD::_EVERY], strict=False):
                at, found = (waiting, credits.waits) if parcel.source == process else (number, credits.sends)
                found.setdefault(at, []).append(Confirmation(number, _back(parcel)))
        return credits

    @property
    def parcels(self) -> list[Parcel]:
        """The parcels of all confirmations."""
        return [c.parcel for found in (self.waits, self.sends) for listed in found.values() for c in listed]

    def wait(self, number: int, distributed: DistributedProgram, call: int) -> None:
        """Wait, before transfer `number`, until its receiver has come near enough.

        Raises:
          ProcessFailedError: if the receiver has failed.
        """
        for confirmation in self.waits.get(number, ()):
            connection, tag = distributed.connection, _tag(confirmation, distributed, call)
            (array,) = connection.recv(confirmation.parcel, tag)
            connection.window.wait(array, confirmation.parcel, tag, connection.group.runs)

    def send(self, number: int, distributed: DistributedProgram, call: int) -> None:
        """Confirm, after transfer `number`, that this process has come to it."""
        for confirmation in self.sends.get(number, ()):
            (origin,) = confirmation.parcel.origins
            array = jax.device_put(np.zeros(1, np.int32), origin)
            distributed.connection.transport.send([array], confirmation.parcel, _tag(confirmation, distributed, call))


def _one_way(transfers: Iterable[tuple[int, Sequence[Parcel]]]) -> list[list[tuple[int, Parcel]]]:
    """Return the runs of parcels from one process to another without a parcel back between them.

    A transfer's own parcels come in another order in each process.
    """
    runs: list[list[tuple[int, Parcel]]] = []
    current: dict[tuple[int, int], list[tuple[int, Parcel]]] = {}
    for number, parcels in transfers:
        for parcel in parcels:
            current.pop((parcel.target, parcel.source), None)
        pairs = {(parcel.source, parcel.target): parcel for parcel in parcels}
        for pair, parcel in pairs.items():
            if pair[::-1] not in pairs:
                if pair not in current:
                    runs.append(current.setdefault(pair, []))
                current[pair].append((number, parcel))
    return runs


def _tag(confirmation: Confirmation, distributed: DistributedProgram, call: int) -> Tag:
    what = f"process {confirmation.parcel.source}: a sign that it has taken earlier microbatches"
    return distributed.tag(confirmation.number, call, what, part="-taken")


def _back(parcel: Parcel) -> Parcel:
    """Return the parcel of a confirmation, from the target to the source."""
    shape = jax.ShapeDtypeStruct((1,), np.int32, sharding=parcel.origins[0])
    return Parcel(parcel.target, parcel.source, (shape,), (parcel.shapes[0].sharding,))
