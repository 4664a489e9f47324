"""The store of JAX's coordination service, where that service is gone; runs of processes use it in tests/launch."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from jaxpp_flax.processes.store import CoordinationError, KeyValueStore


class Gone:
    """A client whose service has ended."""

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any, **__: Any) -> Any:
            raise jax.errors.JaxRuntimeError("UNAVAILABLE: failed to connect\nmore of it")

        return call


def test_a_service_that_is_gone_is_named_with_what_to_do():
    store = KeyValueStore(Gone(), patience_s=0.3)
    for call in (
        lambda: store.set("k", b""),
        lambda: store.get("k", 1.0),
        lambda: store.list("k"),
        lambda: store.add("k"),
        lambda: store.claim("k", b""),
    ):
        with pytest.raises(
            CoordinationError, match=r"UNAVAILABLE: failed to connect\. It runs in the launcher.* start"
        ):
            call()


class FarAway:
    """A client in whose network each answer takes longer than a wait may last."""

    def blocking_key_value_get_bytes(self, key: str, timeout_ms: int) -> bytes:
        raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: no {key} within {timeout_ms} ms")

    def key_value_try_get_bytes(self, key: str) -> bytes:
        if key == "there":
            return b"value"
        raise jax.errors.JaxRuntimeError(f"NOT_FOUND: Config key {key} not found.")


def test_a_round_trip_may_take_longer_than_a_wait():
    store = KeyValueStore(FarAway())
    assert store.get("there", 0.2) == b"value"
    assert store.get("elsewhere", 0.2) is None
