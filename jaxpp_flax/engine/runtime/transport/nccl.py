"""Transport over NCCL, through CuPy (extra `cuda12` or `cuda13`), for GPUs.

Each ordered pair of devices has a communicator and a stream of its own at either end, so that the two directions never
wait for one another. Within a pair, parcels go in the program's order at both ends. NCCL reads and writes bare memory.
So a sender's thread waits until a value is computed, and keeps the value alive until it is sent. The receiver hands a
buffer to JAX only when the buffer is full. Values are sent as bytes, so any dtype of whole bytes can be sent.

The scheme (a communicator for each pair, grouped calls on side streams) comes from NVIDIA's JaxPP.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jaxpp_flax.engine.runtime.transport.base import Parcel, Tag, Transport, TransportError
from jaxpp_flax.engine.runtime.transport.cupy_nccl import Buffer, Communicator, Cupy
from jaxpp_flax.processes.group import ProcessGroup, process_group
from jaxpp_flax.processes.waits import call_with_limit

__all__ = ["NcclTransport"]

_POLL_SECONDS = 50e-6
# The interval at which the creation of a communicator looks for failures.
_JOIN_POLL_SECONDS = 0.05
# If a send fails because its peer failed, the sender waits this long for the peer's own report.
_REPORT_SECONDS = 2.0
_CLOSE_SECONDS = 10.0


@dataclass
class _Pair:
    """An open communicator between a local device and a device of process `peer`."""

    communicator: Communicator
    peer: int
    worker: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(max_workers=1))
    latest: Future[None] | None = None


class NcclTransport(Transport):
    """Transport over NCCL.

    `recv` waits until the parcel has arrived: JAX cannot make an array while NCCL still fills its memory. Sends never
    wait, and every process receives in the program's order. So no two processes wait for one another. A queue without
    a limit holds the values to send, so credits keep a sender near its receiver.

    Args:
      library: NCCL and CUDA; None: through CuPy.
      group: the processes; through it they exchange names and learn of failures.
    """

    def __init__(self, library: Cupy | None = None, group: ProcessGroup | None = None) -> None:
        self._library = Cupy() if library is None else library
        self._group = process_group() if group is None else group
        self._pairs: dict[tuple[int, int], _Pair] = {}

    def connect(self, parcels: Sequence[Parcel], timeout_s: float) -> None:
        """Open a communicator for each ordered pair of devices in the parcels of this process.

        All processes go through their pairs in ascending order, so that no two of them wait for each other.
        """
        me = self._group.process_index
        wanted: dict[tuple[int, int], tuple[Parcel, Any]] = {}
        for parcel in parcels:
            for pair, (source, target) in zip(_pairs(parcel), _devices(parcel), strict=True):
                wanted.setdefault(pair, (parcel, source if parcel.source == me else target))
        for pair in sorted(wanted.keys() - self._pairs.keys()):
            parcel, device = wanted[pair]
            sending = parcel.source == me
            key = f"nccl/{pair[0]}-{pair[1]}"
            if sending:
                name = self._library.unique_id()
                self._group.values.publish(key, name)
            else:
                name = self._group.values.fetch(key, f"the name of NCCL communicator {pair}", parcel.source, timeout_s)
            peer = parcel.target if sending else parcel.source
            communicator = self._join(name, pair, peer, timeout_s, sending=sending, device=device)
            self._pairs[pair] = _Pair(communicator, peer)

    def _join(
        self, name: bytes, pair: tuple[int, int], peer: int, timeout_s: float, *, sending: bool, device: Any
    ) -> Communicator:
        # NCCL waits for the other end without a limit, and cannot be interrupted. So a daemon thread waits.
        opened: Future[Communicator] = Future()

        def open_it() -> None:
            try:
                opened.set_result(self._library.communicator(name, sending=sending, device=device))
            except Exception as error:
                opened.set_exception(error)

        what = f"NCCL communicator {pair[0]}-{pair[1]} (devices' ids)"
        deadline = time.monotonic() + timeout_s
        threading.Thread(target=open_it, name="jaxpp_flax-nccl", daemon=True).start()
        with self._group.waiting(f"the other end of {what}", on=peer):
            while not wait([opened], timeout=_JOIN_POLL_SECONDS).done:
                self._group.check()
                if time.monotonic() > deadline:
                    raise TransportError(
                        f"process {peer} did not join {what} within {timeout_s:g} s; process "
                        f"{self._group.process_index} waited. Look at its log; NCCL_DEBUG=INFO makes NCCL say more. "
                        "`python -m jaxpp_flax.doctor` looks for what NCCL is known to hang of, and "
                        "NCCL_SOCKET_IFNAME names the network to use."
                    )
        try:
            return opened.result()
        except RuntimeError as error:
            raise TransportError(
                f"NCCL could not open {what} between processes {self._group.process_index} and {peer}: {error}. "
                "NCCL_DEBUG=INFO makes NCCL say more; JAXPP_FLAX_TRANSPORT=device_put does without NCCL."
            ) from error

    def send(self, values: Sequence[jax.Array], parcel: Parcel, tag: Tag) -> None:
        """Queue the values behind the earlier sends of each pair; a value is kept alive until it is sent."""
        for pair, positions in _by_pair(parcel).items():
            mine = [_checked(values[i]) for i in positions]
            open_pair = self._pairs[pair]
            if open_pair.latest is not None and open_pair.latest.done():
                open_pair.latest.result()  # an error of an earlier send comes out here
            open_pair.latest = open_pair.worker.submit(self._send, open_pair.communicator, mine, parcel, tag)

    def _send(self, communicator: Communicator, values: Sequence[jax.Array], parcel: Parcel, tag: Tag) -> None:
        try:
            for value in values:
                value.block_until_ready()
            self._move(communicator, [(value.unsafe_buffer_pointer(), value.nbytes) for value in values], parcel, tag)
            self._wait(communicator, parcel, tag)
        except Exception as error:
            # There may be no later send that would raise this error.
            if not self._group.failed.wait(_REPORT_SECONDS):
                self._group.report_failure(str(error))
            raise

    def _move(self, communicator: Communicator, moves: Sequence[tuple[int, int]], parcel: Parcel, tag: Tag) -> None:
        with self._told_errors(communicator, parcel, tag):
            communicator.group(moves, sending=parcel.source == self._group.process_index)

    def recv(self, parcel: Parcel, tag: Tag) -> list[jax.Array]:
        """Receive a parcel, and wait until it has arrived."""
        arrays: list[Any] = [None] * len(parcel.shapes)
        devices = _devices(parcel)
        queued: list[tuple[Communicator, list[tuple[int, Buffer]]]] = []
        for pair, positions in _by_pair(parcel).items():
            buffers = [(i, self._library.empty(_nbytes(_checked(parcel.shapes[i])), devices[i][1])) for i in positions]
            communicator = self._pairs[pair].communicator
            moves = [(buffer.pointer, _nbytes(parcel.shapes[i])) for i, buffer in buffers]
            # NCCL connects the two ends at their first group, and may wait for the sender there.
            with self._group.waiting(lambda: tag.awaited, parcel.source, self._group.runs, tag.number):
                self._move(communicator, moves, parcel, tag)
            queued.append((communicator, buffers))
        for communicator, buffers in queued:
            with self._group.waiting(lambda: tag.awaited, parcel.source, self._group.runs, tag.number):
                self._wait(communicator, parcel, tag)
            for i, buffer in buffers:
                shape = parcel.shapes[i]
                array = buffer.as_jax().view(shape.dtype).reshape(shape.shape)
                arrays[i] = jax.device_put(array, shape.sharding)
        return arrays

    def _wait(self, communicator: Communicator, parcel: Parcel, tag: Tag) -> None:
        with self._told_errors(communicator, parcel, tag):
            while not communicator.is_done():
                self._group.check()
                time.sleep(_POLL_SECONDS)

    @contextmanager
    def _told_errors(self, communicator: Communicator, parcel: Parcel, tag: Tag) -> Generator[None]:
        try:
            yield
        except RuntimeError as error:
            communicator.abort()
            # If the transport has abandoned the peer, NCCL's error says only that it was aborted.
            failure = self._group.failure
            why = error if failure is None else self._group.describe(failure)
            raise TransportError(
                f"NCCL could not move {tag.awaited}, from process {parcel.source} to process "
                f"{parcel.target}: {why}. Look for the first error in the logs of both processes; NCCL_DEBUG=INFO "
                "makes NCCL say more. Then start the run again, from its last checkpoint; "
                "JAXPP_FLAX_TRANSPORT=device_put does without NCCL."
            ) from error

    def abandon(self, peer: int) -> None:
        """Abort the pending moves to and from a peer."""
        for pair in list(self._pairs.values()):
            if pair.peer == peer:
                pair.communicator.abort()

    def close(self) -> None:
        """Free the communicators after the last send; in a run that has failed, abort them."""
        failed = self._group.failed.is_set()
        for pair in self._pairs.values():
            pair.worker.shutdown(wait=not failed, cancel_futures=failed)
            # Both functions call NCCL, which may hang.
            call_with_limit(pair.communicator.abort if failed else pair.communicator.close, _CLOSE_SECONDS)
        self._pairs.clear()


def _devices(parcel: Parcel) -> list[tuple[Any, Any]]:
    """Return, for each array, its device at the source and its device at the target."""
    return [
        (next(iter(origin.device_set)), next(iter(shape.sharding.device_set)))
        for origin, shape in zip(parcel.origins, parcel.shapes, strict=True)
    ]


def _pairs(parcel: Parcel) -> list[tuple[int, int]]:
    return [(source.id, target.id) for source, target in _devices(parcel)]


def _by_pair(parcel: Parcel) -> Mapping[tuple[int, int], list[int]]:
    """Return the positions of the arrays that go between each pair of devices."""
    positions: dict[tuple[int, int], list[int]] = {}
    for position, pair in enumerate(_pairs(parcel)):
        positions.setdefault(pair, []).append(position)
    return positions


def _checked(value: Any) -> Any:
    if jnp.dtype(value.dtype).name in ("int2", "uint2", "int4", "uint4", "float4_e2m1fn"):
        raise TypeError(
            f"transport 'nccl' moves whole bytes, and cannot move {value.dtype}{list(value.shape)}. Convert it to int8 "
            "before the end of the stage, or use transport 'transfer'."
        )
    return value


def _nbytes(shape: Any) -> int:
    return int(shape.size) * int(shape.dtype.itemsize)
