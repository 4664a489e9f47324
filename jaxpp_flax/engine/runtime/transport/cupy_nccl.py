"""NCCL and CUDA through CuPy (extra `cuda12` or `cuda13`), for `NcclTransport` and the doctor.

This file depends on these facts about the releases of CuPy:

- `get_unique_id` returns 128 numbers up to 13.x (C chars: signed on x86, unsigned on ARM) and bytes since 14.0. The
  constructor takes only the type that its own `get_unique_id` returns. So it is sent as JSON, with its type.
- Without libnccl, `cupy.cuda.nccl` can be imported, but it is empty, and `available` is false.
- `Stream.done` is also false after an error. `runtime.streamQuery` gives CUDA's status.
- `NcclError` looks up its code in a table. A code that is missing in the table raises a `KeyError`.
- A communicator is a bare pointer. `abort` frees the pointer, so no other thread may use it at that time.
"""

from __future__ import annotations

import importlib
import json
import threading
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

__all__ = [
    "Buffer", "Communicator", "Cupy", "load_cupy", "local_ordinal", "nccl_version",
]  # fmt: skip

_CUDA_DONE, _CUDA_NOT_READY = 0, 600
_NCCL_IN_PROGRESS = 7
# An abort waits this long for a thread inside NCCL. After that, the other thread aborts when NCCL returns, if ever.
_ABORT_SECONDS = 2.0


def load_cupy() -> tuple[Any, Any]:
    """Import CuPy and its module for NCCL.

    Raises:
      ImportError: if CuPy is not installed, or cannot load NCCL.
    """
    # A warning of CuPy says why NCCL could not be loaded.
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            cupy = importlib.import_module("cupy")
            nccl = importlib.import_module("cupy.cuda.nccl")
        except ImportError as error:
            raise ImportError(
                f"transport 'nccl' needs CuPy with NCCL, and it cannot be imported ({error}): "
                "`pip install jaxpp-flax[cuda12]` (or [cuda13])."
            ) from error
        available = nccl.available
    if not available:
        lines = [line.strip() for warning in said for line in str(warning.message).splitlines()]
        reason = next((line for line in lines if line.startswith("Reason: ")), "Reason: unknown")
        raise ImportError(
            f"transport 'nccl' needs NCCL, which CuPy {cupy.__version__} cannot load. {reason}. "
            "`pip install nvidia-nccl-cu12` (or -cu13), or use another transport (JAXPP_FLAX_TRANSPORT)."
        )
    return cupy, nccl


def nccl_version(nccl: Any) -> tuple[int, int, int]:
    """Return the version of the loaded NCCL."""
    code = int(nccl.get_version())
    return code // 10_000, code // 100 % 100, code % 100


class Cupy:
    """The functions of NCCL and CUDA that `NcclTransport` needs."""

    def __init__(self) -> None:
        self._cupy, self._nccl = load_cupy()

    def unique_id(self) -> bytes:
        """Make a new name for a communicator."""
        with _named_errors():
            name = self._nccl.get_unique_id()
        return json.dumps([isinstance(name, bytes), list(name)]).encode()

    def communicator(self, unique_id: bytes, *, sending: bool, device: Any) -> Communicator:
        """Join the communicator of two with that name, and wait for the other end."""
        is_bytes, numbers = json.loads(unique_id)
        name, rank = bytes(numbers) if is_bytes else tuple(numbers), 0 if sending else 1
        return Communicator(self._cupy, self._nccl, name, rank, local_ordinal(device))

    def empty(self, nbytes: int, device: Any) -> Buffer:
        """Allocate memory on a local device."""
        with self._cupy.cuda.Device(local_ordinal(device)):
            return Buffer(self._cupy.empty(nbytes, dtype="uint8"))


def local_ordinal(device: Any) -> int:
    """Return CUDA's number of a local device."""
    ordinal = getattr(device, "local_hardware_id", None)
    return int(device.id if ordinal is None else ordinal)


@contextmanager
def _named_errors() -> Generator[None]:
    """Turn NCCL errors without a name in CuPy into `RuntimeError`s; all other NCCL errors are `RuntimeError`s."""
    try:
        yield
    except KeyError as error:
        raise RuntimeError(f"NCCL's error {error}, which this version of CuPy has no name for") from error


class Buffer:
    """Device memory that a receive writes to."""

    def __init__(self, array: Any) -> None:
        self._array = array

    @property
    def pointer(self) -> int:
        """The address of its first byte on the device."""
        return int(self._array.data.ptr)

    def as_jax(self) -> jax.Array:
        """Return the same memory as a `uint8` array."""
        return jax.dlpack.from_dlpack(self._array)


class Communicator:
    """One end of an ordered pair of devices."""

    def __init__(self, cupy: Any, nccl: Any, name: bytes | tuple[int, ...], rank: int, ordinal: int) -> None:
        self._nccl, self._runtime, self._rank = nccl, cupy.cuda.runtime, rank
        self._device = cupy.cuda.Device(ordinal)
        self._lock = threading.Lock()
        self._aborted = False
        with self._device, _named_errors():
            self._stream = cupy.cuda.Stream(non_blocking=True)
            try:
                self._communicator = nccl.NcclCommunicator(2, name, rank)
            except TypeError as error:
                raise RuntimeError(
                    f"CuPy {cupy.__version__} cannot read the name that the other process's CuPy gave ({error}); "
                    "install the same version of CuPy in all processes"
                ) from error

    def group(self, moves: Sequence[tuple[int, int]], *, sending: bool) -> None:
        """Queue sends (or receives) of (pointer, bytes) on the stream, as one group, without waiting."""
        with self._inside():
            move = self._communicator.send if sending else self._communicator.recv
            self._nccl.groupStart()
            try:
                for pointer, nbytes in moves:
                    move(pointer, nbytes, self._nccl.NCCL_UINT8, 1 - self._rank, self._stream.ptr)
            finally:
                # A group that stays open would swallow all later calls of this thread.
                self._nccl.groupEnd()

    def is_done(self) -> bool:
        """Return whether all queued sends and receives are done; an error of NCCL is a `RuntimeError`."""
        with self._inside():
            try:
                self._communicator.check_async_error()
            except KeyError as error:
                if error.args != (_NCCL_IN_PROGRESS,):
                    raise
                return False
            status = int(self._runtime.streamQuery(self._stream.ptr))
        if status not in (_CUDA_DONE, _CUDA_NOT_READY):
            raise self._runtime.CUDARuntimeError(status)
        return status == _CUDA_DONE

    @contextmanager
    def _inside(self) -> Generator[None]:
        """Keep `abort` and `close` out of NCCL while this thread uses it."""
        with self._lock, self._device, _named_errors():
            if self._aborted:
                raise RuntimeError("the communicator was aborted")
            try:
                yield
            finally:
                if self._aborted:  # meanwhile, by a thread that stopped waiting
                    self._communicator.abort()

    def abort(self) -> None:
        """End pending moves with an error; any thread may call this at any time, more than once."""
        self._end(lambda: self._communicator.abort())

    def close(self) -> None:
        """Free the communicator; all queued moves are done by then."""
        self._end(lambda: self._communicator.destroy())

    def _end(self, end: Any) -> None:
        self._aborted = True
        if self._lock.acquire(timeout=_ABORT_SECONDS):
            try:
                with self._device:
                    end()  # CuPy forgets the pointer, so a second call does nothing
            finally:
                self._lock.release()
