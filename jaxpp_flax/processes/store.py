"""The key-value store through which the processes of a run talk, and the address by which they reach each other."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import jax

from jaxpp_flax._compat_texts.errors import has_entry, has_no_entry, has_timed_out, is_out_of_reach
from jaxpp_flax.error_codes import documented

__all__ = [
    "ROOT",
    "BarrierTimeoutError",
    "CoordinationError",
    "KeyValueStore",
    "ProcessFailedError",
    "claim_index",
    "claim_run",
    "own_address",
]

ROOT = "jaxpp_flax"
"""The folder in the store that belongs to this package."""

# By then the watch has ended the process if the service is gone, with the usual failure timeout.
_PATIENCE_SECONDS = 30.0
_PAUSE_SECONDS = 0.2


@documented("JPF500")
class CoordinationError(RuntimeError):
    """The processes of a run cannot be coordinated, or have different programs or values."""


@documented("JPF501")
class BarrierTimeoutError(CoordinationError, TimeoutError):
    """Some processes did not come to a barrier, or give a value, in time; the message names them."""


@documented("JPF502")
class ProcessFailedError(CoordinationError):
    """Another process of the run was killed, was stopped, or has failed; the message names it."""


class KeyValueStore:
    """The store of JAX's coordination service, which process 0 (or the launcher) serves; keys are paths with slashes.

    Args:
      client: the client of the service, as `_compat.coordination_client` gives it.
      patience_s: for how long calls are repeated while the connection is broken.
    """

    def __init__(self, client: Any, patience_s: float = _PATIENCE_SECONDS) -> None:
        self._client, self._patience = client, patience_s

    def without_patience(self) -> KeyValueStore:
        """The same store; its calls raise as soon as the connection breaks."""
        return KeyValueStore(self._client, 0.0)

    def _call(self, function: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        deadline = time.monotonic() + self._patience
        while True:
            try:
                return function(*arguments, **more)
            except jax.errors.JaxRuntimeError as error:
                if not is_out_of_reach(error) or time.monotonic() >= deadline:
                    raise
            time.sleep(_PAUSE_SECONDS)

    def set(self, key: str, value: bytes) -> None:
        """Write an entry, replacing the one that is there."""
        with _store_errors():
            self._call(self._client.key_value_set_bytes, key, value, allow_overwrite=True)

    def claim(self, key: str, value: bytes) -> bytes:
        """Write an entry unless there is one; returns the one that is there then."""
        with _store_errors():
            try:
                self._call(self._client.key_value_set_bytes, key, value)
            except jax.errors.JaxRuntimeError as error:
                if not has_entry(error):
                    raise
                return self._call(self._client.key_value_try_get_bytes, key)
        return value

    def get(self, key: str, timeout_s: float) -> bytes | None:
        """Wait for an entry; None if it does not come in time."""
        with _store_errors():
            try:
                return self._call(self._client.blocking_key_value_get_bytes, key, max(1, int(timeout_s * 1000)))
            except jax.errors.JaxRuntimeError as error:
                if not has_timed_out(error):
                    raise
            # Over a slow network no answer comes within a short time. This question has no limit.
            try:
                return self._call(self._client.key_value_try_get_bytes, key)
            except jax.errors.JaxRuntimeError as error:
                if has_no_entry(error):
                    return None
                raise

    def list(self, folder: str) -> dict[str, bytes]:
        """The entries whose keys begin with `folder` and a slash, by the rest of the key."""
        with _store_errors():
            entries: list[tuple[str, bytes]] = self._call(self._client.key_value_dir_get_bytes, folder + "/")
        return {key.removeprefix(folder + "/"): value for key, value in entries}

    def add(self, key: str) -> int:
        """Add one to a counter that begins at zero; returns the sum. A connection that breaks may add twice."""
        with _store_errors():
            return self._call(self._client.key_value_increment, key, 1)

    def delete(self, key: str) -> None:
        """Delete an entry, and all entries below it."""
        with _store_errors():
            self._call(self._client.key_value_delete, key)


@contextmanager
def _store_errors() -> Generator[None]:
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        raise CoordinationError(
            f"the coordination service of this run does not answer: {str(error).splitlines()[0]}. It runs in the "
            "launcher, or beside process 0: see whether that has ended and why, and whether its port can be reached "
            "from this host. Then start the run again, from its last checkpoint."
        ) from error


def claim_index(store: KeyValueStore, index: int, count: int, identity: str) -> None:
    """Make sure that no other process has the index of this one: the store could not tell two of them apart.

    Raises:
      CoordinationError: naming both processes, by their `identity`, if another one has the index.
    """
    owner = store.claim(f"{ROOT}/claims/{index}", identity.encode()).decode()
    if owner != identity:
        raise CoordinationError(
            f"two processes of this run have the index {index} (process_id): {owner}, and this one, {identity}. Give "
            f"each its own, from 0 to {count - 1}."
        )


def claim_run(store: KeyValueStore, index: int, run_id: str) -> None:
    """Make sure that this process belongs to the run that meets here: its address may be that of another one.

    Raises:
      CoordinationError: naming both runs. Without a name ("") nothing is compared.
    """
    if not run_id:
        return
    other, _, first = store.claim(f"{ROOT}/run", f"{run_id} {index}".encode()).decode().rpartition(" ")
    if other != run_id:
        raise CoordinationError(
            f"two runs have one coordinator's address: process {index} belongs to the run {run_id!r}, and process "
            f"{first}, which came first, to {other!r}. End what is left of the other run, or give this one another "
            "address or port."
        )


def own_address(coordinator_address: str) -> str:
    """The address by which this host reaches the coordinator. Other processes can reach it, and it is no wildcard.

    Raises:
      OSError: if the coordinator's name cannot be resolved, or no route leads to it.

    Example:
      >>> own_address("127.0.0.1:4321")
      '127.0.0.1'
    """
    host, _, port = coordinator_address.rpartition(":")
    family, kind, _, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        # Nothing is sent: a datagram socket only chooses its route.
        probe.connect(target)
        return probe.getsockname()[0]
