"""Load weights: compare every leaf with the files, then read each process's parts onto their devices."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp_flax.checkpoint.errors import CheckpointMismatchError
from jaxpp_flax.checkpoint.format.leaves import WantedLeaf, is_key
from jaxpp_flax.checkpoint.format.paths import PathFilter, choose, flatten
from jaxpp_flax.engine.arrays.placing import place_parts
from jaxpp_flax.pretrained.faults import grouped, keep_remedy
from jaxpp_flax.pretrained.name_map import IDENTITY, NO_RULE, Fill, NameMap
from jaxpp_flax.pretrained.slices import StoredTensor, full_index, read_part, tensor_parts
from jaxpp_flax.pretrained.sources import WeightSource, open_source
from jaxpp_flax.processes.comparison import compare_lines
from jaxpp_flax.processes.group import process_group

_SIZES = "Make the model with the sizes of the files, change its rule, or name it in keep="


def load_pretrained(
    source: str | os.PathLike[str],
    target: Any,
    *,
    map: NameMap = IDENTITY,
    cast: bool = False,
    untie: bool = False,
    keep: PathFilter = (),
) -> Any:
    """Read weights into a new tree like `target`; each process reads only the parts that its devices hold.

    Everything is checked before a value is read. Then the leaves are read one after another, in slices: the host holds
    one slice at a time. With several processes, all of them make this call.

    Args:
      source: a safetensors file, an index of shards, a directory with either (as Hugging Face writes it), an Orbax
        checkpoint, or "organization/name" of the Hugging Face Hub.
      target: a tree of arrays or `jax.ShapeDtypeStruct`s, such as `nnx.state(model, nnx.Param)`. It gives the shapes,
        dtypes and shardings; a leaf without a sharding goes to the default device, and a NumPy array becomes a NumPy
        array. `target` does not change.
      map: which tensor fills which leaf; by default, each leaf has a tensor of the same name, with "." for "/".
      cast: True converts floating-point values to the target's dtype, such as a bfloat16 file to float32 parameters.
      untie: True fills a leaf that the files tie to another tensor with a copy of that tensor.
      keep: globs of leaves that keep the target's value, such as adapters, or a function of the path.

    Raises:
      CheckpointMismatchError: if leaves do not fit, or tensors remain that no leaf takes; the message lists them.
      CheckpointNotFoundError, CorruptCheckpointError: if a file is missing, cut off, or holds no weights.
      ModuleNotFoundError: for safetensors without the extra `huggingface`.
      ValueError: for safetensors in a bucket.

    Example:
      >>> import tempfile
      >>> from jaxpp_flax.pretrained import Rule, export_pretrained
      >>> names = NameMap((Rule("dense/kernel", "fc.weight", transpose=(1, 0)),))
      >>> path = export_pretrained({"dense": {"kernel": np.eye(2, 3)}}, tempfile.mkdtemp() + "/model", map=names)
      >>> load_pretrained(path, {"dense": {"kernel": np.zeros((2, 3))}}, map=names)
      {'dense': {'kernel': array([[1., 0., 0.],
             [0., 1., 0.]])}}
      >>> load_pretrained(path, {"dense": {"kernel": np.zeros((2, 4)), "bias": np.zeros(3)}}, map=names)
      Traceback (most recent call last):
          ...
      jaxpp_flax.checkpoint.errors.CheckpointMismatchError: the weights ... do not fit the model. 2 leaves are wrong:
        dense/bias: no rule of the map fills it. Add a Rule for it, or name it in keep=
        dense/kernel: fc.weight in model.safetensors has shape (3, 2), wanted (4, 2)...
    """
    plan = plan_load(source, target, map=map, cast=cast, untie=untie, keep=keep)
    leaves, structure = flatten(target)
    leaves |= dict(plan.arrays())
    return jax.tree.unflatten(structure, leaves.values())


@dataclass(frozen=True)
class FilledLeaf:
    """A leaf that fits, with its tensors."""

    fill: Fill
    tensors: tuple[StoredTensor, ...]
    shape: tuple[int, ...]
    dtype: Any

    def read(self, index: Sequence[slice]) -> np.ndarray:
        """Read `leaf[index]`."""
        rule = self.fill.rule
        parts = tensor_parts(rule, self.shape, index)
        read = ((part, read_part(rule, self.shape, part, self.tensors[part.number])) for part in parts)
        if rule.stack is None:
            return next(read)[1].astype(self.dtype, copy=False)
        whole = np.empty([of.stop - of.start for of in full_index(index, self.shape)], self.dtype)
        for part, values in read:
            whole[part.place] = values
        return whole


@dataclass(frozen=True)
class LoadPlan:
    """Checked weights, before the values are read: every leaf fits, and every file is whole."""

    source: WeightSource
    filled: Mapping[str, FilledLeaf]
    shardings: Mapping[str, Any]  # of the target; None for a NumPy array

    def arrays(self, shardings: Mapping[str, Any] | None = None) -> Iterator[tuple[str, Any]]:
        """Read one leaf after another: the path and the array. `shardings` may name some leaves, and other places."""
        for path, sharding in (self.shardings if shardings is None else shardings).items():
            yield path, _place(self.filled[path], sharding)


def plan_load(
    source: str | os.PathLike[str],
    target: Any,
    *,
    map: NameMap,
    cast: bool = False,
    untie: bool = False,
    keep: PathFilter = (),
) -> LoadPlan:
    """Do all checks of `load_pretrained`, without reading the values."""
    opened = open_source(source)
    kept = choose(keep)
    leaves = {path: leaf for path, leaf in flatten(target)[0].items() if not kept(path)}
    fills, faults = map.resolve({path: np.shape(leaf) for path, leaf in leaves.items()})
    filled: dict[str, FilledLeaf] = {}
    for fill in fills:
        leaf = leaves[fill.leaf]
        tensors, wrong = _find(fill, opened, map, untie)
        wrong = wrong or _differences(fill, tensors, leaf, cast)
        faults += [f"{fill.leaf}: {text}" for text in wrong]
        filled[fill.leaf] = FilledLeaf(fill, tuple(tensors), tuple(np.shape(leaf)), leaf.dtype)
    taken = {tensor.name for leaf in filled.values() for tensor in leaf.tensors}
    missing = {name for fill in fills for name in fill.tensors}
    lacking = [path for path in leaves if f"{path}: {NO_RULE}" in faults or _lacks(filled.get(path))]
    faults += [
        f"{name}: in {tensor.file.name}, and no leaf takes it.{_why_extra(name, missing, map)}"
        for name, tensor in opened.tensors.items()
        if name not in taken | opened.optional and not map.is_ignored(name) and not map.is_ignored(map.prefix + name)
    ]
    if not leaves:
        faults.append("the target has no leaves to fill. Give it arrays or shapes that keep= does not name")
    if faults:
        raise _mismatch(opened, faults, lacking, keep_remedy(lacking, [*leaves.keys() - {*lacking}], keep))
    if process_group().process_count > 1:
        compare_lines(process_group(), "the weights to load", [*opened.describe(), *str(map).splitlines()], None)
    shardings = {path: WantedLeaf.of(leaves[path]).sharding for path in filled}
    return LoadPlan(opened, filled, shardings)


def _lacks(leaf: FilledLeaf | None) -> bool:
    """Return whether the files have nothing for a leaf."""
    return leaf is not None and not leaf.tensors


def _find(fill: Fill, source: WeightSource, map: NameMap, untie: bool) -> tuple[list[StoredTensor], list[str]]:
    tensors, wrong = [], []
    for name in fill.tensors:
        tensor = source.find(name, map.prefix)
        tied = map.ties.get(name)
        other = None if tensor is not None or tied is None else source.find(tied, map.prefix)
        if other is not None and not untie:
            wrong.append(
                f"the files have no {name}, because it is tied to {tied}. Make the model with tied embeddings, or "
                "pass untie=True to begin with a copy"
            )
        elif tensor is None and other is None:
            wrong.append(f"the files have no {name}. Change the map, or name the leaf in keep=")
        else:
            tensors += [of for of in (tensor, other) if of is not None]
    return tensors, wrong


def _differences(fill: Fill, tensors: Sequence[StoredTensor], leaf: Any, cast: bool) -> list[str]:
    wanted, wrong = fill.rule.tensor_shape(np.shape(leaf)), []
    for tensor in tensors:
        where, dtype = f"{tensor.name} in {tensor.file.name}", tensor.dtype
        if tensor.shape != wanted:
            text = f"{where} has shape {tensor.shape}, wanted {wanted} for the leaf's {tuple(np.shape(leaf))}"
            wrong.append(f"{text}. {_transposed(fill, tensor.shape, wanted) or _SIZES}")
        if dtype is None:
            wrong.append(f"{where} has a dtype that cannot be read into JAX. Convert it in the library that wrote it")
        elif is_key(leaf):
            wrong.append("it holds random keys, which no file of weights has. Name it in keep=")
        elif dtype != leaf.dtype and not (cast and _is_float(dtype) and _is_float(leaf.dtype)):
            is_cast = _is_float(dtype) and _is_float(leaf.dtype)
            remedy = ": pass cast=True to convert" if is_cast else f". Make it in {dtype}, or name it in keep="
            wrong.append(f"{where} has dtype {dtype}, wanted {leaf.dtype}{remedy}")
    return wrong or [f"{text}. Shard another dimension of it" for text in WantedLeaf.of(leaf).faults(None, None)]


def _is_float(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def _transposed(fill: Fill, shape: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    if fill.rule.transpose is None and fill.rule.merge is None and shape == wanted[::-1]:
        return "Give its rule transpose=(1, 0)" if len(shape) == 2 else "Give its rule a transpose="
    return ""


def _why_extra(name: str, wanted: set[str], map: NameMap) -> str:
    full = name if name in map.ties else map.prefix + name
    if full in map.ties and full not in wanted:
        return f" The model ties it to {map.ties[full]}, and these files do not: make the model with its own leaf"
    return " Give the model that leaf, or name the tensor in the map's ignore="


def _mismatch(
    source: WeightSource, faults: Sequence[str], lacking: Sequence[str], remedy: str | None
) -> CheckpointMismatchError:
    of = f" of {source.architecture}" if source.architecture else ""
    # What `remedy` names is told in one line.
    named = {*lacking} if remedy is not None and len(lacking) > 1 else set[str]()
    lines = grouped(fault for fault in faults if fault.partition(": ")[0] not in named)
    if named:
        text = "no tensor of the files fills them. If the files have other names for them, change the map"
        lines.insert(0, f"{lacking[0]} and {len(lacking) - 1} more: {text}")
    if remedy is not None:
        lines.append(remedy)
    elif lacking:
        lines.append("Are these the weights of this model, with its sizes? For other names, pass map=")
    return CheckpointMismatchError(f"the weights{of} at {source.path} do not fit the model.", faults, lines)


def _place(leaf: FilledLeaf, sharding: Any) -> Any:
    if sharding is None:
        return np.ascontiguousarray(leaf.read((slice(None),) * len(leaf.shape)))
    return place_parts(leaf.read, leaf.shape, leaf.dtype, sharding)
