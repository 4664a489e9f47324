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
    store = KeyValueStore(Gone())
    for call in (
        lambda: store.set("k", b""),
        lambda: store.get("k", 1.0),
        lambda: store.list("k"),
        lambda: store.add("k"),
    ):
        with pytest.raises(
            CoordinationError, match=r"UNAVAILABLE: failed to connect\. It runs in the launcher.* start"
        ):
            call()
