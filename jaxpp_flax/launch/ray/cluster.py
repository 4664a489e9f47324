"""What is asked of Ray itself: whether it is installed, whether there is a cluster, whether its head is there."""

from __future__ import annotations

import contextlib
import importlib
import socket
import threading
import time
from typing import Any

from jaxpp_flax.launch.settings import LaunchError

__all__ = ["RayHead", "import_ray"]

# Ray's own programs end after 60 s without their head, without a word of which run it was.
_MOST_SECONDS_WITHOUT_HEAD = 45.0


def import_ray(*modules: str) -> list[Any]:
    """The module `ray`, and those below it that are named.

    Raises:
      LaunchError: if Ray is not installed.
    """
    try:
        return [importlib.import_module(name) for name in ("ray", *(f"ray.{module}" for module in modules))]
    except ImportError as error:
        raise LaunchError("Ray is not installed: pip install 'jaxpp-flax[ray]'.") from error


class RayHead:
    """Knocks at the address of Ray's head each second.

    While the head is away, hosts and processes go on; a head with a store that outlives it may come back.

    Args:
      address: host and port of the head.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._ended = threading.Event()
        self._answered = time.monotonic()
        threading.Thread(target=self._knock, name="jaxpp_flax Ray's head", daemon=True).start()

    def _knock(self) -> None:
        host, _, port = self.address.rpartition(":")
        while not self._ended.wait(1.0):
            with contextlib.suppress(OSError), socket.create_connection((host.strip("[]"), int(port)), timeout=5.0):
                self._answered = time.monotonic()

    @property
    def is_lost(self) -> bool:
        """Whether it has not answered for long."""
        return time.monotonic() - self._answered > _MOST_SECONDS_WITHOUT_HEAD

    def check(self) -> None:
        """
        Raises:
          LaunchError: if the head is lost.
        """
        if self.is_lost:
            raise LaunchError(
                f"Ray's head at {self.address} has not answered for {_MOST_SECONDS_WITHOUT_HEAD:g} s: without it no "
                "host can be replaced, and Ray ends its programs. Start the cluster again, and then the run: "
                "fit(resume=True) goes on from its last checkpoint."
            )

    def close(self) -> None:
        """Knock no more."""
        self._ended.set()
