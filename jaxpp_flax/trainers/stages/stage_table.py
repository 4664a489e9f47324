"""The table of stages that is printed before the first step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

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
) -> RenderableType:
    """Make the table: a row for each stage, and lines on the schedule and the plan. It fits into 80 columns.

    `memory` has the maximum bytes of each rank. With a plan, the table also has the bytes of each rank that it
    predicted, and a line tells what each stage does with its residuals.
    """
    ranks = any(stage.rank != stage.stage for stage in stages)
    predicted = () if plan is None else plan.peak_bytes
    # One column more than fits with two spaces between columns.
    table = Table(box=SIMPLE_HEAD, padding=(0, 0) if predicted else (0, 1, 0, 0))
    table.add_column("stage\non rank" if ranks else "stage", justify="right", no_wrap=True)
    table.add_column("blocks", min_width=11, overflow="fold")
    columns = ["param-\neters", "FLOPs a\nmicro-\nbatch", "of the\nmean", "sent a\nmicro-\nbatch", "memory a\ndevice"]
    for column in [*columns, *["planned"] * bool(predicted)]:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("devices", justify="right", min_width=7, overflow="fold")
    mean = sum(stage.flops for stage in stages) / len(stages)
    for stage in stages:
        table.add_row(
            f"{stage.stage} on {stage.rank}" if ranks else str(stage.stage),
            ", ".join(names) if len(names := stage.blocks) <= 3 else f"{names[0]} … {names[-1]} ({len(names)})",
            amount(stage.parameter_count, ""),
            amount(stage.flops, ""),
            f"{stage.flops / mean:.2f}" if mean else "",
            amount(stage.sent_bytes, "B"),
            amount(memory.get(stage.rank), "B"),
            *([amount(predicted[stage.rank], "B")] if predicted else []),
            _ranges([getattr(device, "id", device) for device in stage.devices]),
        )
    notes = [f"XLA's workspace is estimated.{_idle(stages, schedule, num_microbatches)}"]
    if plan is not None:
        notes += [*_residuals(plan), *plan.notes]
    return Group(Text(title), table, *map(Text, notes))  # a caption of the table would be as narrow as that


def _ranges(ids: Sequence[int]) -> str:
    """Return numbers in order, those that follow one another as a range.

    Example:
      >>> _ranges([0, 1]), _ranges([2, 3, 0, 1, 8]), _ranges(range(128, 256))
      ('0, 1', '0-3, 8', '128-255')
    """
    runs: list[list[int]] = []
    for number in sorted(ids):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(", ".join(map(str, run)) if len(run) < 3 else f"{run[0]}-{run[-1]}" for run in runs)


def _residuals(plan: Plan) -> list[str]:
    """Return a line that tells what the stages do with their residuals; none if all of them are kept."""
    if plan.residuals is None or plan.residuals.is_kept:
        return []
    stages_of: dict[str, list[int]] = {}
    for number, stage in enumerate(plan.residuals.stages):
        stages_of.setdefault(describe(stage), []).append(number)
    told = [f"{what} (stage{'s' * (len(of) > 1)} {_ranges(of)})" for what, of in stages_of.items()]
    return [f"residuals: {'; '.join(told)}"]


def _idle(stages: Sequence[StageSummary], schedule: Schedule, num_microbatches: int) -> str:
    """Return a sentence on the schedule's idle time: a third of a stage's operations are its forward."""
    thirds = [stage.flops / 3 for stage in stages]
    if not any(thirds) or len(thirds) != schedule.num_stages:
        return ""
    costs = Costs(forward=thirds, backward_input=thirds, backward_weight=thirds)
    bubble = simulate(schedule, costs, num_microbatches=num_microbatches).bubble
    return f" If time follows FLOPs, ranks are idle for {bubble:.0%} of a step."
