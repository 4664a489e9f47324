"""One safetensors file: its header, and reading or writing a part of a tensor without holding more than that part.

The format: 8 bytes with the length of the header, the header in JSON, then the tensors in C order. The package
`safetensors` writes a file from arrays that are all in memory; here each part goes to its place by itself, from any
process.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxpp_flax.checkpoint.errors import CheckpointNotFoundError, CorruptCheckpointError
from jaxpp_flax.pretrained.slices import Runs

DTYPES: Mapping[str, Any] = {
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "U16": np.uint16, "I16": np.int16, "U32": np.uint32,
    "I32": np.int32, "U64": np.uint64, "I64": np.int64, "F16": np.float16, "BF16": jnp.bfloat16, "F32": np.float32,
    "F64": np.float64, "C64": np.complex64, "F8_E4M3": jnp.float8_e4m3fn, "F8_E5M2": jnp.float8_e5m2,
}  # fmt: skip
"""The format's names of dtypes."""
_NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
_LONGEST_HEADER = 100_000_000  # the limit of the package `safetensors`


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A tensor in a file. `dtype` is the format's name for it; `offset` counts the bytes from the file's beginning."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path
    offset: int

    @property
    def numpy_dtype(self) -> np.dtype[Any] | None:
        """The dtype of NumPy; None for a dtype that JAX does not have."""
        return np.dtype(DTYPES[self.dtype]) if self.dtype in DTYPES else None

    def read(self, runs: Runs) -> np.ndarray:
        """Read some positions of each dimension, and nothing else.

        Raises:
          CorruptCheckpointError: if the file ends before.
        """
        part = np.empty([sum(run.stop - run.start for run in of) for of in runs], self.numpy_dtype)
        memory = part.reshape(-1).view(np.uint8).data
        place = 0
        with self.file.open("rb", buffering=0) as file:
            for offset, size in self._extents(runs):
                file.seek(offset)
                _read_into(file, memory[place : place + size], self)
                place += size
        return part

    def write(self, descriptor: int, runs: Runs, part: np.ndarray) -> None:
        """Write some positions of each dimension into an open file; other positions are not touched."""
        memory = np.ascontiguousarray(part).reshape(-1).view(np.uint8).data
        place = 0
        for offset, size in self._extents(runs):
            done = 0
            while done < size:
                done += os.pwrite(descriptor, memory[place + done : place + size], offset + done)
            place += size

    def _extents(self, runs: Runs) -> Iterator[tuple[int, int]]:
        """Yield offset and length of the extents of the file that hold these positions, in C order."""
        itemsize = np.dtype(DTYPES[self.dtype]).itemsize
        if not runs:
            yield self.offset, itemsize
            return
        # The dimensions after `last` are whole: the runs of `last` are extents.
        last = len(runs) - 1
        while last and runs[last] == (slice(0, self.shape[last]),):
            last -= 1
        strides = [math.prod(self.shape[dim + 1 :]) * itemsize for dim in range(len(self.shape))]
        outer = [[p for run in of for p in range(run.start, run.stop)] for of in runs[:last]]
        for positions in itertools.product(*outer):
            begin = self.offset + sum(p * stride for p, stride in zip(positions, strides, strict=False))
            for run in runs[last]:
                yield begin + run.start * strides[last], (run.stop - run.start) * strides[last]


def _read_into(file: Any, memory: memoryview, tensor: Tensor) -> None:
    done = 0
    while done < len(memory):
        count = file.readinto(memory[done:])
        if not count:
            raise CorruptCheckpointError(
                f"the shard {tensor.file} ended while {tensor.name} was read: it was cut off or is being written. Copy "
                "it again."
            )
        done += count


def read_header(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a file, by name, without their values.

    Raises:
      CheckpointNotFoundError: if there is no such file.
      CorruptCheckpointError: if it is no safetensors file, or was cut off.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            begin = file.read(8)
            length = int.from_bytes(begin, "little")
            if len(begin) < 8 or length > min(_LONGEST_HEADER, max(size - 8, 0)):
                raise _damaged(path, _cause(begin, size))
            header = json.loads(file.read(length))
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"there is no file {path}. Copy the missing shard, or check the path.") from error
    except ValueError as error:
        raise _damaged(path, f"its header is no JSON ({error})") from error
    tensors: dict[str, Tensor] = {}
    end = 8 + length
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            first, last = (8 + length + int(offset) for offset in entry["data_offsets"])
            shape = tuple(int(dim) for dim in entry["shape"])
            tensors[name] = Tensor(name=name, shape=shape, dtype=str(entry["dtype"]), file=path, offset=first)
        except (KeyError, TypeError, ValueError) as error:
            raise _damaged(path, f"its header has a wrong entry for {name}: {entry}") from error
        dtype = tensors[name].numpy_dtype
        if dtype is not None and last - first != math.prod(shape) * dtype.itemsize:
            raise _damaged(path, f"its header gives {name} {last - first} bytes, which is not its shape {shape}")
        end = max(end, last)
    if end > size:
        raise _damaged(path, f"it was cut off: it has {size} of {end} bytes")
    return tensors


def _cause(begin: bytes, size: int) -> str:
    if begin.startswith(b"version "):
        return "it is a pointer of Git LFS, and the file itself was not fetched (`git lfs pull`)"
    if size < 8:
        return f"it was cut off: it has {size} bytes"
    return "it is cut off, or no safetensors file: its first 8 bytes are not the length of a header"


def _damaged(path: Path, cause: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"the shard {path} cannot be read: {cause}. Copy or download that file again.")


def dtype_name(dtype: Any) -> str | None:
    """Return the format's name for a dtype, or None.

    Example:
      >>> dtype_name(jnp.bfloat16), dtype_name(np.complex128)
      ('BF16', None)
    """
    return _NAMES.get(np.dtype(dtype))


def create_file(path: Path, tensors: Sequence[tuple[str, tuple[int, ...], Any]]) -> dict[str, Tensor]:
    """Create a file of its final length, with its header and without values; return the tensors to write.

    Args:
      path: of the new file.
      tensors: the name, shape and dtype of each.
    """
    with path.open("xb") as file:
        laid_out, header = lay_out(path, tensors)
        file.write(header)
        file.truncate(len(header) + sum(math.prod(shape) * np.dtype(dtype).itemsize for _, shape, dtype in tensors))
    return laid_out


def lay_out(path: Path, tensors: Sequence[tuple[str, tuple[int, ...], Any]]) -> tuple[dict[str, Tensor], bytes]:
    """Return where each tensor of a file lies, and the file's beginning.

    Example:
      >>> tensors, header = lay_out(Path("x"), [("a", (2,), np.float32), ("b", (3,), np.int8)])
      >>> tensors["b"].offset - tensors["a"].offset, len(header) % 8
      (8, 0)
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers reads no other format
    end = 0
    for name, shape, dtype in tensors:
        begin, end = end, end + math.prod(shape) * np.dtype(dtype).itemsize
        entries[name] = {"dtype": _NAMES[np.dtype(dtype)], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return {
        name: Tensor(
            name=name,
            shape=tuple(shape),
            dtype=entries[name]["dtype"],
            file=path,
            offset=len(header) + entries[name]["data_offsets"][0],
        )
        for name, shape, _ in tensors
    }, header
