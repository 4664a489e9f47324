"""One safetensors file: its tensors, read in parts by the package `safetensors`, and a file that is written in parts.

The package writes a file from arrays that are all in memory; here each part goes to its place by itself, from any
process. The format: 8 bytes with the length of the header, the header in JSON, then the tensors in C order.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxpp_flax.checkpoint.errors import CheckpointNotFoundError, CorruptCheckpointError
from jaxpp_flax.pretrained.slices import Index, StoredTensor

DTYPES: Mapping[str, Any] = {
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "U16": np.uint16, "I16": np.int16, "U32": np.uint32,
    "I32": np.int32, "U64": np.uint64, "I64": np.int64, "F16": np.float16, "BF16": jnp.bfloat16, "F32": np.float32,
    "F64": np.float64, "C64": np.complex64,
}  # fmt: skip
"""The format's names of the dtypes that the package `safetensors` reads into NumPy arrays."""
_NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file, by name, without their values.

    Raises:
      ModuleNotFoundError: if the package `safetensors` is not installed.
      CheckpointNotFoundError: if there is no such file.
      CorruptCheckpointError: if it is no safetensors file, or was cut off.
    """
    with _open(path) as file:
        found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (it is no dictionary)
        types = {name: (tuple(of.get_shape()), str(of.get_dtype())) for name, of in found.items()}
    return {
        name: StoredTensor(
            name=name,
            shape=shape,
            dtype=np.dtype(DTYPES[dtype]) if dtype in DTYPES else None,
            file=path,
            read_values=partial(_read, path, name),
        )
        for name, (shape, dtype) in types.items()
    }


def _open(path: Path) -> Any:
    try:
        import safetensors
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"reading {path} needs the package 'safetensors', which is not installed: "
            "`pip install 'jaxpp-flax[huggingface]'`."
        ) from error
    try:
        return safetensors.safe_open(path, framework="numpy")
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"there is no file {path}. Copy the missing shard, or check the path.") from error
    except safetensors.SafetensorError as error:
        with path.open("rb") as file:
            is_pointer = file.read(8) == b"version "
        cause = "it was cut off, or is no safetensors file"
        if is_pointer:
            cause = "it is a pointer of Git LFS, and the file itself was not fetched (`git lfs pull`)"
        raise CorruptCheckpointError(
            f"the shard {path} cannot be read: {cause} ({error}). Copy or download that file again."
        ) from error


def _read(path: Path, name: str, index: Index) -> np.ndarray:
    # The file is opened for each part: its pages count as memory of this process while it is open.
    with _open(path) as file:
        return file.get_slice(name)[index]


def dtype_name(dtype: Any) -> str | None:
    """Return the format's name for a dtype, or None.

    Example:
      >>> dtype_name(jnp.bfloat16), dtype_name(np.complex128)
      ('BF16', None)
    """
    return None if dtype is None else _NAMES.get(np.dtype(dtype))  # None is float64 for NumPy


def lay_out(tensors: Sequence[tuple[str, tuple[int, ...], Any]]) -> tuple[bytes, dict[str, int], int]:
    """Return the beginning of a file with tensors of this name, shape and dtype; the place of each; and its length.

    Example:
      >>> header, offsets, length = lay_out([("a", (2,), np.float32), ("b", (3,), np.int8)])
      >>> offsets["b"] - offsets["a"], len(header) % 8, length - len(header)
      (8, 0, 11)
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers reads no other format
    begins, end = dict[str, int](), 0
    for name, shape, dtype in tensors:
        begins[name], end = end, end + math.prod(shape) * np.dtype(dtype).itemsize
        entries[name] = {"dtype": dtype_name(dtype), "shape": list(shape), "data_offsets": [begins[name], end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + begin for name, begin in begins.items()}, len(header) + end


def create_file(path: Path, tensors: Sequence[tuple[str, tuple[int, ...], Any]]) -> None:
    """Create a file of its final length, with its header and without values."""
    header, _, length = lay_out(tensors)
    with path.open("xb") as file:
        file.write(header)
        file.truncate(length)


def write_part(descriptor: int, offset: int, shape: Sequence[int], index: Index, part: np.ndarray) -> None:
    """Write `tensor[index]` of a tensor of this shape into an open file; other positions are not touched.

    Other processes write other parts of one file at the same time, also over a network: not by mapped memory, which is
    written in whole pages.
    """
    memory, itemsize = np.ascontiguousarray(part).reshape(-1).view(np.uint8).data, part.dtype.itemsize
    shape, index = (1, *shape), (slice(0, 1), *index)
    # The dimensions after `last` are whole: a run of `last` lies in one piece.
    last = len(shape) - 1
    while last and (index[last].start, index[last].stop) == (0, shape[last]):
        last -= 1
    stride = math.prod(shape[last + 1 :]) * itemsize
    done, size = 0, (index[last].stop - index[last].start) * stride
    for positions in itertools.product(*(range(of.start, of.stop) for of in index[:last])):
        row = 0
        for position, count in zip(positions, shape, strict=False):
            row = row * count + position
        end, place = done + size, offset + (row * shape[last] + index[last].start) * stride
        while done < end:
            written = os.pwrite(descriptor, memory[done:end], place)
            done, place = done + written, place + written
