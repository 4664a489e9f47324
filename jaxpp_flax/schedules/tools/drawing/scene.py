"""The content of a picture of a timeline, for text and SVG: a bar for each task, and the style of each kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxpp_flax.messages import amount
from jaxpp_flax.schedules.simulation.costs import CostTable
from jaxpp_flax.schedules.simulation.simulate import Event, Timeline
from jaxpp_flax.schedules.task import MEANING, TaskKind

Panels = Sequence[tuple[str, Timeline]]
"""Titled timelines, drawn one under the other on one scale of time."""


@dataclass(frozen=True, slots=True)
class Units:
    """The units of a timeline's times and memory; by default those of its costs, which have no names."""

    time: str = ""
    memory: str = ""


NO_UNITS = Units()


@dataclass(frozen=True, slots=True)
class Style:
    """How bars of one kind look.

    Attributes:
        name: the kind, in words.
        letter: before the microbatch, in text.
        fill: the rest of a bar in text.
        colour: in a picture; told apart by readers with colour blindness, light enough for black figures.
    """

    name: str
    letter: str
    fill: str
    colour: tuple[int, int, int]


TASKS = {
    kind: Style(MEANING[kind].name, kind.value, *look)
    for kind, look in {
        TaskKind.FORWARD: ("-", (120, 170, 235)),
        TaskKind.BACKWARD: ("=", (240, 160, 90)),
        TaskKind.BACKWARD_INPUT: ("~", (245, 190, 130)),
        TaskKind.BACKWARD_WEIGHT: (":", (150, 205, 150)),
    }.items()
}
DARKER = "darker: a rank's later stage"


@dataclass(frozen=True, slots=True)
class Bar:
    """One task; a fused task is two bars. `colour` is as in SVG: later stages of a rank are darker."""

    rank: int
    style: Style
    start: float
    end: float
    stage: int
    microbatch: int
    colour: str


def bars(timeline: Timeline) -> list[Bar]:
    """Everything to be drawn of ``timeline``."""
    table = timeline.costs.table(timeline.num_stages, timeline.residuals)
    out: list[Bar] = []
    for rank, events in enumerate(timeline.events):
        stages = sorted({event.task.stage for event in events})
        for event in events:
            task, later = event.task, stages.index(event.task.stage) / max(1, len(stages) - 1)
            for kind, start, end in _pieces(event, table):
                style = TASKS[kind]
                out.append(Bar(rank, style, start, end, task.stage, task.microbatch, colour(style, later)))
    return out


def _pieces(event: Event, table: CostTable) -> list[tuple[TaskKind, float, float]]:
    task = event.task
    if task.kind is not TaskKind.FUSED:
        return [(task.kind, event.start, event.end)]
    # A measured fused task has one length: it is shared out as the costs say.
    forward, whole = (table.times[kind][task.stage] for kind in (TaskKind.FORWARD, TaskKind.FUSED))
    share = forward / whole if whole else 0.5
    middle = event.start + share * (event.end - event.start)
    return [(TaskKind.FORWARD, event.start, middle), (TaskKind.BACKWARD, middle, event.end)]


def colour(style: Style, later: float = 0.0) -> str:
    """The colour of a style; darker for a later stage of a rank, from 0 for the first one to 1 for the last one."""
    return "#" + "".join(f"{round(channel * (1.0 - 0.2 * later)):02x}" for channel in style.colour)


def styles_of(panels: Panels) -> list[Style]:
    """The styles that occur, for the legend."""
    seen = {bar.style for _, timeline in panels for bar in bars(timeline)}
    return [style for style in TASKS.values() if style in seen]


def several_stages(panels: Panels) -> bool:
    """True if some rank runs several stages: then the legend must explain this."""
    return any(len({event.task.stage for event in events}) > 1 for _, timeline in panels for events in timeline.events)


def labels(timeline: Timeline) -> Callable[[Bar], str]:
    """Return the labels of bars in text: long enough to distinguish a rank's stages."""
    stages = [sorted({event.task.stage for event in events}) for events in timeline.events]
    many = max(map(len, stages), default=1) > 2

    def label(bar: Bar) -> str:
        letter = bar.style.letter
        if many:
            return f"{bar.stage}{letter}{bar.microbatch}"
        return f"{letter.lower() if bar.stage != stages[bar.rank][0] else letter}{bar.microbatch}"

    return label


def shortest(timeline: Timeline) -> float:
    """The shortest task that gets its own label."""
    lengths = sorted(bar.end - bar.start for bar in bars(timeline) if bar.end > bar.start)
    return lengths[len(lengths) // 10] if lengths else 1.0


def caption(title: str, timeline: Timeline, units: Units) -> str:
    """One line on a timeline: its title and the figures that matter."""
    peak = max(timeline.peak_memory, default=0.0)
    length, held = in_unit(timeline.makespan, units.time), in_unit(peak, units.memory)
    return f"{title}: makespan {length}, bubble {timeline.bubble:.1%}, peak memory {held}"


def in_unit(value: float, unit: str) -> str:
    """A number with its unit, if it has one."""
    return amount(value, unit) if unit else f"{value:.4g}"
