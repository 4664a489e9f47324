"""The report of a comparison: a row for each array, the first one that is wrong, and a JSON file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Choice", "Report", "Row", "joined"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """The comparison of one array of the plain step with the same array of the pipeline.

    Args:
      kind, block, leaf: which array; see `Point`. The kind "choice" is for the values that a choice reads.
      index: the index of the largest difference.
      expected, actual: the numbers of the plain step and of the pipeline at this index.
      distance: their difference, in units of rounding of the expected array's largest number.
      allowed: the largest distance that rounding explains.
      likely: the likely class of the difference; empty if rounding explains it.
      is_of_hashes: the hashes of two copies were compared, and no numbers: `expected` and `actual` are NaN, and
        `distance` is infinite.
      process: the process whose devices hold the array.
      is_whole: the plain step is a step by Flax and Optax alone on the whole model, and not the block by itself.
    """

    kind: str
    block: str
    leaf: str
    index: tuple[int, ...]
    expected: float
    actual: float
    distance: float
    allowed: float
    likely: str = ""
    process: int = 0
    is_whole: bool = False
    is_of_hashes: bool = False

    @property
    def agrees(self) -> bool:
        """True if rounding explains the difference."""
        return not self.distance > self.allowed


@dataclass(frozen=True)
class Choice:
    """The discrete choices (arg-max, top-k, comparisons, casts to integers) that one line of the program makes.

    Args:
      name: the primitive, and the line of the user's program.
      count, differ: the number of choices, and how many of them differ between the pipeline and the plain step.
      recomputed, otherwise: how many choices the pipeline recomputes for the backward pass, and how many of these
        differ from the first ones; `otherwise` is None if only a part is recomputed.
      is_at_risk: True if the gradients may belong to other choices than the loss. For comparisons this is True only if
        some of them differ, because both sides of a comparison often give nearly the same numbers.
    """

    name: str
    count: int
    differ: int = 0
    recomputed: int = 0
    otherwise: int | None = 0
    is_at_risk: bool = False

    def __str__(self) -> str:
        """Return the counts in one line."""
        unknown = "an unknown number" if self.otherwise is None else self.otherwise
        again = f"; {self.recomputed} are recomputed, {unknown} of these differently" if self.recomputed else ""
        return f"{self.name}: {self.differ} of {self.count} choices differ{again}"


def joined(choices: Iterable[Choice]) -> list[Choice]:
    """Add up the choices of each line of the program.

    Example:
      >>> print(*joined([Choice("top_k at a.py:1", 2, differ=1), Choice("top_k at a.py:1", 3, recomputed=3)]))
      top_k at a.py:1: 1 of 5 choices differ; 3 are recomputed, 0 of these differently
    """
    found: dict[str, Choice] = {}
    for more in choices:
        of = found.get(more.name, Choice(more.name, 0))
        found[more.name] = Choice(
            name=of.name,
            count=of.count + more.count,
            differ=of.differ + more.differ,
            recomputed=of.recomputed + more.recomputed,
            otherwise=None if of.otherwise is None or more.otherwise is None else of.otherwise + more.otherwise,
            is_at_risk=of.is_at_risk or more.is_at_risk,
        )
    return list(found.values())


_REMEDY = """\
`jax.checkpoint` (remat) recomputes choices. Rounding may change a recomputed choice: then the gradients belong to
another choice than the loss. Save the choices, and use no other result of the operation that makes them:
  index = checkpoint_name(jax.lax.top_k(scores, k)[1], "choice")  # from jax.ad_checkpoint
  remat=jax.checkpoint_policies.save_only_these_names("choice")  # of PipelineStage; policy= of jax.checkpoint"""


@dataclass(frozen=True, kw_only=True)
class Report:
    """The comparison of one step; printed, it is a sentence and a table. `rows` are in order of computation.

    `choices` counts the choices that rounding changes. They do not count as differences: the rows compare the pipeline
    with a plain step that makes the same choices as the pipeline. `notes` say what a reader must know beside.
    `uncompared` says why the whole step was not compared; then nobody knows whether it is right, and `agrees` is False.

    Example:
      >>> right = Row(kind="gradient", block="b", leaf="w", index=(0,), expected=1.0, actual=1.0, distance=0,
      ...             allowed=16)
      >>> wrong = Row(kind="gradient", block="a", leaf="w", index=(3,), expected=1.0, actual=4.0, distance=2.5e7,
      ...             allowed=16, likely="a scale by the number of microbatches (4)")
      >>> report = Report(rows=(right, wrong), facts={"microbatches": 4})
      >>> report.agrees, report.first is wrong
      (False, True)
      >>> print(report.sentence)
      The first difference that rounding does not explain: gradient w of block a, at (3,): 4.0, expected 1.0, ...
      >>> Report(rows=(right,), uncompared="this process lacks the memory").agrees
      False
    """

    rows: tuple[Row, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)
    choices: tuple[Choice, ...] = ()
    notes: tuple[str, ...] = ()
    uncompared: str = ""

    @property
    def agrees(self) -> bool:
        """True if the whole step was compared, and rounding explains all differences."""
        return self.first is None and not self.uncompared

    @property
    def first(self) -> Row | None:
        """The first row, in order of computation, that rounding does not explain."""
        return next((row for row in self.rows if not row.agrees), None)

    @property
    def sentence(self) -> str:
        """The result in one sentence."""
        first = self.first
        if first is None and self.uncompared:
            return (
                f"The blocks agree, but the whole step was not compared: {self.uncompared}. So a fault of the step "
                "itself would not be seen."
            )
        if first is None:
            return f"The pipeline is right: rounding explains all differences of {len(self.rows)} arrays."
        where = f" of block {first.block}" if first.block else " of the whole step" if first.is_whole else ""
        found = (
            f"at {first.index}: {first.actual!r}, expected {first.expected!r}, {first.distance:.3g} units of rounding "
            f"apart (rounding explains {first.allowed:.3g})"
        )
        if first.is_of_hashes:
            found = "of which the hashes of two copies differ (their numbers were not compared)"
        return (
            f"The first difference that rounding does not explain: {first.kind} {first.leaf}{where}, {found}. "
            f"Likely: {first.likely}."
            + (f" Process {first.process} holds it." if self.facts.get("processes", 1) > 1 else "")
        )

    def __str__(self) -> str:
        """Return the sentence, and a table of at most two rows for each block and kind: the farthest ones."""
        shown: dict[tuple[str, str, bool], list[Row]] = {}
        for row in self.rows:
            shown.setdefault((row.kind, "whole step" if row.is_whole else row.block, row.agrees), []).append(row)
        cells = [("", "what", "block", "leaf", "apart", "explained")]
        for (kind, block, agrees), rows in shown.items():
            worst = max(rows, key=lambda row: row.distance / max(row.allowed, 1e-300))
            leaf = worst.leaf + (f" and {len(rows) - 1} more" if len(rows) > 1 else "")
            mark = "" if agrees else "WRONG"
            distance = "hashes" if worst.is_of_hashes else f"{worst.distance:.3g}"
            allowed = "" if worst.is_of_hashes else f"{worst.allowed:.3g}"
            cells.append((mark, kind, block, leaf, distance, allowed))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        table = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
        note = "apart, explained: in units of rounding of an array's largest number"
        choices = ["", *map(str, self.choices)] if self.choices else []
        remedy = [_REMEDY] if any(choice.is_at_risk for choice in self.choices) else []
        return "\n".join([self.sentence, *self.notes, "", *table, note, *choices, *remedy])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report as JSON: the sentence, the facts of the run, and all rows."""
        content = {"agrees": self.agrees, "sentence": self.sentence, **asdict(self)}
        Path(path).write_text(json.dumps(content, indent=1, default=str), encoding="utf-8")
