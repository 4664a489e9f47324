"""A timeline as PNG, through Matplotlib (the extra ``plot``)."""

from __future__ import annotations

import os
from typing import Any

from jaxpp_flax.schedules.simulation.simulate import Timeline
from jaxpp_flax.schedules.tools.drawing.scene import (
    COPY_COLOURS,
    DARKER,
    KINDS,
    Panels,
    bars,
    caption,
    colour,
    copies_of,
    copy_bars,
    kinds_of,
    rows,
    several_stages,
    shortest,
)


def png(panels: Panels, path: str | os.PathLike[str], memory: bool = False) -> None:
    """Write the panels to ``path``; with ``memory``, each rank's activation memory beneath."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # pyright: ignore[reportMissingImports]
        from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]
        from matplotlib.patches import Patch  # pyright: ignore[reportMissingImports]
    except ImportError as error:  # pragma: no cover - depends on what is installed
        raise ImportError("PNG pictures need Matplotlib: pip install 'jaxpp-flax[plot]'. SVG needs nothing") from error

    longest = max((timeline.makespan for _, timeline in panels), default=0.0) or 1.0
    needed = 0.17 * longest / min(shortest(timeline) for _, timeline in panels)
    width = min(max(9.0, needed), 40.0)
    heights: list[float] = []
    for _, timeline in panels:
        heights.append(0.3 * len(rows(timeline)) + 0.55)
        heights += [1.7] if memory else []
    figure = Figure(figsize=(width + 0.9, sum(heights) + 0.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots(len(heights), 1, squeeze=False, sharex=True, height_ratios=heights)
    places = iter(axes[:, 0])
    for title, timeline in panels:
        _bars(next(places), title, timeline, longest, width / longest)
        if memory:
            _memory(next(places), timeline)
    patches = [Patch(color=colour(kind, 0, 1), label=KINDS[kind][0]) for kind in kinds_of(panels)]
    patches += [Patch(color=COPY_COLOURS[kind], label=kind) for kind in copies_of(panels)]
    if several_stages(panels):
        patches.append(Patch(color="none", label=DARKER))
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=9)
    figure.savefig(os.fspath(path))


def _bars(axis: Any, title: str, timeline: Timeline, longest: float, inches: float) -> None:
    axis.set_title(caption(title, timeline), fontsize=10, loc="left")
    axis.set_facecolor("#eeeeee")
    names = rows(timeline)
    count, place = len(names), {row: i for i, row in enumerate(names)}
    listed = [(place[bar.rank, None], bar) for bar in bars(timeline)]
    for at, bar in [*listed, *((place[copy.rank, copy.kind], copy) for copy in copy_bars(timeline))]:
        long = bar.end - bar.start
        axis.barh(at, long, left=bar.start, height=0.86, color=bar.colour, edgecolor="white", linewidth=0.5)
        if long * inches > 0.02 + 0.065 * len(bar.label):
            axis.text(bar.start + long / 2, at, bar.label, ha="center", va="center", fontsize=7.5)
    axis.set_ylim(count - 0.5, -0.5)
    axis.set_yticks(range(count), [kind or f"rank {rank}" for rank, kind in names], fontsize=8)
    axis.tick_params(axis="x", labelsize=8, labelbottom=True)
    axis.set_xlim(0, longest)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def _memory(axis: Any, timeline: Timeline) -> None:
    for rank in range(len(timeline.events)):
        points = [(0.0, 0.0), *timeline.memory(rank), (timeline.makespan, 0.0)]
        axis.step([t for t, _ in points], [held for _, held in points], where="post", lw=1.2, label=f"rank {rank}")
    axis.set_ylabel("activations", fontsize=8)
    axis.tick_params(labelsize=8)
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=7, ncols=2, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
