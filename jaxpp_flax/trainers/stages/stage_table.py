"""The table of stages that is printed before the first step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from jaxpp_flax.engine.summary import StageSummary
from jaxpp_flax.messages import amount
from jaxpp_flax.planning import Plan, describe
from jaxpp_flax.schedules import Costs, Schedule, simulate

__all__ = ["stage_table"]


def stage_table(
    stages: Sequence[StageSummary],
    memory: Mapping[int, int],
    title: str,
    schedule: Schedule,
    num_microbatches: int,
    plan: Plan | None = None,
) -> Table:
    """Make the table: a row for each stage, and a line on the schedule.

    `memory` has the maximum bytes of each rank. With a plan, the table also tells what each stage does with its
    residuals, and the bytes of each rank that it predicted.
    """
    table = Table(title=title, title_justify="left", caption_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    ranks = any(stage.rank != stage.stage for stage in stages)
    table.add_column("stage\non rank" if ranks else "stage", justify="right", no_wrap=True)
    table.add_column("blocks", min_width=11)
    for column in ("parameters", "FLOPs a\nmicro-\nbatch", "of the\nmean", "sent a\nmicro-\nbatch", "memory a\ndevice"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("devices", justify="right")
    residuals = None if plan is None or plan.residuals is None or plan.residuals.is_kept else plan.residuals
    predicted = () if plan is None else plan.peak_bytes
    for column in ("residuals",) * (residuals is not None) + ("predicted",) * bool(predicted):
        table.add_column(column, justify="right")
    mean = sum(stage.flops for stage in stages) / len(stages)
    for stage in stages:
        row = [
            f"{stage.stage} on {stage.rank}" if ranks else str(stage.stage),
            ", ".join(names) if len(names := stage.blocks) <= 3 else f"{names[0]} … {names[-1]} ({len(names)})",
            f"{stage.parameter_count:,}",
            amount(stage.flops, ""),
            f"{stage.flops / mean:.2f}" if mean else "",
            amount(stage.sent_bytes, "B"),
            amount(memory.get(stage.rank), "B"),
            ", ".join(str(getattr(device, "id", device)) for device in stage.devices),
        ]
        row += [describe(residuals.of(stage.stage))] if residuals is not None else []
        row += [amount(predicted[stage.rank], "B")] if predicted else []
        table.add_row(*row)
    notes = [f"Memory is without XLA's workspace.{_idle(stages, schedule, num_microbatches)}"]
    table.caption = "\n".join([*notes, *(plan.notes if plan is not None else ())])
    return table


def _idle(stages: Sequence[StageSummary], schedule: Schedule, num_microbatches: int) -> str:
    """Return a sentence on the schedule's idle time: a third of a stage's operations are its forward."""
    thirds = [stage.flops / 3 for stage in stages]
    if not any(thirds) or len(thirds) != schedule.num_stages:
        return ""
    costs = Costs(forward=thirds, backward_input=thirds, backward_weight=thirds)
    bubble = simulate(schedule, costs, num_microbatches=num_microbatches).bubble
    return f" If time follows FLOPs, ranks are idle for {bubble:.0%} of a step."
