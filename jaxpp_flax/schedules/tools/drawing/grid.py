"""A timeline as text, for a terminal or a docstring."""

from __future__ import annotations

import math
from collections.abc import Callable

from jaxpp_flax.schedules.schedule import Schedule
from jaxpp_flax.schedules.simulation.simulate import Timeline, simulate
from jaxpp_flax.schedules.task import MEANING, TaskKind
from jaxpp_flax.schedules.tools.drawing.scene import (
    FETCH,
    OFFLOAD,
    Bar,
    Panels,
    bars,
    caption,
    copies_of,
    copy_bars,
    kinds_of,
    rows,
    shortest,
)

_FILL = {
    TaskKind.FORWARD: "-",
    TaskKind.BACKWARD: "=",
    TaskKind.BACKWARD_INPUT: "~",
    TaskKind.BACKWARD_WEIGHT: ":",
}
_ANSI = {
    TaskKind.FORWARD: "\x1b[30;48;5;111m",
    TaskKind.BACKWARD: "\x1b[30;48;5;215m",
    TaskKind.BACKWARD_INPUT: "\x1b[30;48;5;223m",
    TaskKind.BACKWARD_WEIGHT: "\x1b[30;48;5;150m",
}
_RESET = "\x1b[0m"
_ARROWS = {OFFLOAD: ">", FETCH: "<"}


def grid(panels: Panels, width: int = 120, colour: bool = False) -> str:
    """A row for each rank, time to the right; a step too long for ``width`` is folded.

    Each pass is its letter and microbatch, drawn as long as it takes: ``F`` forward ``-``, ``B``
    backward ``=``, ``I`` input gradient ``~``, ``W`` weight gradient ``:``. Dots are idle time. A
    small letter is a rank's second stage; where ranks run more, the stage stands in front. Copies to the host ``>`` and
    back ``<`` have lines of their own below their rank, each copy with its microbatch.
    """
    scale = max(_columns_per_unit(timeline) for _, timeline in panels)
    longest = max(timeline.makespan for _, timeline in panels)
    # Very uneven passes would make the picture endless for the sake of its shortest one.
    scale = min(scale, 12 * width / longest if longest else scale)
    parts = [_panel(title, timeline, scale, width, colour) for title, timeline in panels]
    legend = "  ".join(f"{kind.value} {MEANING[kind].name} {_FILL[kind]}" for kind in kinds_of(panels))
    legend += "".join(f"  {_ARROWS[kind]} {kind}" for kind in copies_of(panels))
    return "\n\n".join(parts) + f"\n\n{legend}  . idle"


def sketch(schedule: Schedule, num_microbatches: int) -> str:
    """The rows of a schedule's grid at unit costs, with nothing around them: for docstrings.

    >>> from jaxpp_flax.schedules import GPipe
    >>> print(sketch(GPipe(2), 2))
    rank 0 |F0-F1-......B0====B1====
    rank 1 |...F0-F1-B0====B1====...
    """
    step = simulate(schedule, num_microbatches=num_microbatches)
    return "\n".join(_panel("", step, _columns_per_unit(step), 1000, False).splitlines()[1:])


Labels = Callable[[Bar], str]


def _labels(timeline: Timeline) -> Labels:
    """Return the labels of a timeline's passes: long enough to distinguish a rank's stages."""
    stages = [sorted({event.task.stage for event in events}) for events in timeline.events]
    most = max(map(len, stages), default=1)
    if most > 2:
        return lambda bar: f"{bar.stage}{bar.kind.value}{bar.microbatch}"

    def label(bar: Bar) -> str:
        letter = bar.kind.value
        return f"{letter.lower() if bar.stage != stages[bar.rank][0] else letter}{bar.microbatch}"

    return label


def _cell(timeline: Timeline) -> int:
    """Columns that the longest label takes, and one to part it from the next."""
    label = _labels(timeline)
    return 1 + max((len(label(bar)) for bar in bars(timeline)), default=1)


def _columns_per_unit(timeline: Timeline) -> float:
    return _cell(timeline) / shortest(timeline)


def _panel(title: str, timeline: Timeline, scale: float, width: int, colour: bool) -> str:
    label = _labels(timeline)
    columns = max(1, math.ceil(timeline.makespan * scale - 1e-6))
    cells: dict[tuple[int, str | None], list[tuple[str, TaskKind | None]]] = {
        row: [("." if row[1] is None else " ", None)] * columns for row in rows(timeline)
    }
    for bar in bars(timeline):
        first, last = round(bar.start * scale), round(bar.end * scale)
        text = label(bar)
        size = max(0, min(last, columns) - first)
        text = text if len(text) <= size else text[1:] if len(text) - 1 <= size else ""
        for i, character in enumerate(text.ljust(size, _FILL[bar.kind])[:size]):
            cells[bar.rank, None][first + i] = (character, bar.kind)
    for copy in copy_bars(timeline):
        first, last = round(copy.start * scale), round(copy.end * scale)
        size = min(max(last, first + 1), columns) - first
        text = copy.label if len(copy.label) < size else ""
        for i, character in enumerate((_ARROWS[copy.kind] + text).ljust(size, _ARROWS[copy.kind])[:size]):
            cells[copy.rank, copy.kind][first + i] = (character, None)
    number = len(str(len(timeline.events) - 1))
    margin = len("rank ") + number + len(" |")
    cell = _cell(timeline)  # folding at its multiples keeps passes of equal length in one piece
    room = max(20, width - margin) // cell * cell
    lines = [caption(title, timeline)]
    for begin in range(0, columns, room):
        if begin:
            lines.append("")
        for (rank, kind), row in cells.items():
            head = f"rank {rank:>{number}}" if kind is None else f"host {_ARROWS[kind]:>{number}}"
            lines.append(f"{head} |" + _paint(row[begin : begin + room], colour))
    return "\n".join(lines)


def _paint(row: list[tuple[str, TaskKind | None]], colour: bool) -> str:
    if not colour:
        return "".join(character for character, _ in row).rstrip()
    out: list[str] = []
    before: TaskKind | None = None
    for character, kind in row:
        if kind is not before:
            out.append(_RESET if kind is None else _ANSI[kind])
            before = kind
        # Colour says what the fill would: keep the labels alone.
        out.append(" " if character in "-=~:." else character)
    return "".join(out) + _RESET
