"""Run passes in order; after each pass, verify the structure or write it into a folder, if the environment asks."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from jax.sharding import AbstractMesh, PartitionSpec

from jaxpp_flax.engine.analyses.batch_dimensions import ShardCounts
from jaxpp_flax.engine.passes.fsdp.rule import FsdpRule
from jaxpp_flax.engine.passes.liveness import Pairs
from jaxpp_flax.engine.passes.loop.loop import Loop
from jaxpp_flax.engine.passes.place import ResultRanks
from jaxpp_flax.engine.passes.unroll import Rounds
from jaxpp_flax.schedules.residuals import ResidualPlan

__all__ = [
    "Choices", "Observer", "Pass", "Passes", "Residuals", "Settings", "Structure", "observers", "wants_verification",
]  # fmt: skip


Residuals = ResidualPlan | Callable[[], ResidualPlan | None] | None


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
      argument_ranks: of a step without a loop: the ranks of each input; empty for an input that lies anywhere.
    """

    num_ranks: int
    donated: Sequence[bool]
    specs: Sequence[PartitionSpec]
    shards: ShardCounts
    submesh: AbstractMesh | None = None
    result_ranks: ResultRanks | None = None
    fsdp: FsdpRule | None = None
    idle_ranks: frozenset[int] = frozenset({0})
    argument_ranks: Sequence[frozenset[int]] = ()


@dataclass(frozen=True, eq=False, kw_only=True)
class Choices(Settings):
    """The settings of a step whose cuts and residuals are chosen; a planner tries many.

    Attributes:
      choose_cuts: the cut policy; returns the indices of the marks that cut.
      residuals: what each stage does with its residuals; None keeps them on the devices. A function gives it after the
        cuts are chosen, which a choice of residuals may depend on.
      rounds: those of the step, if programs for several patterns of microbatches share them.
      pairs: the donation pairs of tasks, which such programs share.
    """

    choose_cuts: Callable[[Loop], Sequence[int]]
    residuals: Residuals = None
    rounds: Rounds | None = None
    pairs: Pairs = field(default_factory=Pairs, repr=False)

    @cached_property
    def residual_plan(self) -> ResidualPlan | None:
        """The value of `residuals`, or its result: a user's function is called once for a compilation."""
        return self.residuals() if callable(self.residuals) else self.residuals


class Structure(Protocol):
    """What passes hand on: a frozen structure that can be checked and read."""

    def verify(self) -> None:
        """Raise a `VerificationError` if the structure breaks its own rules."""

    def as_text(self) -> str:
        """Return the structure as text."""
        ...


First = TypeVar("First", bound=Structure)
Last = TypeVar("Last", bound=Structure)
Next = TypeVar("Next", bound=Structure)
Given = TypeVar("Given", bound=Settings)
More = TypeVar("More", bound=Settings)


@dataclass(frozen=True)
class Pass(Generic[First, Last]):
    """One step of the compiler.

    Attributes:
      name: the name of the pass, and of the file that holds it.
      run: takes the structure before the pass, and returns the structure after it.
      requires: the conditions on the structure before the pass.
      ensures: the conditions on the structure after the pass.
      check: raises a `VerificationError` if the structure after the pass breaks what the pass ensures, and the
        structure's own `verify` does not see it.
    """

    name: str
    run: Callable[[First, Any], Last] = field(repr=False)
    requires: str
    ensures: str
    check: Callable[[Last], None] | None = field(default=None, repr=False)

    def verify(self, structure: Last) -> None:
        """Check the structure after the pass."""
        structure.verify()
        if self.check is not None:
            self.check(structure)


Observer = Callable[[int, Pass[Any, Any], Structure], None]
"""Receives a pass, its number from 1 on, and its structure, before the next pass runs."""


@dataclass(frozen=True)
class Passes(Generic[First, Last, Given]):
    """Passes in order, each from the structure of the one before: from a `First` to a `Last`, by settings.

    Attributes:
      rows: the passes.
      before: the number of passes that run before these.
    """

    rows: tuple[Pass[Any, Any], ...] = ()
    before: int = 0

    def then(
        self,
        name: str,
        run: Callable[[Last, Given], Next],
        *,
        requires: str,
        ensures: str,
        check: Callable[[Next], None] | None = None,
    ) -> Passes[First, Next, Given]:
        """Return these passes and one more; see `Pass`."""
        return Passes((*self.rows, Pass(name, run, requires, ensures, check)), self.before)

    def joined(self, others: Passes[Last, Next, More]) -> Passes[First, Next, More]:
        """Return these passes and others behind them, which need the same settings or more."""
        return Passes((*self.rows, *others.rows), self.before)

    def steps(
        self, structure: First, settings: Given, observe: Sequence[Observer] = ()
    ) -> Iterator[tuple[Pass[Any, Any], Structure]]:
        """Hand a structure from pass to pass; yield each pass with its structure, and keep no structure."""
        current: Any = structure
        for number, each in enumerate(self.rows, self.before + 1):
            current = each.run(current, settings)
            for observer in observe:
                observer(number, each, current)
            yield each, current

    def run(self, structure: First, settings: Given, observe: Sequence[Observer] = ()) -> Last:
        """Return the structure after the last pass."""
        last: Any = structure
        for _, structure_after in self.steps(structure, settings, observe):
            last = structure_after
        return last


def observers() -> list[Observer]:
    """Read the observers from the environment: `JAXPP_FLAX_DUMP=folder` writes, `JAXPP_FLAX_VERIFY=1` checks.

    A structure is written before it is checked, so that a broken one can be read.
    """
    observers_wanted: list[Observer] = []
    if folder := os.environ.get("JAXPP_FLAX_DUMP"):
        observers_wanted.append(_write_into(_new_folder(Path(folder))))
    if wants_verification():
        observers_wanted.append(lambda _number, each, structure: each.verify(structure))
    return observers_wanted


def wants_verification() -> bool:
    """Return whether the environment asks for checks between passes."""
    return os.environ.get("JAXPP_FLAX_VERIFY", "0") not in ("", "0")


def _new_folder(parent: Path) -> Path:
    """Make a folder for one compiled function: `step_0_...`, of a name that no other process makes."""
    parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f"step_{len(list(parent.iterdir()))}_", dir=parent))


def _write_into(folder: Path) -> Observer:
    def write(number: int, each: Pass[Any, Any], structure: Structure) -> None:
        (folder / f"{number:02}_{each.name}.txt").write_text(structure.as_text() + "\n", encoding="utf-8")

    return write
