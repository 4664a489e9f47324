"""A process's connection to its host, which copies parts of the host's file in memory to and from other hosts."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable

__all__ = ["MemoryLink"]

_POLL_SECONDS = 0.2
_MOST_BYTES = 4096


class MemoryLink:
    """Asks the host, which does one thing after another in the background.

    Args:
      descriptor: of the connected socket.
      processes: how many processes of the run each host has: process `i` is on host `i // processes`.

    Example:
      >>> ours, theirs = socket.socketpair()
      >>> link = MemoryLink(ours.detach(), 2)
      >>> link.fetch(3, 4096, 64)
      >>> json.loads(theirs.recv(100)), theirs.send(b'"host 3 is lost"\\n')
      (['fetch', 3, 4096, 64], 17)
      >>> link.finish(lambda: None)
      'host 3 is lost'
      >>> link.close(), theirs.close()
      (None, None)
    """

    def __init__(self, descriptor: int, processes: int) -> None:
        self.processes = processes
        self._socket = socket.socket(fileno=descriptor)
        self._socket.settimeout(_POLL_SECONDS)
        self._asked, self._answers = 0, b""

    def pass_on(self, begin: int, head: int, size: int) -> None:
        """Ask for a copy of a slot at the next host: its first byte, and the bytes of its beginning and of it all."""
        self._ask("pass_on", begin, head, size)

    def fetch(self, host: int, begin: int, size: int) -> None:
        """Ask for bytes of another host's file, at the same place in this host's."""
        self._ask("fetch", host, begin, size)

    def close(self) -> None:
        """Ask for nothing more."""
        self._socket.close()

    def _ask(self, *request: str | int) -> None:
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        self._asked += 1

    def finish(self, check: Callable[[], None]) -> str | None:
        """Wait until all is done; return what has failed, in words. `check` is called meanwhile, and may raise."""
        while self._answers.count(b"\n") < self._asked:
            check()
            try:
                answers = self._socket.recv(_MOST_BYTES)
            except TimeoutError:
                continue
            if not answers:
                return "the host's own program has ended"
            self._answers += answers
        failures = [json.loads(answer) for answer in self._answers.splitlines()]
        self._asked, self._answers = 0, b""
        return next(filter(None, failures), None)
