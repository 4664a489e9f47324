"""A limit on the parcels that a process offers ahead of a peer that sends nothing back.

In training with 1F1B, gradients come back, so a stage cannot run far ahead of the next one. A loop of forwards alone
has no such tie: its first process would offer all microbatches at once, and the transport would hold them. So where
many parcels go one way, the receiver confirms every few of them with an array of one number, and the sender waits for
it. All processes follow one global order, and each wait is for an earlier instruction: waits are never circular.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxpp_flax.engine.program.waits import AHEAD, SIGNED
from jaxpp_flax.engine.runtime.transport.base import Parcel, Tag
from jaxpp_flax.engine.runtime.transport.connection import DistributedProgram

__all__ = ["Credits"]


@dataclass(frozen=True)
class Confirmation:
    """A sign from a receiver that it has come to transfer `number`."""

    number: int
    parcel: Parcel


@dataclass(frozen=True)
class Credits:
    """The confirmations of a program in which this process takes part.

    Attributes:
      process: this process.
      waits: by a transfer of this process, the confirmations without which it does not begin.
      signs: by a transfer, the confirmations that follow it: those that this process sends; where a transport needs one
        global order, also those that it receives, and those between two other processes.

    Example:
      >>> Credits.of([], process=0).parcels
      []
    """

    process: int
    waits: dict[int, list[Confirmation]] = field(default_factory=dict[int, list[Confirmation]])
    signs: dict[int, list[Confirmation]] = field(default_factory=dict[int, list[Confirmation]])
    _begun: dict[Confirmation, jax.Array] = field(default_factory=dict[Confirmation, jax.Array])

    @classmethod
    def of(
        cls, transfers: Iterable[tuple[int, Sequence[Parcel]]], process: int, *, in_global_order: bool = False
    ) -> Credits:
        """Make them from transfers in the program's order, each with its number and its parcels.

        Args:
          transfers: those of this process; with `in_global_order`, all of them with all parcels.
          process: this process.
          in_global_order: whether every process must walk all parcels in one order.
        """
        credits = cls(process)
        for run in _one_way(transfers):
            for (number, parcel), (waiting, _) in zip(run[SIGNED - 1 :: SIGNED], run[AHEAD::SIGNED], strict=False):
                confirmation = Confirmation(number, _back(parcel))
                if process == parcel.source:
                    credits.waits.setdefault(waiting, []).append(confirmation)
                if process == parcel.target or in_global_order:
                    credits.signs.setdefault(number, []).append(confirmation)
        return credits

    @property
    def parcels(self) -> list[Parcel]:
        """The parcels of this process's confirmations."""
        every = [c.parcel for by_number in (self.waits, self.signs) for listed in by_number.values() for c in listed]
        return [parcel for parcel in every if self.process in (parcel.source, parcel.target)]

    def wait(self, number: int, distributed: DistributedProgram, call: int) -> None:
        """Wait, before transfer `number`, until its receiver has come near enough.

        Raises:
          ProcessFailedError: if the receiver has failed.
        """
        for confirmation in self.waits.get(number, ()):
            connection, tag = distributed.connection, _tag(confirmation, distributed, call)
            array = self._begun.pop(confirmation, None)
            if array is None:
                (array,) = connection.recv(confirmation.parcel, tag)
            connection.window.wait(array, confirmation.parcel, tag, connection.group.runs)

    def sign(self, number: int, distributed: DistributedProgram, call: int) -> None:
        """Confirm, after transfer `number`, that this process has come to it; take part in others' confirmations."""
        for confirmation in self.signs.get(number, ()):
            connection, parcel = distributed.connection, confirmation.parcel
            tag = _tag(confirmation, distributed, call)
            if parcel.source == self.process:
                (origin,) = parcel.origins
                connection.transport.send([jax.device_put(np.zeros(1, np.int32), origin)], parcel, tag)
            elif parcel.target == self.process:
                (self._begun[confirmation],) = connection.recv(parcel, tag)
            else:
                connection.transport.pass_by(parcel, tag)


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
    shape = jax.ShapeDtypeStruct((1,), np.int32, sharding=_on_one_device(parcel.origins[0]))
    return Parcel(parcel.target, parcel.source, (shape,), (_on_one_device(parcel.shapes[0].sharding),))


def _on_one_device(sharding: Any) -> SingleDeviceSharding:
    (device,) = sharding.device_set
    return SingleDeviceSharding(device)
