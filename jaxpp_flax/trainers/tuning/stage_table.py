"""The table of stages that is printed before the first step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from jaxpp_flax.messages import amount

__all__ = ["stage_table"]


def stage_table(stages: Sequence[Any], memory: Mapping[int, int], title: str = "Pipeline") -> Table:
    """Make a table of the engine's summaries: FLOPs and bytes sent for one microbatch, memory of the rank.

    Args:
      stages: `StageSummary`s.
      memory: the maximum bytes of each rank.

    Example:
      >>> stage_table([], {}).row_count
      0
    """
    table = Table(title=title, title_justify="left")
    for column, side in (("stage", "right"), ("rank", "right"), ("blocks", "left"), ("parameters", "right")):
        table.add_column(column, justify=side)  # type: ignore[arg-type]
    for column in ("size", "FLOPs", "sent", "memory", "devices"):
        table.add_column(column, justify="right")
    for stage in stages:
        table.add_row(
            str(stage.stage),
            str(stage.rank),
            _blocks(stage.blocks),
            f"{stage.parameter_count:,}",
            amount(stage.parameter_bytes, "B"),
            amount(stage.flops, ""),
            amount(stage.sent_bytes, "B"),
            amount(memory.get(stage.rank), "B"),
            _devices(stage.devices),
        )
    return table


def _blocks(names: Sequence[str]) -> str:
    if len(names) <= 3:
        return ", ".join(names)
    return f"{names[0]} … {names[-1]} ({len(names)})"


def _devices(devices: Any) -> str:
    if isinstance(devices, (tuple, list)):
        return ", ".join(str(getattr(device, "id", device)) for device in devices)
    return str(devices)
