"""Copies of the processes' state at other hosts: each host holds those of the host before it.

A host knows nothing of what is in its file in memory. It copies ranges of bytes, each to the same place in another
host's file, as its processes ask, and beside their steps. They go from host to host by a connection of their own: Ray's
objects take four times as long and as much of the CPUs. Ray tells who the hosts are, and a secret of each.
"""

from __future__ import annotations

import hmac
import importlib
import json
import os
import secrets
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

__all__ = ["HostCopies"]

_PIECE = 1 << 20  # the bytes that are written at once
_LONGEST_REQUEST = 256
_SECONDS_TO_CONNECT = 10.0

Door = tuple[str, int, str]  # the address and the port where a host listens, and its secret


class HostCopies:
    """The file in memory of one host, and its way to those of the others.

    Args:
      file: descriptor of the file.
      address: of this host, where others reach it.

    Example:
      >>> copies = HostCopies(os.memfd_create("host"), "127.0.0.1")
      >>> copies.meet(1, [None], 0), copies.write(1, 4096, b"abc")
      (None, None)
      >>> os.pread(copies.file, 2, 4097)
      b'bc'
      >>> copies.close()
    """

    def __init__(self, file: int, address: str) -> None:
        self.file = file
        self._life, self._hosts, self._place = 0, list[Any](), 0
        self._writing = threading.Lock()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address.strip("[]"), 0), family=family)
        self._door: Door = (*self._listener.getsockname()[:2], secrets.token_hex(16))
        threading.Thread(target=self._listen, name="jaxpp_flax copies", daemon=True).start()

    def door(self) -> Door:
        """Return where other hosts connect to this one."""
        return self._door

    def meet(self, life: int, hosts: Sequence[Any], place: int) -> None:
        """Begin a life of the run: with the actors of all hosts, in order, and the place of this one."""
        with self._writing:
            self._life, self._hosts, self._place = life, list(hosts), place

    def serve(self, link: socket.socket) -> None:
        """Do what a process of this life asks for, in the background, until it ends."""
        service = _Service(self, self._life, self._hosts, self._place, link)
        threading.Thread(target=service.run, name="jaxpp_flax copies", daemon=True).start()

    def write(self, life: int, begin: int, data: bytes | memoryview) -> None:
        """Write bytes that come from another host.

        Raises:
          ValueError: if an earlier life has asked for that: a later one may have written there.
        """
        with self._writing:
            if life < self._life:
                raise ValueError(f"this copy is of life {life}, and life {self._life} has begun")
            os.pwrite(self.file, data, begin)

    def close(self) -> None:
        """Listen no longer."""
        with suppress(OSError):  # it is closed
            self._listener.shutdown(socket.SHUT_RDWR)  # else the thread would go on waiting
        self._listener.close()

    def _listen(self) -> None:
        with suppress(OSError):  # the listener is closed
            while True:
                link, _ = self._listener.accept()
                threading.Thread(target=self._answer, args=(link,), name="jaxpp_flax copies", daemon=True).start()

    def _answer(self, link: socket.socket) -> None:
        """Do what another host asks for, until it closes the connection. Whoever does not know the secret is left."""
        link.settimeout(_SECONDS_TO_CONNECT)
        with link, link.makefile("rb") as requests, suppress(OSError):
            if not hmac.compare_digest(requests.readline(_LONGEST_REQUEST), f"{self._door[2]}\n".encode()):
                return
            link.settimeout(None)
            life, failure = json.loads(requests.readline(_LONGEST_REQUEST)), None
            while request := requests.readline(_LONGEST_REQUEST):
                what, *numbers = json.loads(request)
                if what == "write":
                    failure = self._take(life, failure, requests, *numbers)
                elif what == "read":
                    _send_file(link, self.file, *numbers)
                else:
                    link.sendall(json.dumps(failure).encode() + b"\n")
                    failure = None

    def _take(self, life: int, failure: str | None, source: Any, begin: int, size: int) -> str | None:
        """Write bytes as they come; return what has failed, which ends the writing, but not the taking."""
        for place, piece in _pieces(source, begin, size):
            if failure is None:
                try:
                    self.write(life, place, piece)
                except (OSError, ValueError) as error:
                    failure = str(error)
        return failure


class _Service:
    """What a host does for one process."""

    def __init__(self, own: HostCopies, life: int, hosts: Sequence[Any], place: int, link: socket.socket) -> None:
        self._ray: Any = importlib.import_module("ray")
        self._own, self._life, self._hosts, self._place, self._link = own, life, hosts, place, link
        self._others: dict[int, _OtherHost] = {}

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
                    self._leave()
                try:
                    self._link.sendall(json.dumps(failure).encode() + b"\n")
                except OSError:  # the process has ended
                    break
        self._leave()

    def _leave(self) -> None:
        for other in self._others.values():
            other.close()
        self._others = {}

    def _host(self, place: int) -> _OtherHost:
        if place not in self._others:
            door = self._ray.get(self._hosts[place].copies.remote("door"))
            self._others[place] = _OtherHost(door, self._life)
        return self._others[place]

    def pass_on(self, begin: int, head: int, size: int) -> None:
        """Copy a range to the next host. Its beginning, which says that it is whole, goes first and comes last."""
        other = self._host((self._place + 1) % len(self._hosts))
        other.erase(begin, head)
        other.write(self._own.file, begin + head, size - head)
        other.write(self._own.file, begin, head)
        other.finish()

    def fetch(self, host: int, begin: int, size: int) -> None:
        """Copy a range of another host's file."""
        for place, piece in self._host(host).read(begin, size):
            self._own.write(self._life, place, piece)


class _OtherHost:
    """Another host, which does one thing after another with the ranges of its file."""

    def __init__(self, door: Door, life: int) -> None:
        address, port, secret = door
        try:
            self._link = socket.create_connection((address, port), _SECONDS_TO_CONNECT)
        except OSError as error:
            raise OSError(f"{address}, port {port}, cannot be reached: {error}") from error
        self._link.settimeout(None)
        self._answers = self._link.makefile("rb")
        self._link.sendall(f"{secret}\n{life}\n".encode())

    def _ask(self, *request: str | int) -> None:
        self._link.sendall(json.dumps(request).encode() + b"\n")

    def erase(self, begin: int, size: int) -> None:
        """Write zeros."""
        self._ask("write", begin, size)
        self._link.sendall(bytes(size))

    def write(self, file: int, begin: int, size: int) -> None:
        """Write what this host's file has there."""
        self._ask("write", begin, size)
        _send_file(self._link, file, begin, size)

    def read(self, begin: int, size: int) -> Iterator[tuple[int, memoryview]]:
        """Yield the places and the bytes of pieces, each until the next one."""
        self._ask("read", begin, size)
        yield from _pieces(self._answers, begin, size)

    def finish(self) -> None:
        """Wait until all is written.

        Raises:
          OSError: if anything has failed.
        """
        self._ask("finish")
        answer = self._answers.readline(_LONGEST_REQUEST)
        failure = json.loads(answer) if answer else "the other host has closed the connection"
        if failure is not None:
            raise OSError(failure)

    def close(self) -> None:
        self._answers.close()
        self._link.close()


def _send_file(link: socket.socket, file: int, begin: int, size: int) -> None:
    while size:
        sent = os.sendfile(link.fileno(), file, begin, size)
        if not sent:
            raise OSError(f"the file ends before byte {begin}")
        begin, size = begin + sent, size - sent


def _pieces(source: Any, begin: int, size: int) -> Iterator[tuple[int, memoryview]]:
    """Yield what comes by a connection, with the place of each piece; each is overwritten by the next one.

    Raises:
      OSError: if the other side closes it before.

    >>> import io
    >>> [(place, bytes(piece)) for place, piece in _pieces(io.BytesIO(b"abc"), 7, 3)]
    [(7, b'abc')]
    """
    room = memoryview(bytearray(min(_PIECE, size)))
    for place in range(begin, begin + size, _PIECE):
        piece = room[: begin + size - place]
        if source.readinto(piece) < len(piece):
            raise OSError("the other host has closed the connection")
        yield place, piece
