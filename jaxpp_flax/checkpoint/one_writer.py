"""Notice a second job that saves to the same directory: each checkpoint names its writer.

No file locks the directory. A job that died would leave its lock behind, and no other host could tell that it is dead.
A checkpoint that has appeared since the run began, of another writer, ends the run at its next save instead, before
anything is written.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from jaxpp_flax.checkpoint.errors import DirectoryInUseError
from jaxpp_flax.checkpoint.reading import read_json
from jaxpp_flax.processes.group import process_group

WRITER = "writer"
"""The name of the JSON with the writer, beside the arrays of a checkpoint."""


def try_to_write(directory: Path) -> None:
    """Make the directory, and write a file there that is removed again."""
    probe = directory / f".probe-{process_group().life}"
    directory.mkdir(parents=True, exist_ok=True)
    probe.write_text("")
    probe.unlink()


def own_writer() -> str:
    """Name this process as a writer; another life of it has another name."""
    group = process_group()
    return f"{group.identity}, life {group.life}"


def refuse_another_writer(directory: Path, appeared: Iterable[int]) -> None:
    """Refuse checkpoints that have appeared since the run began, unless this process wrote them.

    Raises:
      DirectoryInUseError: naming the step and its writer.
    """
    for step in appeared:
        writer = read_json(directory / str(step), WRITER)
        if writer != own_writer():
            raise DirectoryInUseError(
                f"another job saves to {directory}: the checkpoint of step {step} has appeared there since this run "
                f"began, written by {writer or 'a job that it does not name'}. This run ({own_writer()}) has written "
                "nothing more. End one of the two, or give this one another directory: checkpoints=."
            )
