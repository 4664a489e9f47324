"""Copies of the processes' state at other hosts: each host holds those of the host before it, by Ray's objects.

A host knows nothing of what is in its file in memory. It copies ranges of bytes, each to the same place in another
host's file, as its processes ask, and beside their steps.
"""

from __future__ import annotations

import importlib
import json
import mmap
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

__all__ = ["HostCopies"]

_PIECE = 64 << 20  # the bytes of one of Ray's objects
_MOST_PIECES = 2  # under way


class HostCopies:
    """The file in memory of one host, and its way to those of the others.

    Args:
      file: descriptor of the file.

    Example:
      >>> copies = HostCopies(os.memfd_create("host"))
      >>> copies.meet(1, [None], 0), copies.write(1, 4096, np.arange(3, dtype=np.uint8))
      (None, None)
      >>> copies.read(4097, 2).tolist()
      [1, 2]
    """

    def __init__(self, file: int) -> None:
        self._file = file
        self._life, self._hosts, self._place = 0, list[Any](), 0

    def meet(self, life: int, hosts: Sequence[Any], place: int) -> None:
        """Begin a life of the run: with the actors of all hosts, in order, and the place of this one."""
        self._life, self._hosts, self._place = life, list(hosts), place

    def serve(self, link: socket.socket) -> None:
        """Do what a process of this life asks for, in the background, until it ends."""
        service = _Service(self, self._life, self._hosts, self._place, link)
        threading.Thread(target=service.run, name="jaxpp_flax copies", daemon=True).start()

    def write(self, life: int, begin: int, data: np.ndarray) -> None:
        """Write bytes that come from another host.

        Raises:
          ValueError: if an earlier life has asked for that: a later one may have written there.
        """
        if life < self._life:
            raise ValueError(f"this copy is of life {life}, and life {self._life} has begun")
        os.pwrite(self._file, data.data, begin)

    def read(self, begin: int, size: int) -> np.ndarray:
        """Return bytes for another host."""
        return np.frombuffer(os.pread(self._file, size, begin), np.uint8)

    def view(self, begin: int, size: int) -> np.ndarray:
        """Return bytes without a copy."""
        return np.frombuffer(mmap.mmap(self._file, size, offset=begin, access=mmap.ACCESS_READ), np.uint8)


class _Service:
    """What a host does for one process."""

    def __init__(self, own: HostCopies, life: int, hosts: Sequence[Any], place: int, link: socket.socket) -> None:
        self._ray: Any = importlib.import_module("ray")
        self._own, self._life, self._hosts, self._place, self._link = own, life, hosts, place, link

    def run(self) -> None:
        """Answer each request with nothing, or with what has failed."""
        with self._link, self._link.makefile("r") as requests:
            for request in requests:
                what, *arguments = json.loads(request)
                failure = None
                try:
                    self.pass_on(*arguments) if what == "pass_on" else self.fetch(*arguments)
                except Exception as error:  # of Ray: its classes tell little, and the process raises it
                    failure = (str(error).strip() or type(error).__name__).splitlines()[-1]
                try:
                    self._link.sendall(json.dumps(failure).encode() + b"\n")
                except OSError:  # the process has ended
                    return

    def pass_on(self, begin: int, head: int, size: int) -> None:
        """Copy a range to the next host. Its beginning, which says that it is whole, goes first and comes last."""
        copies = self._hosts[(self._place + 1) % len(self._hosts)].copies.remote
        write = partial(copies, "write", self._life)
        whole = self._own.view(begin, size)
        calls = [write(begin, np.zeros(head, np.uint8))]
        for first, last in _pieces(head, size):
            calls.append(write(begin + first, whole[first:last]))
            if len(calls) > _MOST_PIECES:
                self._ray.get(calls.pop(0))
        self._ray.get(calls)
        self._ray.get(write(begin, whole[:head]))

    def fetch(self, host: int, begin: int, size: int) -> None:
        """Copy a range of another host's file."""
        for first, last in _pieces(0, size):
            piece = self._ray.get(self._hosts[host].copies.remote("read", begin + first, last - first))
            self._own.write(self._life, begin + first, piece)


def _pieces(first: int, last: int) -> Iterator[tuple[int, int]]:
    """Yield the bounds of pieces of a range.

    >>> [last - first for first, last in _pieces(4096, (130 << 20))][1:]
    [67108864, 2093056]
    """
    for begin in range(first, last, _PIECE):
        yield begin, min(last, begin + _PIECE)
