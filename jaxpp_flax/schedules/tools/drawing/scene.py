"""The content of a picture of a timeline, for all formats: bars in rows, and their colours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxpp_flax.schedules.simulation.simulate import Event, Timeline
from jaxpp_flax.schedules.task import FusedTask, TaskKind

Panels = Sequence[tuple[str, Timeline]]
"""Titled timelines, drawn one under the other on one scale of time."""

OFFLOAD, FETCH = "to the host", "from the host"

COPY_COLOURS = {OFFLOAD: "#b8a1d9", FETCH: "#8fcfc9"}

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


@dataclass(frozen=True, slots=True)
class CopyBar:
    """One copy of a microbatch's residuals on a rank's host link; `kind` is its direction."""

    rank: int
    start: float
    end: float
    kind: str
    stage: int
    microbatch: int

    @property
    def label(self) -> str:
        return str(self.microbatch)

    @property
    def colour(self) -> str:
        return COPY_COLOURS[self.kind]


def copy_bars(timeline: Timeline) -> list[CopyBar]:
    """The copies between the ranks and their hosts; copies that take no time are left out."""
    out: list[CopyBar] = []
    for rank, copies in enumerate(timeline.host_events):
        for copy in copies:
            for kind, start, end in (
                (OFFLOAD, copy.offload_start, copy.offload_end),
                (FETCH, copy.fetch_start, copy.fetch_end),
            ):
                if end > start:
                    out.append(CopyBar(rank, start, end, kind, copy.stage, copy.microbatch))
    return out


def rows(timeline: Timeline) -> list[tuple[int, str | None]]:
    """The rows of a picture from top to bottom, as (rank, direction): tasks have None, then come the rank's copies."""
    used = {(bar.rank, bar.kind) for bar in copy_bars(timeline)}
    out: list[tuple[int, str | None]] = []
    for rank in range(len(timeline.events)):
        out += [(rank, None), *((rank, kind) for kind in (OFFLOAD, FETCH) if (rank, kind) in used)]
    return out


def copies_of(panels: Panels) -> list[str]:
    """The directions of copies that occur, for the legend."""
    seen = {bar.kind for _, timeline in panels for bar in copy_bars(timeline)}
    return [kind for kind in (OFFLOAD, FETCH) if kind in seen]


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
            for kind, start, end, label in _pieces(
                event, table.times[TaskKind.FORWARD][task.stage], table.fused[task.stage]
            ):
                shade = colour(kind, chunk, len(stages))
                out.append(Bar(event.rank, start, end, kind, task.stage, task.microbatch, label, shade))
    return out


def _pieces(event: Event, forward: float, fused: float) -> list[tuple[TaskKind, float, float, str]]:
    task = event.task
    number = str(task.microbatch)
    if not isinstance(task, FusedTask):
        return [(task.kind, event.start, event.end, number)]
    # A measured fused task has one length: it is shared out as the costs say.
    share = forward / fused if fused else 0.5
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
