"""CuPy as far as the NCCL transport uses it, in the signatures of two releases, with host memory for a device's.

How they were read: the wheels cupy-cuda12x 13.6.0 and 14.2.0 for x86-64, with nvidia-nccl-cu12, can be imported
without a GPU. `SIGNATURES` are the first lines of the compiled functions' docstrings, which Cython writes there.
`get_unique_id` was called; the constructor was called with tuples and bytes, with numbers out of range and of the
wrong length, which gave the errors raised here; `NcclError(7)` gave a `KeyError`; `runtime.streamQuery` gave CUDA's
status (35, no driver) and raised nothing; without libnccl, `cupy.cuda.nccl` had `available = False` and a
warning. That ARM's numbers are unsigned follows from C's `char` there. `test_cupy_nccl.py` asks an installed CuPy the
same.
"""

from __future__ import annotations

import ctypes
import os
import queue
import sys
import threading
import warnings
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

SIGNATURES = {
    13: {
        "get_unique_id": "get_unique_id()",
        "NcclCommunicator": "NcclCommunicator(int ndev, tuple commId, int rank)",
        "NcclCommunicator.send": (
            "NcclCommunicator.send(self, intptr_t sendbuf, size_t count, int datatype, int peer, intptr_t stream)"
        ),
        "NcclCommunicator.recv": (
            "NcclCommunicator.recv(self, intptr_t recvbuf, size_t count, int datatype, int peer, intptr_t stream)"
        ),
        "NcclCommunicator.abort": "NcclCommunicator.abort(self)",
        "NcclCommunicator.destroy": "NcclCommunicator.destroy(self)",
        "NcclCommunicator.check_async_error": "NcclCommunicator.check_async_error(self)",
        "groupStart": "groupStart()",
        "groupEnd": "groupEnd()",
    },
}
SIGNATURES[14] = SIGNATURES[13] | {
    "NcclCommunicator": "NcclCommunicator(int ndev, bytes commId, int rank, NcclConfig config=None)"
}

_NCCL_ERRORS = {
    1: "NCCL_ERROR_UNHANDLED_CUDA_ERROR: unhandled cuda error",
    2: "NCCL_ERROR_SYSTEM_ERROR: unhandled system error",
    6: "NCCL_ERROR_REMOTE_ERROR: remote process exited or there was a network error",
}


class NcclError(RuntimeError):
    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(_NCCL_ERRORS[status])  # a code that is not there: KeyError, as in CuPy


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__({700: "cudaErrorIllegalAddress: an illegal memory access was encountered"}[status])


@dataclass
class FakeCupy:
    """One machine with CuPy of that release: its modules, and what a test sets and looks at.

    Attributes:
      release: 13 or 14.
      signed: whether a C char is signed.
      stream_status: what `streamQuery` gives while nothing moves; 600: not ready.
      async_error: NCCL's code for `check_async_error`.
      alone: no other end ever joins.
      inside: how many threads are in NCCL at this time, for each communicator.
    """

    release: int
    signed: bool = True
    available: bool = True
    version: int = 23203
    stream_status: int = 0
    async_error: int = 0
    refused: int = 0
    alone: bool = False
    made: list[FakeCommunicator] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    names: dict[Any, dict[int, FakeCommunicator]] = field(default_factory=dict)
    joined: threading.Condition = field(default_factory=threading.Condition)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let `import cupy` give this one."""
        cupy, cuda, nccl = ModuleType("cupy"), ModuleType("cupy.cuda"), ModuleType("cupy.cuda.nccl")
        # As an import does: what was imported before must not be found.
        for name, module in [("cupy", cupy), ("cupy.cuda", cuda), ("cupy.cuda.nccl", nccl)]:
            module.__spec__ = ModuleSpec(name, None)
            monkeypatch.setitem(sys.modules, name, module)
        space: Any = cupy
        space.__version__ = f"{self.release}.0.0"
        space.empty = lambda count, dtype: FakeArray(count)
        space.cuda = cuda
        space = cuda
        space.nccl = nccl
        space.Device = FakeDevice
        space.Stream = lambda non_blocking: SimpleNamespace(ptr=len(self.calls) + 1)
        space.runtime = SimpleNamespace(streamQuery=self.stream_query, CUDARuntimeError=CUDARuntimeError)
        space = nccl
        space.available = self.available
        if not self.available:
            # CuPy warns when this module is first imported; here, when it is looked at.
            del space.available
            space.__getattr__ = _missing
            return
        space.NCCL_UINT8 = 1
        space.NcclError = NcclError
        space.get_version = lambda: self.version
        space.get_unique_id = self.get_unique_id
        space.groupStart, space.groupEnd = lambda: self.calls.append("start"), lambda: self.calls.append("end")
        space.NcclCommunicator = lambda ndev, name, rank: FakeCommunicator(self, ndev, name, rank)

    def get_unique_id(self) -> bytes | tuple[int, ...]:
        # Every kind of byte: negative ones too, where chars are signed.
        name = bytes([0, 44, 128, 255]) + os.urandom(124)
        if self.release >= 14:
            return name
        return tuple(np.frombuffer(name, np.int8 if self.signed else np.uint8).tolist())

    def check_name(self, name: Any) -> None:
        """What the constructor does with a name."""
        wanted = bytes if self.release >= 14 else tuple
        if type(name) is not wanted:
            raise TypeError(
                f"Argument 'commId' has incorrect type (expected {wanted.__name__}, got {type(name).__name__})"
            )
        if len(name) != 128:
            raise ValueError(f"commId length {len(name)} != 128.") if wanted is bytes else AssertionError()
        low, high = (-128, 127) if self.signed else (0, 255)
        if wanted is tuple and not all(low <= number <= high for number in name):
            raise OverflowError("value too large to convert to char")

    def stream_query(self, stream: int) -> int:
        if self.stream_status == 0 and any(made.waiting for made in self.made if made.stream == stream):
            return 600
        return self.stream_status


class FakeCommunicator:
    """One end; sends are copied at once, receives when `check_async_error` is called."""

    def __init__(self, cupy: FakeCupy, ndev: int, name: Any, rank: int) -> None:
        cupy.check_name(name)
        if cupy.refused:
            raise NcclError(cupy.refused)
        self.cupy, self.rank, self.stream = cupy, rank, 0
        self.arrived: queue.Queue[bytes] = queue.Queue()
        self.waiting: list[tuple[int, int]] = []
        self.freed = ""
        self.users = 0
        ends = cupy.names.setdefault(name, {})
        with cupy.joined:
            ends[rank] = self
            cupy.joined.notify_all()
            # As in NCCL: without end.
            cupy.joined.wait_for(lambda: len(ends) == ndev and not cupy.alone)
        self.ends = ends
        cupy.made.append(self)

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._used()
        self.stream = stream
        self.ends[peer].arrived.put(ctypes.string_at(sendbuf, count))

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._used()
        self.stream = stream
        self.waiting.append((recvbuf, count))

    def check_async_error(self) -> None:
        self._used()
        if self.cupy.async_error:
            raise NcclError(self.cupy.async_error)
        while self.waiting and not self.arrived.empty():
            pointer, count = self.waiting.pop(0)
            ctypes.memmove(pointer, self.arrived.get(), count)

    def abort(self) -> None:
        assert not self.users, "aborted while another thread was inside"
        self.freed = self.freed or "aborted"

    def destroy(self) -> None:
        assert not self.users, "destroyed while another thread was inside"
        self.freed = self.freed or "destroyed"

    def _used(self) -> None:
        self.users += 1
        assert not self.freed, f"used after it was {self.freed}: a bare pointer in CuPy"
        threading.Event().wait(0.001)  # others get their turn
        assert not self.freed, f"{self.freed} while it was used"
        self.users -= 1


class FakeDevice:
    def __init__(self, device: int) -> None:
        self.id = device

    def __enter__(self) -> FakeDevice:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class FakeArray:
    """`cupy.empty(count, dtype="uint8")`, whose memory JAX takes over by DLPack."""

    def __init__(self, count: int) -> None:
        self.memory = np.full(count, 0xAA, np.uint8)
        self.data = SimpleNamespace(ptr=self.memory.ctypes.data)

    def __dlpack__(self, **options: Any) -> Any:
        return self.memory.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.memory.__dlpack_device__()


def _missing(name: str) -> bool:
    """`cupy.cuda.nccl` without libnccl has this name alone."""
    if name != "available":
        raise AttributeError(name)
    warnings.warn(
        "\nnccl library could not be loaded.\n\nReason: ImportError (libnccl.so.2: cannot open shared object file)\n",
        UserWarning,
        stacklevel=2,
    )
    return False
