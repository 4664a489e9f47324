"""Write weights as sharded safetensors with an index: each process writes its own parts, one after another."""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxpp_flax.checkpoint.errors import CheckpointMismatchError, CheckpointSaveError
from jaxpp_flax.checkpoint.format.leaves import is_key
from jaxpp_flax.checkpoint.format.locations import location, need_disk
from jaxpp_flax.checkpoint.format.paths import PathFilter, choose, flatten
from jaxpp_flax.counts import check_count
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.pretrained.name_map import IDENTITY, Fill, NameMap
from jaxpp_flax.pretrained.safetensors_file import create_file, dtype_name, lay_out, write_part
from jaxpp_flax.pretrained.slices import Index, StoredTensor, full_index, tensor_parts, to_tensor
from jaxpp_flax.pretrained.sources import INDEX, open_source
from jaxpp_flax.processes.comparison import do_in_process_0, exchange_values
from jaxpp_flax.processes.group import process_group

SHARD_BYTES = 5 * 10**9
"""The size of a shard, as Hugging Face writes them."""


def export_pretrained(
    tree: Any,
    directory: str | os.PathLike[str],
    *,
    map: NameMap = IDENTITY,
    only: PathFilter | None = None,
    config: Mapping[str, Any] | None = None,
    max_shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write weights to a new directory as Hugging Face does: safetensors, with an index if there are several files.

    Each process writes the slices that it holds directly to their place in the files: the host holds one slice at a
    time. With several processes, all of them make this call, with a directory that they share. The directory appears
    when it is complete.

    Args:
      tree: a pytree of arrays, such as `trainer.state.params`; or of `exporting.LeafToWrite`s, whose parts are computed
        one at a time; or the path of weights on disk (an Orbax checkpoint, or safetensors), whose leaves are read one
        at a time.
      directory: the directory to write, on a disk; it must not exist.
      map: the names and arrangement of tensors in the files, as in `load_pretrained`.
      only: the leaves to write: globs, or a function of the path; None writes all leaves.
      config: the content of the file `config.json`, which `transformers` needs to make the model.
      max_shard_bytes: the largest size of a file in bytes; a larger tensor gets a file of its own.

    Returns:
      The absolute path of the directory.

    Raises:
      CheckpointMismatchError: if leaves do not fit the map; the message lists them.
      CheckpointSaveError: if the directory exists, or cannot be written. No error, not even a Ctrl-C, leaves files.
      ValueError: if the directory is in a bucket, or `max_shard_bytes` is no whole number of at least 1.

    Example:
      >>> import tempfile, jax.numpy as jnp
      >>> path = export_pretrained({"a": jnp.ones((4, 8)), "b": jnp.ones(2)}, tempfile.mkdtemp() + "/x",
      ...                          max_shard_bytes=128)
      >>> sorted(file.name for file in path.iterdir())
      ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors', 'model.safetensors.index.json']
    """
    max_shard_bytes = check_count("max_shard_bytes", max_shard_bytes)
    target = need_disk(location(directory))
    leaves = _leaves_to_write(tree)
    wanted = choose(only)
    leaves = {path: leaf for path, leaf in leaves.items() if wanted(path)}
    if not leaves:
        raise CheckpointMismatchError(f"cannot export to {target}.", [f"no leaf of the tree matches only={only!r}"])
    plan = ExportPlan.of(leaves, map, target, max_shard_bytes)
    group = process_group()
    # Two exports to one place must not meet in one directory: the second one to end finds that the place is taken.
    number = exchange_values(group, "the name of an export", secrets.token_hex(4))[0]
    unfinished = target.with_name(f".{target.name}.unfinished-{number}")
    try:
        do_in_process_0(
            group, "the files of an export", lambda: plan.create(unfinished, config), CheckpointSaveError, OSError
        )
        failure = _attempt(lambda: plan.write(unfinished, leaves))
        failures = exchange_values(group, "the parts of an export", failure)
        if text := next(filter(None, failures), None):
            raise CheckpointSaveError(f"exporting to {target} failed: {text}")
        do_in_process_0(group, "the end of an export", lambda: unfinished.rename(target), OSError)
    except BaseException as error:  # also a Ctrl-C, or a config that JSON cannot write
        if group.process_index == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
        if isinstance(error, CheckpointSaveError) or not isinstance(error, OSError):
            raise
        raise CheckpointSaveError(f"exporting to {target} failed: {type(error).__name__}: {error}") from error
    return target


@dataclass(frozen=True)
class LeafToWrite:
    """A leaf to write: its type, and its parts in this process, each read when it is its turn."""

    shape: tuple[int, ...]
    dtype: Any
    parts: Callable[[], Iterator[tuple[Index, np.ndarray]]]


@dataclass(frozen=True)
class ExportPlan:
    """Which leaf becomes which tensors, and the tensors of each file."""

    target: Path
    fills: tuple[Fill, ...]
    files: Mapping[str, Sequence[tuple[str, tuple[int, ...], Any]]]  # name, shape and dtype of each tensor, by file

    @classmethod
    def of(cls, leaves: Mapping[str, LeafToWrite], map: NameMap, target: Path, max_shard_bytes: int) -> ExportPlan:
        """Check the leaves, and divide their tensors among files, in order."""
        fills, faults = map.resolve({path: leaf.shape for path, leaf in leaves.items()})
        faults += [
            f"{path}: its dtype, {leaf.dtype}, cannot be written to safetensors. Leave it out by only="
            for path, leaf in leaves.items()
            if is_key(leaf) or dtype_name(leaf.dtype) is None
        ]
        if faults:
            raise CheckpointMismatchError(f"cannot export to {target}: the map does not fit the leaves.", faults)
        shards: list[list[tuple[str, tuple[int, ...], Any]]] = []
        room = 0
        for fill in fills:
            leaf = leaves[fill.leaf]
            shape = fill.rule.tensor_shape(leaf.shape)
            size = math.prod(shape) * np.dtype(leaf.dtype).itemsize
            for name in fill.tensors:
                if size > room or not shards:
                    shards.append([])
                    room = max_shard_bytes
                shards[-1].append((name, shape, np.dtype(leaf.dtype)))
                room -= size
        count = len(shards)
        names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        # The largest numbers first: then every tensor is aligned.
        files = [sorted(shard, key=lambda of: -of[2].itemsize) for shard in shards]
        return cls(target, tuple(fills), dict(zip(["model.safetensors"] if count == 1 else names, files, strict=True)))

    def create(self, directory: Path, config: Mapping[str, Any] | None) -> None:
        """Make the directory with files of their final length, without values, and the index."""
        if self.target.exists():
            raise CheckpointSaveError(
                f"cannot export to {self.target}: it exists, and is left as it is. Choose another path."
            )
        directory.mkdir(parents=True)
        for file, tensors in self.files.items():
            create_file(directory / file, tensors)
        if config is not None:
            (directory / "config.json").write_text(json.dumps(dict(config), indent=2), encoding="utf-8")
        if len(self.files) > 1:
            sizes = [math.prod(shape) * dtype.itemsize for of in self.files.values() for _, shape, dtype in of]
            named = {name: file for file, of in self.files.items() for name, _, _ in of}
            index = {"metadata": {"total_size": sum(sizes)}, "weight_map": dict(sorted(named.items()))}
            (directory / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")

    def write(self, directory: Path, leaves: Mapping[str, LeafToWrite]) -> None:
        """Write this process's parts."""
        places = {name: (file, at) for file, of in self.files.items() for name, at in lay_out(of)[1].items()}
        descriptors = {file: os.open(directory / file, os.O_WRONLY) for file in self.files}
        try:
            for fill in self.fills:
                leaf = leaves[fill.leaf]
                shape = fill.rule.before_transpose(leaf.shape)
                for index, values in leaf.parts():
                    for part in tensor_parts(fill.rule, leaf.shape, index):
                        file, at = places[fill.tensors[part.number]]
                        write_part(descriptors[file], at, shape, part.index, to_tensor(fill.rule, part, values))
            for descriptor in descriptors.values():
                os.fsync(descriptor)
        finally:
            for descriptor in descriptors.values():
                os.close(descriptor)


def _attempt(work: Callable[[], None]) -> str | None:
    """Do this process's part of the work; return the text of an error, which all processes raise."""
    try:
        work()
    except Exception as error:
        return f"in process {process_group().process_index}: {type(error).__name__}: {error}"
    return None


def _leaves_to_write(tree: Any) -> dict[str, LeafToWrite]:
    if isinstance(tree, (str, os.PathLike)):
        source = open_source(tree)
        names = {name: of for name, of in source.tensors.items() if name not in source.optional}
        return {name.replace(".", "/"): _stored_leaf(of) for name, of in names.items()}
    return {
        path: leaf if isinstance(leaf, LeafToWrite) else _array_leaf(leaf) for path, leaf in flatten(tree)[0].items()
    }


def _stored_leaf(tensor: StoredTensor) -> LeafToWrite:
    def parts() -> Iterator[tuple[Index, np.ndarray]]:
        if process_group().process_index == 0:
            whole = full_index((slice(None),) * len(tensor.shape), tensor.shape)
            yield whole, tensor.read(whole)

    return LeafToWrite(tensor.shape, tensor.dtype, parts)


def _array_leaf(leaf: Any) -> LeafToWrite:
    shape, dtype = tuple(np.shape(leaf)), leaf.dtype if hasattr(leaf, "dtype") else np.result_type(leaf)
    return LeafToWrite(shape, dtype, lambda: ((index, np.asarray(part)) for index, part in written_parts(leaf)))


def written_parts(leaf: Any) -> Iterator[tuple[Index, Any]]:
    """Yield the parts of a leaf that this process writes: a NumPy array, or an array on one device, each.

    All processes together write every value once.
    """
    shape, array = np.shape(leaf), leaf
    if isinstance(leaf, MpmdArray):
        # Every rank has all of the leaf; the first one writes it, each of its processes what it holds.
        array = leaf._partially_addressable_arrays.get(leaf.sharding.ranks[0])
        if array is None:
            return
    elif (not isinstance(leaf, jax.Array) or leaf.is_fully_addressable) and process_group().process_index:
        return  # every process has this value, and process 0 writes it
    if not isinstance(array, jax.Array):
        yield full_index((slice(None),) * len(shape), shape), np.asarray(array)
        return
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            # NumPy values are cached in the array that they come from: in this new one, which ends here.
            own = SingleDeviceSharding(shard.device, memory_kind=shard.data.sharding.memory_kind)
            view = jax.make_array_from_single_device_arrays(shard.data.shape, own, [shard.data])
            yield full_index(shard.index, shape), view
