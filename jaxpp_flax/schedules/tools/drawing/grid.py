"""A timeline as text, for a terminal or a docstring."""

from __future__ import annotations

import math

from jaxpp_flax.schedules.schedule import Schedule
from jaxpp_flax.schedules.simulation.simulate import Timeline, simulate
from jaxpp_flax.schedules.tools.drawing.scene import (
    NO_UNITS,
    Panels,
    Units,
    bars,
    caption,
    in_unit,
    labels,
    shortest,
    styles_of,
)

_ENDS = 8  # ranks that a short picture shows at each end


def grid(panels: Panels, width: int = 120, max_lines: int | None = None, units: Units = NO_UNITS) -> str:
    """A row for each rank, time to the right; a step too long for ``width`` is folded.

    Each pass is its letter and microbatch, drawn as long as it takes: ``F`` forward ``-``, ``B``
    backward ``=``, ``I`` input gradient ``~``, ``W`` weight gradient ``:``. Dots are idle time. A
    small letter is a rank's second stage; where ranks run more, the stage stands in front. A panel
    of more than ``max_lines`` shows the first and the last ranks, and the beginning of the step.
    """
    scale = max(_columns_per_unit(timeline) for _, timeline in panels)
    longest = max(timeline.makespan for _, timeline in panels)
    # Very uneven passes would make the picture endless for the sake of its shortest one.
    scale = min(scale, 12 * width / longest if longest else scale)
    parts = [_panel(title, timeline, scale, width, max_lines, units) for title, timeline in panels]
    legend = (f"{style.letter} {style.name} {style.fill}" for style in styles_of(panels))
    return "\n\n".join(parts) + "\n\n" + "  ".join([*legend, ". idle"])


def sketch(schedule: Schedule, num_microbatches: int) -> str:
    """The rows of a schedule's grid at unit costs, with nothing around them: for docstrings.

    >>> from jaxpp_flax.schedules import GPipe
    >>> print(sketch(GPipe(2), 2))
    rank 0 |F0-F1-......B0====B1====
    rank 1 |...F0-F1-B0====B1====...
    """
    step = simulate(schedule, num_microbatches=num_microbatches)
    return "\n".join(_panel("", step, _columns_per_unit(step), 1000, None, NO_UNITS).splitlines()[1:])


def _cell(timeline: Timeline) -> int:
    """Columns that the longest label of a task takes, and one to part it from the next."""
    label = labels(timeline)
    return 1 + max((len(label(bar)) for bar in bars(timeline)), default=1)


def _columns_per_unit(timeline: Timeline) -> float:
    return _cell(timeline) / shortest(timeline)


def _panel(title: str, timeline: Timeline, scale: float, width: int, max_lines: int | None, units: Units) -> str:
    label = labels(timeline)
    columns = max(1, math.ceil(timeline.makespan * scale - 1e-6))
    rows = [["."] * columns for _ in timeline.events]
    for bar in bars(timeline):
        first, text = round(bar.start * scale), label(bar)
        size = max(0, min(round(bar.end * scale), columns) - first)
        if len(text) > size:  # without its letter, or without its number
            text = text[1:] if len(text) - 1 <= size else ""
        rows[bar.rank][first : first + size] = text.ljust(size, bar.style.fill)
    number = len(str(len(timeline.events) - 1))
    margin = len("rank ") + number + len(" |")
    cell = _cell(timeline)  # folding at its multiples keeps passes of equal length in one piece
    room = max(20, width - margin) // cell * cell
    pieces, shown = [*range(0, columns, room)], [*range(len(rows))]
    is_short = max_lines is not None and 1 + len(pieces) * (len(rows) + 1) > max_lines
    if is_short and len(rows) > 2 * _ENDS + 1:
        shown = [*shown[:_ENDS], *shown[-_ENDS:]]
    kept = pieces if not is_short or max_lines is None else pieces[: max(1, (max_lines - 2) // (len(shown) + 2))]
    lines = [caption(title, timeline, units)]
    for begin in kept:
        if begin:
            lines.append("")
        for before, rank in zip([shown[0] - 1, *shown], shown, strict=False):
            if rank > before + 1:
                lines.append(f"... ranks {before + 1} to {rank - 1}")
            lines.append(f"rank {rank:>{number}} |" + "".join(rows[rank][begin : begin + room]))
    if len(kept) < len(pieces):
        lines.append(
            f"... until {in_unit(timeline.makespan, units.time)}: the first {len(kept)} of {len(pieces)} pieces"
        )
    return "\n".join(lines)
