"""Schedules as CSV files, in the compute format of ``torch.distributed.pipelining``.

A file has a row for each rank and a cell for each step: ``0F0``, ``1B0``, ``1I0``, ``1W0`` (stage,
letter, microbatch). A cell is empty if the rank idles.
"""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Iterator
from pathlib import Path

from jaxpp_flax.schedules.errors import ScheduleError
from jaxpp_flax.schedules.families.custom import CustomSchedule
from jaxpp_flax.schedules.schedule import Schedule, TaskLists, task_lists
from jaxpp_flax.schedules.simulation.costs import Costs
from jaxpp_flax.schedules.simulation.simulate import simulate
from jaxpp_flax.schedules.task import Task, TaskKind, flatten

_CELL = re.compile(r"(\d+)([FBIW])(\d+)")
_OVERLAPPED = re.compile(r"\((.*)\)OVERLAP_F_B")


def parse_cell(cell: str, where: str) -> Iterator[Task]:
    """Yield the tasks of a cell, such as ``1F0``; ``where`` it stands is for messages."""
    cell = cell.strip()
    overlapped = _OVERLAPPED.fullmatch(cell)
    if overlapped:
        for part in overlapped[1].split(";"):
            yield from parse_cell(part, where)
        return
    if not cell:
        return
    match = _CELL.fullmatch(cell)
    if match is None:
        raise ScheduleError(
            f"{where}: {cell!r} is not a task. Write stage, letter (F, B, I or W) and microbatch, as in 1F0; "
            "leave idle cells empty, and leave out sends and receives: they follow from the tasks"
        )
    yield Task(TaskKind(match[2]), int(match[1]), int(match[3]))


def read_csv(path: str | os.PathLike[str]) -> CustomSchedule:
    """Read the schedule in a CSV file, and validate it.

    A split backward of stage 0 is made whole. The last stage is fused if its backwards directly
    follow its forwards: see :func:`normalize`. A cell of the form ``(0F4;3B1)OVERLAP_F_B`` is read
    as two tasks, one after the other. A file with a wrong cell, or without a legal schedule, raises
    :class:`ScheduleError`.

    >>> import tempfile, pathlib
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "mine.csv"
    >>> _ = file.write_text("0F0,0F1,,0B0,0B1\\n,1F0,1B0,1F1,1B1\\n")
    >>> read_csv(file).tasks(2)[1]
    [FusedTask(fwd_1__0, bwd_1__0), FusedTask(fwd_1__1, bwd_1__1)]
    """
    lists: list[list[Task]] = []
    with Path(path).open(newline="") as file:
        for row, cells in enumerate(csv.reader(file)):
            if cells:
                lists.append(
                    [
                        task
                        for column, cell in enumerate(cells)
                        for task in parse_cell(cell, f"{os.fspath(path)}, row {row + 1}, column {column + 1}")
                    ]
                )
    return CustomSchedule(lists)


def write_csv(
    schedule: Schedule | TaskLists,
    path: str | os.PathLike[str],
    num_microbatches: int | None = None,
) -> None:
    """Write a schedule as CSV. A task's column is the step in which it starts if every task takes one step.

    Args:
        schedule: a :class:`Schedule`, or each rank's tasks.
        path: the file, overwritten.
        num_microbatches: the number of microbatches of a :class:`Schedule`; by default its own number, if it has one.
    """
    lists, _ = task_lists(schedule, num_microbatches)
    step = simulate([list(flatten(tasks)) for tasks in lists], Costs(backward=1.0))
    rows: list[list[str]] = []
    for events in step.events:
        row = [""] * int(step.makespan)
        for event in events:
            row[int(event.start)] = event.task.cell
        rows.append(row)
    with Path(path).open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)
