"""Run passes in order; after each pass, verify the structure or write it into a folder, if the environment asks."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from jax.sharding import AbstractMesh, PartitionSpec

from jaxpp_flax.engine.analyses.batch_dimensions import ShardCounts
from jaxpp_flax.engine.passes.fsdp.rule import FsdpRule
from jaxpp_flax.engine.passes.loop.loop import Loop
from jaxpp_flax.engine.passes.placed import ResultRanks
from jaxpp_flax.schedules.residuals import ResidualPlan

__all__ = ["Observer", "Pass", "Residuals", "Settings", "observers", "run_passes", "wants_verification"]


Residuals = ResidualPlan | Callable[[], ResidualPlan | None] | None


def _no_cuts(loop: Loop) -> Sequence[int]:
    raise NotImplementedError("the cuts are not chosen yet")


@dataclass(frozen=True, eq=False, kw_only=True)
class Settings:
    """The settings that all passes share, besides the structure.

    Attributes:
      num_ranks: the number of the mesh's ranks.
      donated: for each input of the step, whether its buffers may be reused.
      specs: the partition of each input inside a submesh.
      shards: returns the number of shards over an entry of a spec.
      submesh: that of a rank, without devices; None tells XLA nothing of the batch.
      result_ranks: with several processes, the results that all of them get.
      fsdp: gathers parameters before the loops; None leaves them to each task that reads them.
      idle_ranks: the ranks of a result that no rank needs, and that each rank can compute by itself.
      choose_cuts: the cut policy; returns the indices of the marks that cut.
      residuals: what each stage does with its residuals; None keeps them on the devices. A function gives it after the
        cuts are chosen, which a choice of residuals may depend on.
    """

    num_ranks: int
    donated: Sequence[bool]
    specs: Sequence[PartitionSpec]
    shards: ShardCounts
    submesh: AbstractMesh | None = None
    result_ranks: ResultRanks | None = None
    fsdp: FsdpRule | None = None
    idle_ranks: frozenset[int] = frozenset({0})
    choose_cuts: Callable[[Loop], Sequence[int]] = _no_cuts
    residuals: Residuals = None

    @cached_property
    def residual_plan(self) -> ResidualPlan | None:
        """The value of `residuals`, or its result: a user's function is called once for a compilation."""
        return self.residuals() if callable(self.residuals) else self.residuals


@dataclass(frozen=True)
class Pass:
    """One step of the compiler.

    Attributes:
      name: the name of the pass, and of the file that holds it.
      run: takes the structure before the pass, and returns the structure after it, which is frozen,
        and has `verify` and `as_text`.
      requires: the conditions on the structure before the pass.
      ensures: the conditions on the structure after the pass.
    """

    name: str
    run: Callable[[Any, Settings], Any] = field(repr=False)
    requires: str
    ensures: str


Observer = Callable[[int, Pass, Any], None]
"""Receives a pass, its number from 1 on, and its structure, before the next pass runs."""


def run_passes(
    passes: Iterable[Pass], structure: Any, settings: Settings, observe: Sequence[Observer] = (), *, first: int = 1
) -> Iterator[tuple[Pass, Any]]:
    """Hand a structure from pass to pass; yield each pass with its structure, and keep no structure.

    `first` is the number of the first of these passes.
    """
    for number, each in enumerate(passes, first):
        structure = each.run(structure, settings)
        for observer in observe:
            observer(number, each, structure)
        yield each, structure


def observers() -> list[Observer]:
    """Read the observers from the environment: `JAXPP_FLAX_DUMP=folder` writes, `JAXPP_FLAX_VERIFY=1` checks.

    A structure is written before it is checked, so that a broken one can be read.
    """
    found: list[Observer] = []
    if folder := os.environ.get("JAXPP_FLAX_DUMP"):
        found.append(_write_into(_new_folder(Path(folder))))
    if wants_verification():
        found.append(lambda _number, _pass, structure: structure.verify())
    return found


def wants_verification() -> bool:
    """Return whether the environment asks for checks between passes."""
    return os.environ.get("JAXPP_FLAX_VERIFY", "0") not in ("", "0")


def _new_folder(parent: Path) -> Path:
    """Make a folder for one compiled function: `step_0_...`, of a name that no other process makes."""
    parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f"step_{len(list(parent.iterdir()))}_", dir=parent))


def _write_into(folder: Path) -> Observer:
    def write(number: int, each: Pass, structure: Any) -> None:
        (folder / f"{number:02}_{each.name}.txt").write_text(structure.as_text() + "\n", encoding="utf-8")

    return write
