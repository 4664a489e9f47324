"""A timeline as a Chrome trace, which Perfetto (https://ui.perfetto.dev) opens."""

from __future__ import annotations

import json
from typing import Any

from jaxpp_flax.schedules.tools.drawing.scene import Panels


def chrome_trace(panels: Panels, microseconds: float = 1000.0) -> str:
    """The panels as JSON: a process for each panel, a thread and a memory counter for each rank.

    Args:
        panels: titled timelines.
        microseconds: length of one unit of time. 1e6 where costs are in seconds.
    """
    events: list[dict[str, Any]] = []
    for process, (title, timeline) in enumerate(panels):
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": title}})
        for rank, listed in enumerate(timeline.events):
            events.append(
                {"ph": "M", "name": "thread_name", "pid": process, "tid": rank, "args": {"name": f"rank {rank}"}}
            )
            for event in listed:
                task = event.task
                events.append(
                    {
                        "ph": "X",
                        "name": repr(task),
                        "cat": task.kind.value,
                        "pid": process,
                        "tid": rank,
                        "ts": event.start * microseconds,
                        "dur": (event.end - event.start) * microseconds,
                        "args": {"stage": task.stage, "microbatch": task.microbatch},
                    }
                )
            for time, held in timeline.memory(rank):
                events.append(
                    {
                        "ph": "C",
                        "name": f"activations of rank {rank}",
                        "pid": process,
                        "ts": time * microseconds,
                        "args": {"held": held},
                    }
                )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
