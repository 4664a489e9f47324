"""The table of devices that a quote knows, and a user's own table."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from jaxpp_flax.messages import known_names

__all__ = ["Device", "device_named", "device_of_kind", "peak_of_kind"]


@dataclass(frozen=True, kw_only=True)
class Device:
    """The peak speeds of one device and its links.

    Args:
      name: the name in the table.
      peak: floating-point operations per second of dense matrix products, by dtype.
      memory: the bytes of the device's memory.
      memory_bandwidth: bytes per second between memory and cores.
      inside: bytes per second to the other devices of a node, in one direction.
      across: bytes per second to the devices of other nodes, in one direction.
      per_node: the number of devices of a node.
      host_bandwidth: bytes per second between device and host.
      source: where the numbers come from.
      price: the price of one device for an hour, in any currency; 0: not known.
      kinds: the names that JAX gives such a device, `device.device_kind`.
      like: how names begin of devices with the same peak, and perhaps another memory.
    """

    name: str
    peak: Mapping[str, float]
    memory: float
    memory_bandwidth: float
    inside: float
    across: float
    per_node: int
    host_bandwidth: float
    source: str
    price: float = 0.0
    kinds: Sequence[str] = ()
    like: Sequence[str] = ()

    def peak_of(self, dtype: str) -> float:
        """Return the peak of products of this dtype; if it is not in the table, return the smallest peak."""
        return self.peak.get(dtype, min(self.peak.values()))


def device_named(name: str, table: str | os.PathLike[str] | None = None) -> Device:
    """Return a device by its name.

    Args:
      name: the name of a row.
      table: your own TOML file of devices; its rows have priority over those of the package.

    Raises:
      ValueError: for a name that neither has, and for a row with a missing, unknown or wrong field.

    Example:
      >>> device_named("h100-sxm").memory_bandwidth
      3350000000000.0
      >>> device_named("h100")
      Traceback (most recent call last):
      ValueError: hardware 'h100' is in no table. Did you mean 'v100' or 'h200' or 'h100-sxm'? Known: ...
    """
    rows = {key: (row, "the package's table") for key, row in _read(Path(__file__).with_name("devices.toml")).items()}
    if table is not None:
        rows |= {key: (row, os.fspath(table)) for key, row in _read(Path(table)).items()}
    if name not in rows:
        raise ValueError(f"hardware {name!r} is in no table.{known_names(name.lower(), rows)}")
    return _device(name, *rows[name])


def device_of_kind(kind: str) -> Device | None:
    """Return the device of the package's table that JAX calls so, as `device.device_kind`; None if it has none.

    Example:
      >>> device_of_kind("TPU v5").name, device_of_kind("cpu")
      ('tpu-v5p', None)
    """
    rows = _read(Path(__file__).with_name("devices.toml"))
    return next((_device(name, row, "") for name, row in rows.items() if kind in row.get("kinds", ())), None)


def peak_of_kind(kind: str) -> float | None:
    """Return the peak operations per second in bfloat16 of devices that JAX calls so; None for unknown ones.

    A name is known by its beginning too, the longest one of several.

    Example:
      >>> peak_of_kind("NVIDIA H100 NVL"), peak_of_kind("NVIDIA L40")
      (989000000000000.0, None)
    """
    rows = _read(Path(__file__).with_name("devices.toml"))
    begins = {begin: name for name, row in rows.items() for begin in (*row.get("kinds", ()), *row.get("like", ()))}
    known = [begin for begin in begins if kind == begin or kind.startswith((f"{begin} ", f"{begin}-"))]
    return device_named(begins[max(known, key=len)]).peak_of("bfloat16") if known else None


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"the table of devices {os.fspath(path)!r}: there is no such file.")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is no TOML: {error}.") from error


def _device(name: str, row: Any, where: str) -> Device:
    known = {field.name: field.default for field in fields(Device) if field.name != "name"}
    if not isinstance(row, dict):
        raise ValueError(f"{where}: {name!r} is {row!r}; it must be a table of fields.")
    for key in row:
        if key not in known:
            raise ValueError(f"{where}: {name!r} has the unknown field {key!r}.{known_names(key, known)}")
    missing = [key for key, default in known.items() if default is MISSING and key not in row]
    if missing:
        raise ValueError(f"{where}: {name!r} has no field {missing[0]!r}. Add it. All fields: {', '.join(known)}.")
    peaks = row["peak"] if isinstance(row["peak"], dict) else {"peak": row["peak"]}
    numbers = {key: value for key, value in row.items() if key not in ("peak", "source", "price", "kinds", "like")}
    for key, value in (numbers | peaks).items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise ValueError(f"{where}: {name!r} has {key} = {value!r}; it must be a number above 0.")
    return Device(name=name, **row)
