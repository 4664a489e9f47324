"""A timeline as text, for a terminal or a docstring."""

from __future__ import annotations

import math

from jaxpp_flax.schedules.schedule import Schedule
from jaxpp_flax.schedules.simulation.simulate import Timeline, simulate
from jaxpp_flax.schedules.tools.drawing.scene import (
    Panels,
    Style,
    bars,
    caption,
    labels,
    rows,
    shortest,
    styles_of,
)

_RESET = "\x1b[0m"


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
    legend = (
        f"{style.letter} {style.name}" + (f" {style.fill}" if style.fill != style.letter else "")
        for style in styles_of(panels)
    )
    return "\n\n".join(parts) + "\n\n" + "  ".join([*legend, ". idle"])


def sketch(schedule: Schedule, num_microbatches: int) -> str:
    """The rows of a schedule's grid at unit costs, with nothing around them: for docstrings.

    >>> from jaxpp_flax.schedules import GPipe
    >>> print(sketch(GPipe(2), 2))
    rank 0 |F0-F1-......B0====B1====
    rank 1 |...F0-F1-B0====B1====...
    """
    step = simulate(schedule, num_microbatches=num_microbatches)
    return "\n".join(_panel("", step, _columns_per_unit(step), 1000, False).splitlines()[1:])


def _cell(timeline: Timeline) -> int:
    """Columns that the longest label of a task takes, and one to part it from the next."""
    label = labels(timeline)
    return 1 + max((len(label(bar)) for bar in bars(timeline) if bar.copies is None), default=1)


def _columns_per_unit(timeline: Timeline) -> float:
    return _cell(timeline) / shortest(timeline)


def _panel(title: str, timeline: Timeline, scale: float, width: int, colour: bool) -> str:
    label = labels(timeline)
    columns = max(1, math.ceil(timeline.makespan * scale - 1e-6))
    cells: dict[tuple[int, Style | None], list[tuple[str, Style | None]]] = {
        row: [("." if row[1] is None else " ", None)] * columns for row in rows(timeline)
    }
    for bar in bars(timeline):
        first, text = round(bar.start * scale), label(bar)
        last = max(round(bar.end * scale), first if bar.copies is None else first + 1)
        size = max(0, min(last, columns) - first)
        if len(text) > size:  # without its letter, or without its number
            text = text[1:] if bar.copies is None and len(text) - 1 <= size else ""
        for i, character in enumerate(text.ljust(size, bar.style.fill)):
            cells[bar.row][first + i] = (character, bar.style)
    number = len(str(len(timeline.events) - 1))
    margin = len("rank ") + number + len(" |")
    cell = _cell(timeline)  # folding at its multiples keeps passes of equal length in one piece
    room = max(20, width - margin) // cell * cell
    lines = [caption(title, timeline)]
    for begin in range(0, columns, room):
        if begin:
            lines.append("")
        for (rank, copies), row in cells.items():
            head = f"rank {rank:>{number}}" if copies is None else f"host {copies.letter:>{number}}"
            lines.append(f"{head} |" + _paint(row[begin : begin + room], colour))
    return "\n".join(lines)


def _paint(row: list[tuple[str, Style | None]], colour: bool) -> str:
    if not colour:
        return "".join(character for character, _ in row).rstrip()
    out: list[str] = []
    before: int | None = None
    for character, style in row:
        now = None if style is None else style.terminal
        if now != before:
            out.append(_RESET if now is None else f"\x1b[30;48;5;{now}m")
            before = now
        # Colour says what the fill would: keep the labels alone.
        out.append(" " if character in "-=~:." else character)
    return "".join(out) + _RESET
