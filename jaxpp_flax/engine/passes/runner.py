"""Run passes in order; between two of them, verify the structure and write it into a folder where that is asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import methodcaller
from pathlib import Path
from typing import Any

from jax.sharding import PartitionSpec

from jaxpp_flax.engine.analyses.result_ranks import Audience
from jaxpp_flax.engine.analyses.shards import ShardCounts
from jaxpp_flax.engine.passes.loop.open_loops import OpenLoop

__all__ = ["Observer", "Pass", "Settings", "observers", "run_passes"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Settings:
    """What the passes share beside the structure that they hand on.

    Attributes:
      num_ranks: of the mesh.
      choose_cuts: the cut policy: the indices of the marks that cut.
      donated: for each input of the step, whether its buffers may be reused.
      specs: how each input is partitioned inside a submesh.
      shards: the number of shards over an entry of a spec.
      audience: with several processes, which results all of them get.
    """

    num_ranks: int
    choose_cuts: Callable[[OpenLoop], Sequence[int]]
    donated: Sequence[bool]
    specs: Sequence[PartitionSpec]
    shards: ShardCounts
    audience: Audience | None = None


@dataclass(frozen=True)
class Pass:
    """One step of the compiler.

    Attributes:
      name: also the name of the file that holds it.
      run: from the structure before it to the one after it, which is frozen.
      requires: of the structure before it.
      ensures: of the structure after it.
      verify: checks the structure after it.
      as_text: prints that structure.
    """

    name: str
    run: Callable[[Any, Settings], Any] = field(repr=False)
    requires: str
    ensures: str
    verify: Callable[[Any], None] = field(default=methodcaller("verify"), repr=False)
    as_text: Callable[[Any], str] = field(default=methodcaller("as_text"), repr=False)


Observer = Callable[[int, Pass, Any], None]
"""Sees a pass, with its number from 1 on, and the structure that it made, before the next pass does."""


def run_passes(
    passes: Iterable[Pass], structure: Any, settings: Settings, observe: Sequence[Observer] = ()
) -> Iterator[tuple[Pass, Any]]:
    """Hand a structure from pass to pass; yields each pass with what it made, and keeps none of it."""
    for number, each in enumerate(passes, 1):
        structure = each.run(structure, settings)
        for observer in observe:
            observer(number, each, structure)
        yield each, structure


def observers() -> list[Observer]:
    """What the environment asks for: `JAXPP_FLAX_DUMP=folder` writes each structure, `JAXPP_FLAX_VERIFY=1` checks it.

    A structure is written before it is checked, so that a broken one can be read.
    """
    found: list[Observer] = []
    if folder := os.environ.get("JAXPP_FLAX_DUMP"):
        found.append(_write_into(_new_folder(Path(folder))))
    if os.environ.get("JAXPP_FLAX_VERIFY", "0") not in ("", "0"):
        found.append(lambda _, each, structure: each.verify(structure))
    return found


def _new_folder(parent: Path) -> Path:
    """A folder for one compiled function: `step_0`, or the next number that no function, here or elsewhere, has."""
    parent.mkdir(parents=True, exist_ok=True)
    number = len(list(parent.glob("step_*")))
    while True:
        folder = parent / f"step_{number}"
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return folder


def _write_into(folder: Path) -> Observer:
    def write(number: int, each: Pass, structure: Any) -> None:
        (folder / f"{number:02}_{each.name}.txt").write_text(each.as_text(structure) + "\n", encoding="utf-8")

    return write
