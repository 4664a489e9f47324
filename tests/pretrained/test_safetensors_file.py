"""One file: what is written is read, in parts and by the package `safetensors`; what is damaged is named."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as safetensors

from jaxpp_flax.checkpoint import CheckpointNotFoundError, CorruptCheckpointError
from jaxpp_flax.pretrained.safetensors_file import DTYPES, create_file, lay_out, read_header, write_part

VALUES = {
    "matrix": np.arange(24, dtype=np.float32).reshape(4, 6),
    "cube": np.arange(24, dtype=np.int16).reshape(2, 3, 4),
    "half": np.arange(5).astype(jnp.bfloat16),
    "scalar": np.array(7, np.int64),
    "empty": np.zeros((0, 3), np.float32),
}


def whole(shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in shape)


def write(path: Path, values: dict[str, Any] = VALUES) -> dict[str, int]:
    """Write a file, and return the places of its tensors."""
    types = [(name, value.shape, value.dtype) for name, value in values.items()]
    create_file(path, types)
    _, places, _ = lay_out(types)
    descriptor = os.open(path, os.O_WRONLY)
    for name, value in values.items():
        write_part(descriptor, places[name], value.shape, whole(value.shape), value)
    os.close(descriptor)
    return places


def test_whole_tensors_and_parts(tmp_path: Path):
    write(tmp_path / "x.safetensors")
    read = read_header(tmp_path / "x.safetensors")
    for name, value in VALUES.items():
        np.testing.assert_array_equal(read[name].read(whole(value.shape)), value)
        assert read[name].dtype == value.dtype
        assert read[name].shape == value.shape
    part = read["cube"].read((slice(1, 2), slice(0, 2), slice(1, 3)))
    np.testing.assert_array_equal(part, VALUES["cube"][1:2, 0:2, 1:3])
    assert read["empty"].read((slice(0, 0), slice(1, 3))).shape == (0, 2)


def test_only_the_part_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    places = write(tmp_path / "x.safetensors")
    descriptor, sizes, pwrite = os.open(tmp_path / "x.safetensors", os.O_WRONLY), list[int](), os.pwrite

    def noted(descriptor: int, memory: Any, place: int) -> int:
        sizes.append(len(memory))
        return pwrite(descriptor, memory[:20], place)  # a disk may take less than it is given

    monkeypatch.setattr(os, "pwrite", noted)
    write_part(descriptor, places["matrix"], (4, 6), (slice(0, 4), slice(2, 4)), np.full((4, 2), -1, np.float32))
    assert sizes == [8] * 4
    write_part(descriptor, places["cube"], (2, 3, 4), (slice(1, 2), slice(1, 3), slice(0, 4)), np.full((1, 2, 4), -1, np.int16))  # fmt: skip # noqa: E501
    assert sizes == [8] * 4 + [16]
    write_part(descriptor, places["matrix"], (4, 6), (slice(0, 1), slice(0, 6)), np.full((1, 6), -2, np.float32))
    os.close(descriptor)
    expected = {name: value.copy() for name, value in VALUES.items()}
    expected["matrix"][:, 2:4], expected["cube"][1, 1:], expected["matrix"][0] = -1, -1, -2
    for name, tensor in read_header(tmp_path / "x.safetensors").items():
        np.testing.assert_array_equal(tensor.read(whole(tensor.shape)), expected[name])


def test_every_dtype_keeps_every_bit(tmp_path: Path):
    """All 256 values of a byte in each dtype, NaNs and subnormal numbers too."""
    rng, values = np.random.default_rng(0), dict[str, np.ndarray]()
    for name, dtype in DTYPES.items():
        bits = np.concatenate([np.arange(256), rng.integers(0, 256, 4096 - 256)]).astype(np.uint8)
        values[name] = (bits % 2 if name == "BOOL" else bits).view(dtype).reshape(64, -1)
    write(tmp_path / "x.safetensors", values)
    for name, tensor in read_header(tmp_path / "x.safetensors").items():
        columns = slice(1, values[name].shape[1] - 1)
        part = np.ascontiguousarray(tensor.read((slice(3, 60), columns)))
        assert part.dtype == tensor.dtype == np.dtype(DTYPES[name])
        assert part.tobytes() == np.ascontiguousarray(values[name][3:60, columns]).tobytes(), name


def test_damage_is_named_before_values_are_read(tmp_path: Path):
    path = tmp_path / "model-00001-of-00002.safetensors"
    write(path)
    content = path.read_bytes()
    for kept, message in (
        (content[:-1], rf"the shard {path} cannot be read: it was cut off, or is no safetensors file \(.*not fully"),
        (content[:100], "it was cut off, or is no safetensors file"),
        (content[:5], r"it was cut off, or is no safetensors file \(.*too small"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "pointer of Git LFS.*git lfs pull"),
        (b"\x02" + bytes(7) + b"{]", "it was cut off, or is no safetensors file"),
        (content.replace(b'"shape":[4,6]', b'"shape":[5,6]'), "it was cut off, or is no safetensors file"),
    ):
        path.write_bytes(kept)
        with pytest.raises(CorruptCheckpointError, match=message):
            read_header(path)
    with pytest.raises(CheckpointNotFoundError, match=r"there is no file .*/gone.safetensors. Copy the missing shard"):
        read_header(tmp_path / "gone.safetensors")


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write(tmp_path / "x.safetensors")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs the package 'safetensors'.*jaxpp-flax\[huggingface\]"):
        read_header(tmp_path / "x.safetensors")


def test_the_package_reads_our_files_and_we_read_its(tmp_path: Path):
    write(tmp_path / "ours.safetensors")
    for name, value in safetensors.load_file(tmp_path / "ours.safetensors").items():
        np.testing.assert_array_equal(value, VALUES[name])
        assert value.dtype == VALUES[name].dtype
    kinds = {name: np.ones(3).astype(dtype) for name, dtype in DTYPES.items() if name != "C64"}
    safetensors.save_file(VALUES | kinds, tmp_path / "theirs.safetensors")
    read = read_header(tmp_path / "theirs.safetensors")
    for name, value in (VALUES | kinds).items():
        np.testing.assert_array_equal(read[name].read(whole(value.shape)), value)
