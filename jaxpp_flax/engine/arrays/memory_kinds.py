"""Kinds of memory: which of them a type of JAX can express, and which of them devices have. One rule for all requests.

A type knows two kinds: the devices' own memory (`device`), and host memory that devices can read (`pinned_host`). A
request for another kind is refused, because the kind would be lost inside of a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

__all__ = ["SPACES", "check_devices", "check_kind", "memory_wanted"]

SPACES = {"device": jax.memory.Space.Device, "pinned_host": jax.memory.Space.Host}


def check_kind(kind: str, where: str) -> str:
    """Return the kind, if a type of JAX can express it; `where` names the request in the message.

    Raises:
      ValueError: if the kind is neither device memory nor `pinned_host`.

    Example:
      >>> check_kind("pinned_host", "x")
      'pinned_host'
      >>> check_kind("unpinned_host", "x")
      Traceback (most recent call last):
        ...
      ValueError: x has the memory kind 'unpinned_host', but JAX's types know only 'device' and 'pinned_host', so it...
    """
    if kind not in SPACES:
        raise ValueError(
            f"{where} has the memory kind {kind!r}, but JAX's types know only 'device' and 'pinned_host', so it would "
            "be lost inside of the step. Use 'pinned_host' (`sharding.with_memory_kind('pinned_host')`) or 'device'."
        )
    return kind


def check_devices(kind: str | None, devices: Iterable[Any], where: str) -> None:
    """Refuse a kind of memory that one of the devices lacks. None and "device" fit everywhere.

    Raises:
      ValueError: naming the request, the device, and the kinds that the device has.

    Example:
      >>> check_devices("pinned_host", jax.devices(), "x")
      >>> check_devices("hbm9", jax.devices()[:1], "x")
      Traceback (most recent call last):
        ...
      ValueError: x asks for the memory kind 'hbm9', which ... lacks: it has 'device', 'pinned_host'...
    """
    if kind in (None, "device"):
        return
    for device in devices:
        kinds = kinds_of(device)
        if kinds and kind not in kinds:
            listing = ", ".join(map(repr, sorted(kinds)))
            raise ValueError(
                f"{where} asks for the memory kind {kind!r}, which {device} lacks: it has {listing}. Use one of these, "
                "or leave the kind out: the array then lies in the device's own memory."
            )


def kinds_of(device: Any) -> set[str]:
    """Return the kinds of memory of a device; none for a device of a described topology, which does not tell."""
    try:
        return {memory.kind for memory in device.addressable_memories()}
    except Exception:  # described devices have no client to ask
        return set()


def memory_wanted(sharding: Any, where: str) -> str | None:
    """Return the kind of memory that a sharding names, if any.

    Raises:
      ValueError: if no type of JAX can express it, or a device of the sharding lacks it.

    Example:
      >>> from jax.sharding import PartitionSpec, SingleDeviceSharding
      >>> memory_wanted(SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host"), "x")
      'pinned_host'
      >>> memory_wanted(PartitionSpec("data"), "x") is None
      True
    """
    kind = getattr(sharding, "memory_kind", None)
    return None if kind is None else check_kind(kind, where)
