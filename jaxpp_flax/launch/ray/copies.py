"""Copies of the processes' state at other hosts: each host holds those of the host before it.

A host knows nothing of what is in its file in memory. It copies ranges of bytes, each to the same place in another
host's file, as its processes ask, and beside their steps. They go from host to host by a connection of their own: Ray's
objects take three times as much of the CPUs. Ray tells who the hosts are, and a secret of each.
"""

from __future__ import annotations

import hmac
import importlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any

__all__ = ["HostCopies"]

_PIECE = 1 << 20  # the bytes that are written at once
_LONGEST_LINE = 1024  # of a request or an answer
_LONGEST_FAILURE = 200  # of its characters, so that it fits into an answer
_SECONDS_TO_CONNECT = 10.0
_SECONDS_TO_ACCEPT_AGAIN = 0.1
_CLOSED = "the other host has closed the connection"

Endpoint = tuple[str, int, str]  # the address and the port where a host listens, and its secret


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
        self._links: dict[socket.socket, int] = {}  # connections between hosts, with their lives
        self._lock = threading.Lock()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address.strip("[]"), 0), family=family)
        self._endpoint: Endpoint = (*self._listener.getsockname()[:2], secrets.token_hex(16))
        threading.Thread(target=self._listen, name="jaxpp_flax copies", daemon=True).start()

    def endpoint(self) -> Endpoint:
        """Return where other hosts connect to this one."""
        return self._endpoint

    def meet(self, life: int, hosts: Sequence[Any], place: int) -> None:
        """Begin a life of the run: with the actors of all hosts, in order, and the place of this one.

        What is under way for earlier lives ends.
        """
        with self._lock:
            self._life, self._hosts, self._place = life, list(hosts), place
            earlier = [link for link, of in self._links.items() if of < life]
        for link in earlier:
            with suppress(OSError):  # it is closed
                link.shutdown(socket.SHUT_RDWR)

    def serve(self, link: socket.socket) -> None:
        """Do what a process of this life asks for, in the background, until it ends."""
        service = _Service(self, self._life, self._hosts, self._place, link)
        threading.Thread(target=service.run, name="jaxpp_flax copies", daemon=True).start()

    def write(self, life: int, begin: int, data: bytes | memoryview) -> None:
        """Write bytes that come from another host.

        Raises:
          ValueError: if an earlier life has asked for that: a later one may have written there.
        """
        with self._lock:
            self._check(life)
            rest = memoryview(data)
            while rest:  # little room leaves a write unfinished, and only the next one fails
                written = os.pwrite(self.file, rest, begin)
                rest, begin = rest[written:], begin + written

    def _check(self, life: int) -> None:
        if life < self._life:
            raise ValueError(f"this copy is of life {life}, and life {self._life} has begun")

    def close(self) -> None:
        """Listen no longer."""
        with suppress(OSError):  # it is closed
            self._listener.shutdown(socket.SHUT_RDWR)  # else the thread would go on waiting
        self._listener.close()

    @contextmanager
    def linked(self, life: int, link: socket.socket) -> Iterator[None]:
        """While a connection between hosts is used for a life. The next life ends it."""
        with self._lock:
            self._check(life)
            self._links[link] = life
        try:
            yield
        finally:
            with self._lock:
                del self._links[link]

    def _listen(self) -> None:
        while self._listener.fileno() >= 0:
            try:
                link, _ = self._listener.accept()
            except OSError:  # it is closed, or this process has no descriptors left for a while
                time.sleep(_SECONDS_TO_ACCEPT_AGAIN)
                continue
            threading.Thread(target=self._answer, args=(link,), name="jaxpp_flax copies", daemon=True).start()

    def _answer(self, link: socket.socket) -> None:
        """Do what another host asks for, until it closes the connection. A stranger, without the secret, is refused."""
        link.settimeout(_SECONDS_TO_CONNECT)
        # A host that is lost in the middle of a line leaves no JSON.
        with link, link.makefile("rb") as requests, suppress(OSError, ValueError):
            if not hmac.compare_digest(requests.readline(_LONGEST_LINE), f"{self._endpoint[2]}\n".encode()):
                return
            life = json.loads(requests.readline(_LONGEST_LINE))
            link.settimeout(None)
            failure = None
            with self.linked(life, link):
                while request := requests.readline(_LONGEST_LINE):
                    what, *numbers = json.loads(request)
                    if what == "write":
                        failure = self._take(life, failure, requests, *numbers)
                    elif what == "read":
                        _send_file(link, self.file, *numbers)
                    elif what == "finish":
                        link.sendall(json.dumps(failure).encode() + b"\n")

    def _take(self, life: int, failure: str | None, source: Any, begin: int, size: int) -> str | None:
        """Write bytes as they come; return what has failed, which ends the writing, but not the taking."""
        for place, piece in _pieces(source, begin, size):
            if failure is None:
                try:
                    self.write(life, place, piece)
                except (OSError, ValueError) as error:
                    failure = str(error)[:_LONGEST_FAILURE]
        return failure


class _Service:
    """What a host does for one process."""

    def __init__(self, own: HostCopies, life: int, hosts: Sequence[Any], place: int, link: socket.socket) -> None:
        self._ray: Any = importlib.import_module("ray")
        self._own, self._life, self._hosts, self._place, self._link = own, life, hosts, place, link
        self._endpoints: dict[int, Endpoint] = {}

    def run(self) -> None:
        """Answer each request with nothing, or with what has failed."""
        with self._link, self._link.makefile("r") as requests, suppress(OSError):  # the process has ended
            for request in requests:
                what, *arguments = json.loads(request)
                failure = None
                try:
                    self.pass_on(*arguments) if what == "pass_on" else self.fetch(*arguments)
                except Exception as error:  # of Ray: its classes tell little, and the process raises it
                    failure = (str(error).strip() or type(error).__name__).splitlines()[-1]
                self._link.sendall(json.dumps(failure).encode() + b"\n")

    @contextmanager
    def _connected(self, place: int) -> Iterator[_OtherHost]:
        if place not in self._endpoints:
            self._endpoints[place] = self._ray.get(self._hosts[place].copies.remote("endpoint"))
        address, port, secret = self._endpoints[place]
        try:
            with closing(_OtherHost(address, port)) as other, self._own.linked(self._life, other.link):
                other.greet(secret, self._life)
                yield other
        except OSError as error:
            raise OSError(f"the host at {address}, port {port}: {error}") from error

    def pass_on(self, begin: int, head: int, size: int) -> None:
        """Copy a range to the next host. Its beginning, which says that it is whole, goes first and comes last."""
        with self._connected((self._place + 1) % len(self._hosts)) as other:
            other.erase(begin, head)
            other.write(self._own.file, begin + head, size - head)
            other.write(self._own.file, begin, head)
            other.finish()

    def fetch(self, host: int, begin: int, size: int) -> None:
        """Copy a range of another host's file."""
        with self._connected(host) as other:
            for place, piece in other.read(begin, size):
                self._own.write(self._life, place, piece)


class _OtherHost:
    """A connection to another host, which does one thing after another with ranges of its file."""

    def __init__(self, address: str, port: int) -> None:
        self.link = socket.create_connection((address, port), _SECONDS_TO_CONNECT)
        self.link.settimeout(None)
        self.link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else each copy waits for 40 ms
        self._answers = self.link.makefile("rb")

    def greet(self, secret: str, life: int) -> None:
        """Tell the host's secret, and the life that asks."""
        self.link.sendall(f"{secret}\n{life}\n".encode())

    def _ask(self, *request: str | int) -> None:
        self.link.sendall(json.dumps(request).encode() + b"\n")

    def erase(self, begin: int, size: int) -> None:
        """Write zeros."""
        self._ask("write", begin, size)
        self.link.sendall(bytes(size))

    def write(self, file: int, begin: int, size: int) -> None:
        """Write what this host's file has there."""
        self._ask("write", begin, size)
        _send_file(self.link, file, begin, size)

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
        answer = self._answers.readline(_LONGEST_LINE)
        failure = json.loads(answer) if answer else _CLOSED
        if failure is not None:
            raise OSError(failure)

    def close(self) -> None:
        self._answers.close()
        self.link.close()


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
            raise OSError(_CLOSED)
        yield place, piece
