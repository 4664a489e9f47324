"""Check that the bytes on disk have not changed since the save: Orbax's format does not notice a changed byte."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path

from jaxpp_flax.checkpoint.errors import CorruptCheckpointError
from jaxpp_flax.processes.comparison import exchange_values
from jaxpp_flax.processes.group import process_group

DIGESTS = "file_digests.json"
"""A file beside Orbax's files, with the size and CRC-32 of each. Without it, a checkpoint is read unchecked."""

_BLOCK = 1 << 22


def write_digests(directory: Path) -> None:
    """Write the size and CRC-32 of every file below `directory`."""
    digests = {name: [path.stat().st_size, _crc(path)] for name, path in _files(directory).items()}
    unfinished = directory / f".{DIGESTS}.{os.getpid()}"
    with unfinished.open("w", encoding="utf-8") as file:
        json.dump(digests, file, indent=0, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(directory / DIGESTS)


def describe_checkpoint(path: str | os.PathLike[str]) -> str:
    """Describe a checkpoint, by its digests if it has any. Copies of one checkpoint have the same description.

    Example:
      >>> describe_checkpoint("/shared/run/40")
      'the checkpoint /shared/run/40'
    """
    record = Path(path).expanduser() / DIGESTS
    if not record.is_file():
        return f"the checkpoint {path}"
    return f"the checkpoint {Path(path).name}, whose {DIGESTS} has the CRC-32 {_crc(record):08x}"


def check_files(directory: Path) -> None:
    """Compare the files with their digests. A checkpoint without digests, as stock Orbax writes it, is not checked.

    Several processes divide the files among themselves, and each process gets all faults.
    """
    record = directory / DIGESTS
    if not record.is_file():
        return
    try:
        digests = json.loads(record.read_text(encoding="utf-8"))
        wanted = {str(name): (int(size), int(crc)) for name, (size, crc) in digests.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise CorruptCheckpointError(
            f"checkpoint {directory}: {DIGESTS} is damaged ({error}). Restore another one, or delete that file to read "
            "this one unchecked."
        ) from error
    found = _files(directory)
    faults: list[str] = []
    group = process_group()
    # The largest file comes first, so that each process reads about as many bytes.
    ordered = sorted(wanted.items(), key=lambda item: (-item[1][0], item[0]))
    for name, (size, crc) in ordered[group.process_index :: group.process_count]:
        path = found.get(name)
        if path is None:
            faults.append(f"{name}: missing")
        elif path.stat().st_size != size:
            faults.append(f"{name}: {path.stat().st_size} bytes, {size} were written")
        elif _crc(path) != crc:
            faults.append(f"{name}: other bytes than were written")
    everyones = exchange_values(group, "the comparison of files with their digests", faults)
    faults = sorted(fault for found in everyones for fault in found)
    if faults:
        raise CorruptCheckpointError(
            "\n  ".join([f"checkpoint {directory} is damaged; restore another one (an earlier step). Files:", *faults])
        )


def _files(directory: Path) -> dict[str, Path]:
    """Return the files that Orbax does not write again after the checkpoint is complete, by name."""
    return {
        path.relative_to(directory).as_posix(): path
        for path in sorted(directory.rglob("*"))
        if path.is_file() and DIGESTS not in path.name and path.name != "_CHECKPOINT_METADATA"
    }


def _crc(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            crc = zlib.crc32(block, crc)
    return crc
