"""A plan as JSON: one line for each block, for people and for diffs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from jaxpp_flax.messages import listed, near_names
from jaxpp_flax.planning.stages.policies import AssignmentError
from jaxpp_flax.schedules import CustomSchedule, Schedule, by_name, names
from jaxpp_flax.schedules.errors import ScheduleError
from jaxpp_flax.schedules.residuals import ResidualPlan, StageResiduals
from jaxpp_flax.schedules.task import flatten
from jaxpp_flax.schedules.tools.table import parse_cell

__all__ = ["as_text", "read"]

_FORMAT = "jaxpp_flax plan 1"
_ABOUT = "The plan of a training. You may edit the stages. Pass this file as plan=."
_NUMBERS = ("peak_bytes", "host_bytes", "ranks", "even_sizes")
_OPTIONAL = ("unit", "source", "num_microbatches", "layout", "fsdp", "seconds", *_NUMBERS, "notes")


def as_text(plan: Any) -> str:
    """Return the text of the file of a `Plan`."""
    head: dict[str, Any] = {"about": _ABOUT, "format": _FORMAT, "num_stages": plan.num_stages}
    defaults = {each.name: each.default for each in fields(plan)}
    head |= {name: value for name in _OPTIONAL if (value := getattr(plan, name)) not in (defaults[name], (), {})}
    if plan.schedule is not None:
        head["schedule"] = _written(plan.schedule, plan.num_microbatches)
    if plan.residuals is not None and not plan.residuals.is_kept:
        head["residuals"] = asdict(plan.residuals)
    known = ({f.name: getattr(b, f.name) for f in fields(b) if getattr(b, f.name) is not None} for b in plan.blocks)
    lines = ",\n".join(f"  {json.dumps(block)}" for block in known)
    top = "".join(f" {json.dumps(k)}: {json.dumps(v)},\n" for k, v in head.items())
    return f'{{\n{top} "blocks": [\n{lines}\n ]\n}}\n'


def read(path: Path) -> dict[str, Any]:
    """Return the arguments of the `Plan` in a file; its blocks are arguments of `PlannedBlock`.

    Raises:
      FileNotFoundError: if the file does not exist.
      AssignmentError: if the file holds no JSON, an unknown key, or lacks one.
    """
    if not path.is_file():
        others = sorted(p.name for p in path.parent.glob("*.json")) if path.parent.is_dir() else []
        hint = near_names(path.name, others)
        raise FileNotFoundError(f"the file of the plan, {os.fspath(path)!r}, does not exist.{hint}")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise AssignmentError(f"{os.fspath(path)} is no JSON: {error}.") from error
    try:
        return _read(found)
    except (AssignmentError, ScheduleError, TypeError) as error:
        raise AssignmentError(f"{os.fspath(path)}: {error}") from error


def _read(found: Any) -> dict[str, Any]:
    optional = ("about", "format", *_OPTIONAL, "schedule", "residuals")
    top = _keys(found, "the plan", required=("num_stages", "blocks"), optional=optional)
    if top.pop("format", _FORMAT) != _FORMAT:
        raise AssignmentError(
            f"the plan has format {found['format']!r}; this version reads {_FORMAT!r}. Make it again."
        )
    top.pop("about", None)
    if not isinstance(top["blocks"], list):
        raise AssignmentError(f"blocks is a {type(top['blocks']).__name__}; it must be a list of blocks.")
    blocks: list[dict[str, Any]] = []
    for number, item in enumerate(top["blocks"]):
        name = f" ({item['name']!r})" if isinstance(item, Mapping) and "name" in item else ""
        blocks.append(_keys(item, f"block {number}{name}", ("name", "stage"), ("forward", "backward")))
    top["blocks"] = blocks
    top |= {name: tuple(top[name]) for name in (*_NUMBERS, "notes") if name in top}
    if "schedule" in top:
        top["schedule"] = _schedule(top["schedule"], top["num_stages"])
    if "residuals" in top:
        top["residuals"] = _residuals(top["residuals"])
    return top


def _written(schedule: Schedule, num_microbatches: int | None) -> dict[str, Any]:
    """Return a schedule as JSON: a name and the number of ranks, or else the tasks of each rank."""
    for name in names(schedule.num_stages, schedule.num_ranks):
        if by_name(name, schedule.num_stages, schedule.num_ranks) == schedule:
            return {"name": name, "num_ranks": schedule.num_ranks}
    count = num_microbatches or getattr(schedule, "num_microbatches", None)
    if count is None:
        raise AssignmentError(f"the schedule {schedule!r} has no name: to save it, the plan needs num_microbatches.")
    return {"tasks": [" ".join(task.cell for task in flatten(tasks)) for tasks in schedule.tasks(count)]}


def _schedule(found: Any, num_stages: int) -> Schedule:
    top = _keys(found, "schedule", required=(), optional=("name", "num_ranks", "tasks"))
    if "tasks" in top:
        ranks = enumerate(top["tasks"])
        return CustomSchedule(
            [[t for cell in of.split() for t in parse_cell(cell, f"schedule, rank {rank}")] for rank, of in ranks]
        )
    if "name" not in top:
        raise AssignmentError("schedule has neither 'name' nor 'tasks'. Give one of them.")
    try:
        return by_name(top["name"], num_stages, top.get("num_ranks"))
    except ValueError as error:
        raise AssignmentError(f"schedule of the plan: {error}") from error


def _residuals(found: Any) -> ResidualPlan:
    top = _keys(found, "residuals", required=("stages",), optional=("fetch_ahead", "offload_within"))
    stages = [
        _keys(stage, f"stage {number} of residuals", (), ("recompute", "offload"))
        for number, stage in enumerate(top.pop("stages"))
    ]
    try:
        return ResidualPlan([StageResiduals(**stage) for stage in stages], **top)
    except (ScheduleError, TypeError) as error:
        raise AssignmentError(f"residuals of the plan: {error}") from error


def _keys(found: Any, what: str, required: Sequence[str], optional: Sequence[str]) -> dict[str, Any]:
    if not isinstance(found, Mapping):
        raise AssignmentError(
            f"{what} is a {type(found).__name__}; it must be an object with {listed(required or optional)}."
        )
    allowed = [*required, *optional]
    for key in found:
        if key not in allowed:
            hint = near_names(key, allowed)
            raise AssignmentError(f"{what} has the unknown key {key!r}.{hint} Keys: {listed(allowed, 20)}.")
    for key in required:
        if key not in found:
            raise AssignmentError(f"{what} has no {key!r}. Keys: {listed(allowed, 20)}.")
    return dict(found)
