"""Check that all processes see one directory: with separate disks, each would wait for the others' files for ever."""

from __future__ import annotations

import os
import time
from pathlib import Path

from jaxpp_flax.checkpoint.errors import CheckpointSaveError
from jaxpp_flax.processes.comparison import exchange_values
from jaxpp_flax.processes.group import process_group
from jaxpp_flax.processes.waits import name_processes

# Seconds. A network file system may show a new file late.
_PATIENCE = 60.0


def check_shared(directory: Path) -> None:
    """Make sure that every process sees the files that process 0 writes to a directory; all processes call this.

    The directory is made if it does not exist. Nothing is checked in a single process, or if process 0 cannot write:
    the save then raises the error.

    Raises:
      CheckpointSaveError: in every process; the message names the processes that do not see the directory.
    """
    group = process_group()
    if group.process_count == 1:
        return
    mine: Path | None = None
    if group.process_index == 0:
        mine = directory / f".seen-by-all-{os.getpid()}-{time.time_ns()}"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            mine.write_text("")
        except OSError:
            mine = None
    try:
        name = exchange_values(group, "a file that all processes must see", None if mine is None else mine.name)[0]
        if name is None:
            return
        missing_in = None if _appears(directory / name) else str(directory)
        seen = exchange_values(group, "which processes see that file", missing_in)
    finally:
        if mine is not None:
            mine.unlink(missing_ok=True)
    blind = {process: path for process, path in enumerate(seen) if path is not None}
    if blind:
        raise CheckpointSaveError(
            f"{name_processes(list(blind))} cannot see in {', '.join(sorted(set(blind.values())))} what process 0 has "
            f"written to its directory of checkpoints{f', {directory}' if group.process_index == 0 else ''}: these are "
            "different directories, or one path on disks of different hosts. Give every process the same directory, on "
            "a file system that all hosts share."
        )


def _appears(path: Path) -> bool:
    end = time.monotonic() + _PATIENCE
    while not path.exists():
        if time.monotonic() > end:
            return False
        process_group().check()
        time.sleep(0.05)
    return True
