"""The text of a scheduled program of XLA: its lines, and the types in them, with their bytes as they lie in memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod
from typing import NamedTuple

import numpy as np

__all__ = ["HOST", "Operation", "array_bytes", "computations", "first_group", "laid_out_bytes", "memory_space"]

HOST = "S(5)"
"""The memory of the host, as `memory_space` returns it."""

_ARRAY = re.compile(r"([a-z]+\d*[a-z0-9]*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_CALLED = re.compile(r"(?:calls|body|condition|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})\}")
_NUMBERED = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_ON_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? ?\{([^}]*)\}"
)


class Operation(NamedTuple):
    """One line of a program's text: `type` has the shapes and layouts of the result, `rest` the attributes."""

    name: str
    opcode: str
    type: str
    operands: tuple[str, ...]
    rest: str

    @property
    def called(self) -> list[str]:
        """The computations that the operation runs or applies."""
        branches = _BRANCHES.search(self.rest)
        return _CALLED.findall(self.rest) + (re.findall(r"[\w.\-]+", branches[1]) if branches else [])

    @property
    def channel(self) -> str | None:
        """The channel of a collective."""
        found = re.search(r"channel_id=(\d+)", self.rest)
        return found and found[1]


def computations(text: str) -> tuple[dict[str, list[Operation]], str]:
    """Return the operations of each computation of a program, in their order, and the name of the first to run."""
    found: dict[str, list[Operation]] = {}
    current: list[Operation] = []
    entry = ""
    for line in text.splitlines():
        if head := _HEAD.match(line):
            current = found.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        elif (parts := _LINE.match(line)) and (operation := _operation(parts[2], parts[3])):
            current.append(operation)
    return found, entry


def _operation(name: str, text: str) -> Operation | None:
    end = _closing(text, 0) + 1 if text.startswith("(") else text.find(" ")
    opcode, bracket, _ = text[end:].lstrip().partition("(")
    if end <= 0 or not bracket or not re.fullmatch(r"[a-z][\w\-]*", opcode):
        return None
    opening = text.index(f"{opcode}(", end) + len(opcode)
    closing = _closing(text, opening)
    inside = text[opening + 1 : closing]
    rest = f"{inside}){text[closing + 1 :]}" if opcode in ("parameter", "constant") else text[closing + 1 :]
    return Operation(name, opcode, text[:end], tuple(re.findall(r"%([\w.\-]+)", inside)), rest)


def _closing(text: str, opening: int) -> int:
    """Return the position of the bracket that closes the one at `opening`."""
    depth = 0
    for found in re.finditer(r"[()]", text[opening:]):
        depth += 1 if found[0] == "(" else -1
        if not depth:
            return opening + found.start()
    return len(text)


def _arrays_in(text: str) -> Iterator[tuple[str, tuple[int, ...], str]]:
    for dtype, dims, layout in _ARRAY.findall(re.sub(r"/\*.*?\*/", "", text)):
        yield dtype, tuple(int(size) for size in re.findall(r"\d+", dims)), layout


def memory_space(text: str) -> str:
    """Return the memory of a type's first array, such as `HOST`; empty for the device's own.

    Example:
      >>> memory_space("f32[4]{0:T(128)S(5)}") == HOST, memory_space("(f32[4]{0}, f32[4]{0:S(5)})")
      (True, '')
    """
    first = _ARRAY.search(text)
    found = re.search(r"S\(\d+\)", first[0]) if first else None
    return found[0] if found else ""


def array_bytes(text: str, *, padded: bool = True) -> tuple[int, ...]:
    """Return the bytes of each array of a type; `padded`: as they lie in memory, in tiles on TPU.

    Example:
      >>> array_bytes("f32[3,5]{1,0:T(8,128)}"), array_bytes("f32[3,5]{1,0:T(8,128)}", padded=False)
      ((4096,), (60,))
      >>> array_bytes("(bf16[4,256]{1,0:T(4,128)(2,1)}, pred[], token[])")
      (2048, 1, 0)
    """
    return tuple(_array_bytes(*array, padded=padded) for array in _arrays_in(text))


def laid_out_bytes(text: str, *, padded: bool = True) -> int:
    """Return the bytes of all arrays of a type."""
    return sum(array_bytes(text, padded=padded))


def _array_bytes(dtype: str, dims: tuple[int, ...], layout: str, *, padded: bool) -> int:
    packed, digits = re.search(r"E\((\d+)\)", layout), re.search(r"\d+", dtype)
    if dtype in ("token", "opaque"):
        return 0
    bits = int(packed[1]) if packed else max(8, int(digits[0])) if digits else 8
    tile = re.search(r"T\((\d+(?:,\d+)*)\)", layout)
    if padded and tile:
        order = [int(number) for number in re.findall(r"\d+", layout.partition(":")[0])]
        sizes, tiles = [dims[d] for d in order], [int(size) for size in reversed(tile[1].split(","))]
        sizes += [1] * (len(tiles) - len(sizes))
        sizes = [-(-size // t) * t for size, t in zip(sizes, tiles, strict=False)] + sizes[len(tiles) :]
        return prod(sizes) * bits // 8
    return -(-prod(dims) * bits // 8)


def first_group(text: str) -> tuple[int, ...]:
    """Return the devices of the first group of a collective, by its attributes; empty if they do not say.

    Example:
      >>> first_group("replica_groups={{0,2},{1,3}}"), first_group("replica_groups=[4,2]<=[4,2]T(1,0)")
      ((0, 2), (0, 2))
      >>> first_group("replica_groups=mesh['a'=2,'b'=2] {'b'}"), first_group("")
      ((0, 1), ())
    """
    if found := _LISTED.search(text):
        groups = [tuple(map(int, re.findall(r"\d+", group))) for group in found[1].split("},{")]
        return next((group for group in groups if len(set(group)) > 1), groups[0])  # a pair may be of one device
    if found := _NUMBERED.search(text):
        return tuple(_numbered(found[2], found[3]).reshape(_sizes(found[1]))[0].tolist())
    if found := _ON_MESH.search(text):
        axes = {name: int(size) for name, size in re.findall(r"'?(\w+)'?=(\d+)", found[1])}
        devices = _numbered(found[2] or str(prod(axes.values())), found[3]).reshape(*axes.values())
        within = re.findall(r"'?(\w+)'?", found[4])
        return tuple(devices[tuple(slice(None) if name in within else 0 for name in axes)].reshape(-1).tolist())
    return ()


def _numbered(sizes: str, order: str | None) -> np.ndarray:
    """Return the numbers of devices from 0 on in an array of these sizes, with its axes in another order."""
    devices = np.arange(prod(_sizes(sizes))).reshape(_sizes(sizes))
    return devices.transpose(_sizes(order)) if order else devices


def _sizes(text: str) -> list[int]:
    return [int(size) for size in text.split(",")]
