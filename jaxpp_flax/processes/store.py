"""The key-value store of JAX's coordination service, through which the processes of a run talk."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import jax

from jaxpp_flax.processes.watch import ROOT, KeyValueStore

__all__ = ["BarrierTimeoutError", "CoordinationError", "JaxKeyValueStore", "ProcessFailedError", "claim_index"]


class CoordinationError(RuntimeError):
    """The processes of a run cannot be coordinated, or do not agree."""


class BarrierTimeoutError(CoordinationError, TimeoutError):
    """Some processes did not come to a meeting point in time; the message names them."""


class ProcessFailedError(CoordinationError):
    """Another process of the run was killed, was stopped, or has failed; the message names it."""


class JaxKeyValueStore:
    """The store of JAX's coordination service, which process 0 (or the launcher) serves.

    Args:
      client: the client in what `_compat.coordination_client` gives.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    def set(self, key: str, value: bytes) -> None:
        with _store_errors():
            self._client.key_value_set_bytes(key, value, allow_overwrite=True)

    def get(self, key: str, timeout_s: float) -> bytes | None:
        with _store_errors():
            try:
                return self._client.blocking_key_value_get_bytes(key, max(1, int(timeout_s * 1000)))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" in str(error):
                    return None
                raise

    def list(self, folder: str) -> dict[str, bytes]:
        with _store_errors():
            entries: list[tuple[str, bytes]] = self._client.key_value_dir_get_bytes(folder + "/")
        return {key.removeprefix(folder + "/"): value for key, value in entries}

    def add(self, key: str) -> int:
        with _store_errors():
            return self._client.key_value_increment(key, 1)

    def delete(self, key: str) -> None:
        with _store_errors():
            self._client.key_value_delete(key)


def claim_index(store: KeyValueStore, index: int, count: int, identity: str) -> None:
    """Be the one process of this index: the store takes two for one, and so would all that rests on it.

    Args:
      store: of the run.
      index: of this process.
      count: of the processes.
      identity: names this process, and no other.

    Raises:
      CoordinationError: naming both, if another process has the index.
    """
    key = f"{ROOT}/claims/{index}"
    if store.add(f"{key}/count") == 1:
        store.set(f"{key}/by", identity.encode())
        return
    owner = (store.get(f"{key}/by", 5.0) or b"another process").decode()
    if owner != identity:
        raise CoordinationError(
            f"two processes of this run have the index {index} (process_id): {owner}, and this one, {identity}. Give "
            f"each its own, from 0 to {count - 1}."
        )


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
