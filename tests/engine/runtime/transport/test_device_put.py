"""What `device_put` refuses; what it moves is tested by real processes (tests/processes)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import pytest
from jax.sharding import SingleDeviceSharding

from jaxpp_flax.engine.runtime.transport.base import Parcel, TransportError
from jaxpp_flax.engine.runtime.transport.device_put import CrossHostDevicePut

SETTING = "jax_cross_host_transfer_socket_address"


def parcel(platform: str) -> Parcel:
    """One that begins on a device of this platform."""
    origin: Any = SimpleNamespace(device_set=[SimpleNamespace(platform=platform)])
    if platform == "cpu":
        origin = SingleDeviceSharding(jax.devices()[0])
    return Parcel(0, 1, (), (origin,))


def test_cpus_without_the_setting_are_refused_before_the_first_step():
    assert jax.config.read(SETTING) == ""
    with pytest.raises(TransportError, match=rf"on CPU\. Use transport 'transfer', or set {SETTING} and"):
        CrossHostDevicePut().connect([parcel("cpu")], 1.0)
    CrossHostDevicePut().connect([parcel("gpu")], 1.0)
    CrossHostDevicePut().connect([], 1.0)


def test_cpus_with_the_setting_are_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax.config, "read", lambda name: {SETTING: "127.0.0.1:41300"}[name])
    CrossHostDevicePut().connect([parcel("cpu")], 1.0)


def test_a_jax_without_such_a_setting_is_left_to_speak_for_itself(monkeypatch: pytest.MonkeyPatch):
    def read(name: str) -> None:
        raise AttributeError(name)

    monkeypatch.setattr(jax.config, "read", read)
    CrossHostDevicePut().connect([parcel("cpu")], 1.0)
