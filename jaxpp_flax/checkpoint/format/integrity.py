"""Check before a restore that no file of a checkpoint is missing or cut off, by a list of their sizes.

Orbax's format has checksums for its own index, not for the values of arrays. So a file that is missing or cut off is
found here, damage to the index when Orbax reads it, and a changed value in an array is not found. A bucket has no
files that were cut off, and no list: it would take a request for each file, in each process.
"""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path

from jaxpp_flax.checkpoint.errors import CorruptCheckpointError
from jaxpp_flax.checkpoint.format.locations import checkpoint_location, is_on_disk
from jaxpp_flax.processes.comparison import exchange_values
from jaxpp_flax.processes.group import process_group

FILE_SIZES = "file_sizes.json"
"""A file beside Orbax's files, with the size of each. Without it, a checkpoint is read unchecked."""


def write_sizes(directory: Path) -> None:
    """Write the size of every file below `directory`, on a disk."""
    if not is_on_disk(directory):
        return
    unfinished = directory / f".{FILE_SIZES}.{os.getpid()}"
    with unfinished.open("w", encoding="utf-8") as file:
        json.dump(_sizes(directory), file, indent=0, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(directory / FILE_SIZES)


def describe_checkpoint(path: str | os.PathLike[str]) -> str:
    """Describe a checkpoint, by its list of files if it has one. Copies of one checkpoint have the same description.

    Two checkpoints have different lists, since Orbax draws the names of files at random.

    Example:
      >>> describe_checkpoint("/shared/run/40")
      'the checkpoint /shared/run/40'
    """
    record = checkpoint_location(path) / FILE_SIZES
    if not record.is_file():
        return f"the checkpoint {path}"
    return (
        f"the checkpoint {record.parent.name}, whose {FILE_SIZES} has the CRC-32 {zlib.crc32(record.read_bytes()):08x}"
    )


def check_files(tree: Path) -> None:
    """Compare the files of a tree with their list, which lies beside it if the tree is an item of a step's directory.

    A checkpoint without a list, as stock Orbax writes it, is not checked. Each process gets the faults that any sees.
    """
    for directory in (tree, tree.parent):
        _check_listed(directory)


def _check_listed(directory: Path) -> None:
    record = directory / FILE_SIZES
    if not record.is_file():
        return
    try:
        wanted = {str(name): int(size) for name, size in json.loads(record.read_text(encoding="utf-8")).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise CorruptCheckpointError(
            f"checkpoint {directory}: {FILE_SIZES} is damaged ({error}). Restore another one, or delete that file to "
            "read this one unchecked."
        ) from error
    found = _sizes(directory)
    faults = [
        f"{name}: missing" if name not in found else f"{name}: {found[name]} bytes, {size} were written"
        for name, size in wanted.items()
        if found.get(name) != size
    ]
    everyones = exchange_values(process_group(), "the comparison of a checkpoint's files with their sizes", faults)
    if faults := sorted({fault for of_process in everyones for fault in of_process}):
        raise CorruptCheckpointError(
            "\n  ".join([f"checkpoint {directory} is damaged; restore another one (an earlier step). Files:", *faults])
        )


def _sizes(directory: Path) -> dict[str, int]:
    """Return the sizes of the files that Orbax does not write again after the checkpoint is complete, by name."""
    return {
        path.relative_to(directory).as_posix(): path.stat().st_size
        for path in directory.rglob("*")
        if path.is_file() and FILE_SIZES not in path.name and path.name != "_CHECKPOINT_METADATA"
    }
