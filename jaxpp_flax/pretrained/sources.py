"""Where weights come from: one safetensors file, shards with an index, or an Orbax checkpoint."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from jaxpp_flax.checkpoint.errors import CheckpointNotFoundError, CorruptCheckpointError
from jaxpp_flax.checkpoint.format.locations import location, need_disk
from jaxpp_flax.pretrained.orbax_tensors import read_orbax
from jaxpp_flax.pretrained.safetensors_file import read_header
from jaxpp_flax.pretrained.slices import StoredTensor

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
INDEX = "model.safetensors.index.json"
"""The file that tells the shard of each tensor."""


@dataclass(frozen=True, kw_only=True)
class WeightSource:
    """Tensors by name. `optional` names those that a model may leave unread; `architecture` is for messages.

    `revision` is the commit of a repository of the Hugging Face Hub.
    """

    path: Path
    tensors: Mapping[str, StoredTensor]
    optional: frozenset[str] = frozenset()
    architecture: str | None = None
    revision: str | None = None

    def find(self, name: str, prefix: str) -> StoredTensor | None:
        """Return the tensor of this name, with or without `prefix`."""
        return self.tensors.get(name) or self.tensors.get(name.removeprefix(prefix))

    def describe(self) -> list[str]:
        """Return the tensors' names and types as lines, the same for copies of the same files."""
        tensors = [f"{name}: {of.dtype} {of.shape}" for name, of in sorted(self.tensors.items())]
        return tensors if self.revision is None else [f"revision {self.revision}", *tensors]


def open_source(path: str | os.PathLike[str]) -> WeightSource:
    """Read what is in a source of weights, without the values; every shard is compared with its header.

    Args:
      path: a safetensors file; an index of shards; a directory with either, as Hugging Face writes it; an Orbax
        checkpoint, such as a step that a trainer saved; or "organization/name" of the Hugging Face Hub, whose files
        are downloaded where the cache does not have them.

    Raises:
      CheckpointNotFoundError: if there is nothing of that kind, or a shard is missing.
      CorruptCheckpointError: if a shard was cut off, or does not have the tensors of the index.
      ValueError: for safetensors in a bucket; an Orbax checkpoint may be on `gs://`.

    Example:
      >>> import tempfile
      >>> open_source(tempfile.mkdtemp())
      Traceback (most recent call last):
      jaxpp_flax.checkpoint.errors.CheckpointNotFoundError: no weights in ...: it has neither ...
    """
    place = location(path)
    if not place.exists():
        if not _HUB_NAME.fullmatch(os.fspath(path)):
            raise CheckpointNotFoundError(f"no weights at {place}: there is no such file or directory. Check the path.")
        place = _from_hub(os.fspath(path))  # whose name is the commit
        return replace(open_source(place), revision=place.name)
    if place.is_file():
        return _open_file(place)
    single = place / "model.safetensors"
    candidates = [of for of in (place / INDEX, single) if of.exists()]
    candidates = candidates or sorted(place.glob("*.safetensors.index.json")) or sorted(place.glob("*.safetensors"))
    if len(candidates) > 1 and candidates[0].name != INDEX:
        names = ", ".join(of.name for of in candidates)
        raise CheckpointNotFoundError(
            f"{place} has several safetensors files and no {INDEX}: {names}. Pass one of them, or copy the index too."
        )
    if candidates:
        return _open_file(candidates[0])
    names = {of.name for of in [*place.iterdir(), *place.glob("*/_METADATA")]}
    if "_METADATA" in names or any(map(str.isdigit, names)):
        tensors, optional = read_orbax(place)
        return WeightSource(path=place, tensors=tensors, optional=optional)
    raise CheckpointNotFoundError(f"no weights in {place}: {_without_weights(place)}")


def _from_hub(name: str) -> Path:
    """Return the directory with the files of a repository of the Hugging Face Hub."""
    none = f"no weights at {name}: there is no such file or directory here. Check the path"
    try:
        from huggingface_hub import snapshot_download  # pyright: ignore[reportMissingImports]
        from huggingface_hub.errors import HfHubHTTPError  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise CheckpointNotFoundError(
            f"{none}. To read a repository of the Hugging Face Hub, install the package "
            "'huggingface_hub': `pip install 'jaxpp-flax[huggingface]'`."
        ) from error
    try:
        return Path(
            snapshot_download(
                name,
                allow_patterns=["*.safetensors", "*.safetensors.index.json", "config.json"],
                ignore_patterns=["*/*", "consolidated*"],  # other formats of the same weights
            )
        )
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise CheckpointNotFoundError(f"{none}; and the Hugging Face Hub does not give them: {error}") from error


def _without_weights(place: Path) -> str:
    pickled = sorted(of.name for of in [*place.glob("*.bin"), *place.glob("*.pt"), *place.glob("*.pth")])
    if pickled:
        return (
            f"{pickled[0]} is a pickle, which can run any program when it is read. Load it in PyTorch, and write "
            "safetensors: `model.save_pretrained(directory)`."
        )
    return "it has neither model.safetensors, nor an index of shards, nor an Orbax checkpoint. Check the path."


def _open_file(path: Path) -> WeightSource:
    need_disk(path)
    tensors = _read_index(path) if path.suffix == ".json" else read_header(path)
    return WeightSource(path=path, tensors=tensors, architecture=_architecture(path.parent / "config.json"))


def _read_index(path: Path) -> dict[str, StoredTensor]:
    try:
        named = {str(name): str(file) for name, file in json.loads(path.read_bytes())["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpointError(
            f"the index {path} cannot be read ({type(error).__name__}: {error}). Copy or download that file again."
        ) from error
    first = {file: name for name, file in reversed(named.items())}
    missing = [file for file in first if not (path.parent / file).is_file()]
    if missing:
        raise CheckpointNotFoundError(
            f"{path.name} in {path.parent} names {len(first)} shards, and {len(missing)} of them are missing: "
            f"{', '.join(missing[:4])}; {first[missing[0]]} is in {missing[0]}. Copy or download them too."
        )
    headers = {file: read_header(path.parent / file) for file in first}
    for name, file in named.items():
        if name not in headers[file]:
            raise CorruptCheckpointError(
                f"{path.name} says that {name} is in the shard {file}, which does not have it. The files are of "
                "different exports: copy all of them again."
            )
    return {name: headers[file][name] for name, file in named.items()}


def _architecture(config: Path) -> str | None:
    """Return the architecture that a Hugging Face configuration names."""
    try:
        values = json.loads(config.read_text(encoding="utf-8"))
        return str((values.get("architectures") or [values["model_type"]])[0])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
