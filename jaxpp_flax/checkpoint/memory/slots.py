"""Slots in a host's memory: each holds what one process knew after one step, and outlives the process.

A host owns one file in memory that has no name, so nothing of it stays once the host and its processes have ended.
Every process of every life has this file open. Process `i` has slots `2 * i` and `2 * i + 1`, and writes them in turns.
Of several hosts, each also holds the slots of the host before it, under their own numbers.
The mark of a slot is taken away before anything in it changes, and set last: a process may be killed at any moment, and
one of its last two copies is whole.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import struct
import zlib
from collections.abc import Container, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Extent", "SlotHead", "Slots", "free_bytes", "rounded"]

# The addresses of a slot. The file is sparse: what is not written takes no memory.
_SPAN = 1 << 40
# Values begin here, and each leaf at a multiple of the alignment.
_BODY, _ALIGNMENT = 4096, 64
_HEAD, _MARK = struct.Struct("<8s5Q"), b"complete"
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of Linux


@dataclass(frozen=True)
class SlotHead:
    """The beginning of a slot that has its mark.

    Attributes:
      serial: counts the copies of the run; all processes write copies with the same serial.
      size: bytes of the values.
      checksum: the sum of the values as 64-bit words: it tells a changed word or page, at the speed of memory.
      about_size: bytes of the description after the values.
      about_checksum: its CRC-32.
    """

    serial: int
    size: int
    checksum: int
    about_size: int
    about_checksum: int


class Extent(NamedTuple):
    """Where a slot lies in its file: the first byte, and the bytes of the beginning, the values and the description."""

    begin: int
    head: int
    values: int
    about: int

    @property
    def size(self) -> int:
        """The bytes of the slot."""
        return self.head + self.values + self.about


class Slots:
    """The slots in a file in memory.

    Args:
      descriptor: of the open file.

    Example:
      >>> slots = Slots(os.memfd_create("slots"))
      >>> slots.write(3, 7, [np.arange(4), np.ones(2, np.float32)], b"after step 7")
      >>> slots.heads()[3].serial, slots.is_intact(3), slots.about(3), slots.values(3)[64:72].view(np.float32)
      (7, True, b'after step 7', array([1., 1.], dtype=float32))
    """

    def __init__(self, descriptor: int) -> None:
        self._file = descriptor
        self._open: dict[int, mmap.mmap] = {}  # those that this process writes

    def heads(self) -> dict[int, SlotHead]:
        """Return the beginnings of all slots that have their marks, by number."""
        numbers = range(math.ceil(os.fstat(self._file).st_size / _SPAN))
        return {number: head for number in numbers if (head := self.head(number)) is not None}

    def head(self, number: int) -> SlotHead | None:
        """Return the beginning of a slot; None without its mark."""
        found = os.pread(self._file, _HEAD.size, number * _SPAN)
        if len(found) < _HEAD.size or not found.startswith(_MARK):
            return None
        return SlotHead(*_HEAD.unpack(found)[1:])

    def is_intact(self, number: int) -> bool:
        """Return True if a slot has its mark and its checksums are right."""
        head = self.head(number)
        if head is None or zlib.crc32(self.about(number)) != head.about_checksum:
            return False
        return _checksum(self.values(number)) == head.checksum

    def about(self, number: int, head: SlotHead | None = None) -> bytes:
        """Return the description in a slot; `head` is that of a slot which has no mark here."""
        head = head or self._need(number)
        return os.pread(self._file, head.about_size, number * _SPAN + _BODY + head.size)

    def values(self, number: int, head: SlotHead | None = None) -> np.ndarray:
        """Return the bytes of the values in a slot, without a copy: they change when the slot is written again."""
        head = head or self._need(number)
        whole = mmap.mmap(self._file, _BODY + head.size, offset=number * _SPAN, access=mmap.ACCESS_READ)
        return np.frombuffer(whole, np.uint8)[_BODY:]

    def _need(self, number: int) -> SlotHead:
        head = self.head(number)
        if head is None:
            raise ValueError(f"slot {number} has no mark.")
        return head

    def extent(self, number: int, head: SlotHead | None = None) -> Extent:
        """Return where a slot lies in the file."""
        head = head or self._need(number)
        return Extent(number * _SPAN, _BODY, head.size, head.about_size)

    def unmark(self, number: int) -> None:
        """Take the mark of a slot away."""
        os.pwrite(self._file, bytes(len(_MARK)), number * _SPAN)

    def keep(self, numbers: Container[int]) -> None:
        """Give the memory of all other slots back."""
        for number in range(math.ceil(os.fstat(self._file).st_size / _SPAN)):
            if number not in numbers:
                begin, size = ctypes.c_longlong(number * _SPAN), ctypes.c_longlong(_SPAN)
                ctypes.CDLL(None).fallocate(self._file, _PUNCH_HOLE | _KEEP_SIZE, begin, size)

    def reserve(self, number: int, size: int) -> np.ndarray:
        """Give a slot memory for `size` bytes of values and description; return the bytes of the whole slot.

        Raises:
          OSError: if there is not as much memory.
        """
        size += _BODY
        if number not in self._open or len(self._open[number]) < size:
            os.posix_fallocate(self._file, number * _SPAN, size)
            ready = mmap.MAP_SHARED | mmap.MAP_POPULATE  # else the first copy would wait for each page
            self._open[number] = mmap.mmap(self._file, size, flags=ready, offset=number * _SPAN)
        return np.frombuffer(self._open[number], np.uint8)

    def reserved(self) -> int:
        """Return the bytes that all slots of the host have now."""
        return os.fstat(self._file).st_blocks * 512

    def write(self, number: int, serial: int, values: Iterable[Any], about: bytes) -> None:
        """Write a slot: arrays, one after another, and their description."""
        values = list(values)
        size = sum(rounded(value) for value in values)
        slot, begin = self.reserve(number, size + len(about)), _BODY
        slot[: len(_MARK)] = 0
        for value in values:
            flat = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
            slot[begin : begin + flat.size] = flat
            begin += rounded(value)
        slot[begin : begin + len(about)] = np.frombuffer(about, np.uint8)
        checksum = _checksum(slot[_BODY:begin])
        head = _HEAD.pack(_MARK, serial, size, checksum, len(about), zlib.crc32(about))
        slot[len(_MARK) : len(head)] = np.frombuffer(head, np.uint8)[len(_MARK) :]
        slot[: len(_MARK)] = np.frombuffer(_MARK, np.uint8)


def rounded(array: Any) -> int:
    """Return the bytes that an array takes in a slot.

    >>> rounded(np.ones(17, np.float32))
    128
    """
    size = math.prod(array.shape) * np.dtype(array.dtype).itemsize
    return math.ceil(size / _ALIGNMENT) * _ALIGNMENT


def _checksum(values: np.ndarray) -> int:
    return int(np.add.reduce(values.view(np.uint64), dtype=np.uint64))


def free_bytes() -> int:
    """Return the bytes of memory that this host has free, and that the limits of this process's groups leave."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    own = next((line[4:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::/")), "")
    # SLURM and systemd limit a group around this one.
    innermost = Path("/sys/fs/cgroup", own)
    for group in (innermost, *innermost.parents):
        try:
            most, used, more = ((group / f"memory.{name}").read_text() for name in ("max", "current", "stat"))
        except OSError:  # no limit, or an old kernel's groups
            continue
        if most.strip() != "max":
            files = next(int(line.split()[1]) for line in more.splitlines() if line.startswith("inactive_file"))
            free = min(free, int(most) - int(used) + files)
    return free
