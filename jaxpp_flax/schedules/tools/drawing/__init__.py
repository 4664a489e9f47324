"""Pictures of timelines: text, SVG, Chrome trace."""

from __future__ import annotations

import os
from pathlib import Path

from jaxpp_flax.schedules.errors import ScheduleError
from jaxpp_flax.schedules.simulation.simulate import Timeline
from jaxpp_flax.schedules.tools.drawing.grid import grid, sketch
from jaxpp_flax.schedules.tools.drawing.scene import NO_UNITS, Panels, Units
from jaxpp_flax.schedules.tools.drawing.svg import svg
from jaxpp_flax.schedules.tools.drawing.trace import chrome_trace

__all__ = ["chrome_trace", "draw", "grid", "sketch", "svg", "Units"]


def draw(
    timeline: Timeline | Panels,
    path: str | os.PathLike[str] | None = None,
    *,
    title: str = "schedule",
    width: int = 120,
    microseconds: float = 1000.0,
    max_lines: int | None = None,
    units: Units = NO_UNITS,
) -> str:
    """Draw a simulated or measured step, or several steps below one another on one scale of time.

    Args:
        timeline: the result of :func:`simulate` or :func:`replay`, or ``(title, timeline)`` pairs.
        path: the file to write. Its suffix gives the format: ``.svg``, ``.json`` (a Chrome trace for Perfetto, with the
            activation memory of each rank) or ``.txt``. None writes no file.
        title: the title of a single timeline.
        width: the number of columns of the text grid.
        microseconds: the length of one unit of time in a Chrome trace.
        max_lines: the most lines of the text grid of a timeline: it leaves out ranks in the middle, and the end of the
            step. None draws everything.
        units: the names of the units of time and memory, such as ``Units("s", "B")``: figures get them, with a prefix.

    Returns:
        The text grid.

    Raises:
        ScheduleError: if there is no timeline, or the suffix of ``path`` is another one.

    >>> from jaxpp_flax.schedules import Std1F1B, simulate
    >>> print(draw(simulate(Std1F1B(2), num_microbatches=2), title="1F1B"))
    1F1B: makespan 9, bubble 33.3%, peak memory 2
    rank 0 |F0-F1-......B0====...B1====
    rank 1 |...F0-B0====F1-B1====......
    <BLANKLINE>
    F forward -  B backward =  . idle
    """
    panels = [(title, timeline)] if isinstance(timeline, Timeline) else list(timeline)
    if not panels:
        raise ScheduleError("nothing to draw: give at least one timeline")
    if path is not None:
        writers = {
            ".svg": lambda: svg(panels, units),
            ".json": lambda: chrome_trace(panels, microseconds),
            ".txt": lambda: grid(panels, width, units=units) + "\n",
        }
        target = Path(path)
        if target.suffix not in writers:
            raise ScheduleError(
                f"{os.fspath(path)}: cannot draw a {target.suffix!r} file. Use .svg, .json (Chrome trace) or .txt"
            )
        target.write_text(writers[target.suffix]())
    return grid(panels, width, max_lines, units)
