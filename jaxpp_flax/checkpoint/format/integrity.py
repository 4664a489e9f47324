"""Find files of a checkpoint that are missing or cut off, before a value is read, by Orbax's own index.

The index says where each value lies: in which file, from which byte, how many bytes. It has checksums for itself, not
for the values of arrays: so damage to the index is found when it is read, and a changed value in an array is not found.
"""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import tensorstore

from jaxpp_flax.checkpoint.errors import CorruptCheckpointError
from jaxpp_flax.checkpoint.format.locations import checkpoint_location, is_on_disk, storage_of
from jaxpp_flax.checkpoint.format.orbax_io import find_tree, naming_damage

_INDEX = "manifest.ocdbt"


def describe_checkpoint(path: str | os.PathLike[str]) -> str:
    """Describe a checkpoint, by its index if it has one. Copies of one checkpoint have the same description.

    Two checkpoints have different indexes, since the names of files in them are drawn at random.

    Example:
      >>> describe_checkpoint("/shared/run/40")
      'the checkpoint /shared/run/40'
    """
    place = checkpoint_location(path)
    index = (find_tree(place) if place.exists() else place) / _INDEX
    if not index.is_file():
        return f"the checkpoint {path}"
    return f"the checkpoint {place.name}, whose {_INDEX} has the CRC-32 {zlib.crc32(index.read_bytes()):08x}"


def check_files(tree: Path) -> None:
    """Compare the files of a tree with its index. A bucket's objects are never cut off, and are not compared.

    Raises:
      CorruptCheckpointError: naming the files.
    """
    if not is_on_disk(tree):
        return
    with naming_damage(tree):
        for file in (tree / "array_metadatas").glob("*"):
            json.loads(file.read_text(encoding="utf-8"))
        needed = needed_bytes(tree)
    sizes = {name: path.stat().st_size for name in needed if (path := tree / name).is_file()}
    faults = [
        f"{name}: missing" if name not in sizes else f"{name}: {sizes[name]} bytes, {size} were written"
        for name, size in sorted(needed.items())
        if sizes.get(name, -1) < size
    ]
    if faults:
        raise CorruptCheckpointError(
            "\n  ".join([f"checkpoint {tree} is damaged; restore another one (an earlier step). Files:", *faults])
        )


def needed_bytes(tree: Path) -> dict[str, int]:
    """Return the files of the index and of the values of a tree, each with the number of its bytes that are in use."""
    if not (tree / _INDEX).is_file():  # not every checkpoint of Orbax has one
        return {}
    ocdbt: Any = tensorstore.ocdbt  # pyright: ignore[reportAttributeAccessIssue]
    base = tensorstore.KvStore.open(storage_of(tree)).result()  # pyright: ignore[reportAttributeAccessIssue]
    needed: dict[str, int] = {}
    nodes = [ocdbt.dump(base).result()["versions"][-1]["root"]]
    while nodes:
        node = nodes.pop()
        place = node.get("location", node.get("indirect_value"))
        if place is None:  # a small value, in the index itself
            continue
        kind, folder, name, begin, size = place.split(":")
        file = unquote(folder + name)
        needed[file] = max(needed.get(file, 0), int(begin) + int(size))
        if kind == "btreenode":
            nodes += ocdbt.dump(base, place).result()["entries"]
    return needed
