"""One file: what is written is read, in parts and by the package `safetensors`; what is damaged is named."""

from __future__ import annotations

import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as safetensors

from jaxpp_flax.checkpoint import CheckpointNotFoundError, CorruptCheckpointError
from jaxpp_flax.pretrained.safetensors_file import DTYPES, Tensor, create_file, read_header

VALUES = {
    "matrix": np.arange(24, dtype=np.float32).reshape(4, 6),
    "cube": np.arange(24, dtype=np.int16).reshape(2, 3, 4),
    "half": np.arange(5).astype(jnp.bfloat16),
    "scalar": np.array(7, np.int64),
    "empty": np.zeros((0, 3), np.float32),
}


def whole(shape: tuple[int, ...]) -> tuple[tuple[slice, ...], ...]:
    return tuple((slice(0, size),) for size in shape)


def write(path: Path) -> dict[str, Tensor]:
    tensors = create_file(path, [(name, value.shape, value.dtype) for name, value in VALUES.items()])
    descriptor = os.open(path, os.O_WRONLY)
    for name, value in VALUES.items():
        tensors[name].write(descriptor, whole(value.shape), value)
    os.close(descriptor)
    return tensors


def test_whole_tensors_and_parts(tmp_path: Path):
    written = write(tmp_path / "x.safetensors")
    read = read_header(tmp_path / "x.safetensors")
    assert read == written
    for name, value in VALUES.items():
        np.testing.assert_array_equal(read[name].read(whole(value.shape)), value)
        assert read[name].numpy_dtype == value.dtype
    part = read["cube"].read(((slice(1, 2),), (slice(0, 1), slice(2, 3)), (slice(1, 3),)))
    np.testing.assert_array_equal(part, VALUES["cube"][1:2, [0, 2], 1:3])


def test_only_the_part_is_read_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tensors = write(tmp_path / "x.safetensors")
    rows, columns = ((slice(1, 3),), (slice(0, 6),)), ((slice(0, 4),), (slice(2, 4),))
    assert list(tensors["matrix"]._extents(rows)) == [(tensors["matrix"].offset + 24, 48)]
    assert [size for _, size in tensors["matrix"]._extents(columns)] == [8] * 4
    descriptor = os.open(tmp_path / "x.safetensors", os.O_WRONLY)
    tensors["matrix"].write(descriptor, columns, np.full((4, 2), -1, np.float32))
    os.close(descriptor)
    expected = VALUES["matrix"].copy()
    expected[:, 2:4] = -1
    np.testing.assert_array_equal(tensors["matrix"].read(whole((4, 6))), expected)
    np.testing.assert_array_equal(tensors["cube"].read(whole((2, 3, 4))), VALUES["cube"])


def test_damage_is_named_before_values_are_read(tmp_path: Path):
    path = tmp_path / "model-00001-of-00002.safetensors"
    write(path)
    content = path.read_bytes()
    for kept, message in (
        (content[:-1], rf"the shard {path} cannot be read: it was cut off: it has {len(content) - 1} of"),
        (content[:100], "it is cut off, or no safetensors file: its first 8 bytes"),
        (content[:5], "it was cut off: it has 5 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "pointer of Git LFS.*git lfs pull"),
        (b"\x02" + bytes(7) + b"{]", "its header is no JSON"),
        (b"\x0c" + bytes(7) + b'{"a":{"b":1}', "its header is no JSON|wrong entry"),
        (content.replace(b'"shape":[4,6]', b'"shape":[5,6]'), r"its header gives matrix 96 bytes.*\(5, 6\)"),
    ):
        path.write_bytes(kept)
        with pytest.raises(CorruptCheckpointError, match=message):
            read_header(path)
    with pytest.raises(CheckpointNotFoundError, match=r"there is no file .*/gone.safetensors. Copy the missing shard"):
        read_header(tmp_path / "gone.safetensors")


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path):
    tensors = write(tmp_path / "x.safetensors")
    os.truncate(tmp_path / "x.safetensors", tensors["matrix"].offset + 10)
    with pytest.raises(CorruptCheckpointError, match="ended while matrix was read"):
        tensors["matrix"].read(whole((4, 6)))


def test_the_package_reads_our_files_and_we_read_its(tmp_path: Path):
    write(tmp_path / "ours.safetensors")
    for name, value in safetensors.load_file(tmp_path / "ours.safetensors").items():
        np.testing.assert_array_equal(value, VALUES[name])
        assert value.dtype == VALUES[name].dtype
    kinds = {name: np.ones(3).astype(dtype) for name, dtype in DTYPES.items() if not name.startswith(("F8", "C64"))}
    safetensors.save_file(VALUES | kinds, tmp_path / "theirs.safetensors")
    read = read_header(tmp_path / "theirs.safetensors")
    for name, value in (VALUES | kinds).items():
        np.testing.assert_array_equal(read[name].read(whole(value.shape)), value)
