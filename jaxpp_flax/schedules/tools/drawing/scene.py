"""The content of a picture of a timeline, for all formats: bars in rows, and their colours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxpp_flax.schedules.simulation.simulate import Event, Timeline
from jaxpp_flax.schedules.task import FusedTask, TaskKind

Panels = Sequence[tuple[str, Timeline]]
"""Titled timelines, drawn one under the other on one scale of time."""

KINDS = {
    TaskKind.FORWARD: ("forward", "F"),
    TaskKind.BACKWARD: ("backward", "B"),
    TaskKind.BACKWARD_INPUT: ("input gradient", "I"),
    TaskKind.BACKWARD_WEIGHT: ("weight gradient", "W"),
}

DARKER = "darker: a rank's later stage"

# A hue for each kind, light enough for black figures; told apart by readers with colour blindness.
_HUES = {
    TaskKind.FORWARD: (120, 170, 235),
    TaskKind.BACKWARD: (240, 160, 90),
    TaskKind.BACKWARD_INPUT: (245, 190, 130),
    TaskKind.BACKWARD_WEIGHT: (150, 205, 150),
}


@dataclass(frozen=True, slots=True)
class Bar:
    """One pass in a picture. A fused task is two bars, the second without a number."""

    rank: int
    start: float
    end: float
    kind: TaskKind
    stage: int
    microbatch: int
    label: str
    colour: str


def colour(kind: TaskKind, chunk: int, chunks: int) -> str:
    """The colour of a pass; later stages of a rank are darker."""
    shade = 1.0 - 0.2 * (chunk / (chunks - 1) if chunks > 1 else 0.0)
    return "#" + "".join(f"{round(channel * shade):02x}" for channel in _HUES[kind])


def bars(timeline: Timeline) -> list[Bar]:
    """Everything to be drawn of ``timeline``."""
    table = timeline.costs.table(timeline.num_stages, timeline.residuals)
    out: list[Bar] = []
    for events in timeline.events:
        stages = sorted({event.task.stage for event in events})
        for event in events:
            task = event.task
            chunk = stages.index(task.stage)
            for kind, start, end, label in _pieces(event, table.forward[task.stage], table.fused_backward[task.stage]):
                shade = colour(kind, chunk, len(stages))
                out.append(Bar(event.rank, start, end, kind, task.stage, task.microbatch, label, shade))
    return out


def _pieces(event: Event, forward: float, backward: float) -> list[tuple[TaskKind, float, float, str]]:
    task = event.task
    number = str(task.microbatch)
    if not isinstance(task, FusedTask):
        return [(task.kind, event.start, event.end, number)]
    # A measured fused task has one length: it is shared out as the costs say.
    share = forward / (forward + backward) if forward + backward else 0.5
    middle = event.start + share * (event.end - event.start)
    return [(TaskKind.FORWARD, event.start, middle, number), (TaskKind.BACKWARD, middle, event.end, number)]


def kinds_of(panels: Panels) -> list[TaskKind]:
    """The kinds that occur, for the legend."""
    seen = {bar.kind for _, timeline in panels for bar in bars(timeline)}
    return [kind for kind in TaskKind if kind in seen]


def several_stages(panels: Panels) -> bool:
    """True if some rank runs several stages: then the legend must explain this."""
    return any(len({event.task.stage for event in events}) > 1 for _, timeline in panels for events in timeline.events)


def shortest(timeline: Timeline) -> float:
    """The shortest pass that gets its own label."""
    lengths = sorted(bar.end - bar.start for bar in bars(timeline) if bar.end > bar.start)
    return lengths[len(lengths) // 10] if lengths else 1.0


def caption(title: str, timeline: Timeline) -> str:
    """One line on a timeline: its title and the figures that matter."""
    peak = max(timeline.peak_memory, default=0.0)
    return f"{title}: makespan {timeline.makespan:.4g}, bubble {timeline.bubble:.1%}, peak memory {peak:.4g}"
