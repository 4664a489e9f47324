"""The distinct tasks of a compiled step: what the compiler says of each."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxpp_flax._compat_xla.programs import Collective, Copy, ProgramText, read_program
from jaxpp_flax.engine.program.program import ProgramTask
from jaxpp_flax.engine.summary import costs_of

__all__ = ["CompiledTask", "Exchange", "TaskText", "exchanges", "read_task"]


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """The collectives of one kind over the same mesh axes in one task.

    Attributes:
      kind: such as "all-gather".
      axes: the mesh axes that they join; empty if the compiler does not say.
      count: how many a run of the task does.
      nbytes: the bytes of all of them: of the whole array on each device that is gathered or reduced.
      asynchronous: how many of them run beside other operations.
      work_beside: the operations that the schedule puts between the start and the end of these, all together.
    """

    kind: str
    axes: tuple[str, ...]
    count: int
    nbytes: int
    asynchronous: int
    work_beside: int


@dataclass(frozen=True, kw_only=True)
class CompiledTask:
    """A program that XLA compiled; several tasks of a step may share it.

    Attributes:
      names: the tasks, such as "fwd_0".
      ranks: the ranks that run it.
      runs: how often a step runs it, on all ranks together.
      operations: of the scheduled program; those of a loop's body count once.
      seconds: of one run, by the compiler's cost model: one operation after the other, without the collectives that
        run beside others. None if the compiler has no such model.
      compile_seconds: how long XLA took; None if that is not known.
      exchanges: its collectives.
      copies: the copies of its arguments that the compiler adds, and of values to the host and back.
      argument_bytes, result_bytes: on each device, as the compiler lays the arrays out.
      aliased_bytes: the bytes of arguments whose memory the results take over.
      workspace_bytes: what it holds while it runs, beside arguments and results.
      code_bytes: of the program itself, in the device's memory.
    """

    names: tuple[str, ...]
    ranks: tuple[int, ...]
    runs: int
    operations: int
    seconds: float | None
    compile_seconds: float | None
    exchanges: tuple[Exchange, ...]
    copies: tuple[Copy, ...]
    argument_bytes: int
    result_bytes: int
    aliased_bytes: int
    workspace_bytes: int
    code_bytes: int

    @property
    def running_bytes(self) -> int:
        """What a run adds to the arguments that are there: the workspace, and results with memory of their own."""
        return self.workspace_bytes + max(0, self.result_bytes - self.aliased_bytes)


@dataclass(frozen=True)
class TaskText:
    """One executable: what it says of its memory, its seconds, and its program's text."""

    text: ProgramText
    memory: Any
    seconds: float | None


def read_task(executable: Any) -> TaskText:
    """Read a `jax.stages.Compiled`."""
    text = read_program(executable.as_text() or "")
    return TaskText(text, executable.memory_analysis(), _seconds(executable))


def _seconds(executable: Any) -> float | None:
    """Return the seconds of the compiler's cost model.

    It counts -1 second for each operation that it does not know (the ends of collectives that run beside others), so a
    sum below 0 has a whole number too little: a task takes less than a second.
    """
    found = costs_of(executable).get("optimal_seconds")
    if found is None or not math.isfinite(found) or found == 0:
        return None
    return found - math.floor(found) if found < 0 else found


def exchanges(collectives: Iterable[Collective], mesh: Mapping[str, int]) -> tuple[Exchange, ...]:
    """Add up collectives by their kind and axes; `mesh` has the axes of a rank's devices in order, with their sizes.

    Example:
      >>> found = exchanges([Collective(kind="all-reduce", nbytes=8, devices=(0, 2))] * 3, {"data": 2, "tensor": 2})
      >>> found[0].axes, found[0].count, found[0].nbytes
      (('data',), 3, 24)
    """
    found: defaultdict[tuple[str, tuple[str, ...]], list[Collective]] = defaultdict(list)
    for each in collectives:
        found[each.kind, _axes(each.devices, mesh)].append(each)
    return tuple(
        Exchange(
            kind=kind,
            axes=axes,
            count=sum(of.times for of in group),
            nbytes=sum(of.times * of.nbytes for of in group),
            asynchronous=sum(of.times for of in group if of.asynchronous),
            work_beside=sum(of.times * of.work_beside for of in group),
        )
        for (kind, axes), group in found.items()
    )


def _axes(devices: Sequence[int], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Return the axes along which the devices of a group differ."""
    if not devices or max(devices) >= math.prod(mesh.values()):
        return ()
    places = np.array(np.unravel_index(np.array(devices), tuple(mesh.values())))
    return tuple(name for name, row in zip(mesh, places, strict=True) if len(set(row.tolist())) > 1)


def compiled_task(
    read: TaskText, tasks: Sequence[ProgramTask], runs: int, mesh: Mapping[str, int], compile_seconds: float | None
) -> CompiledTask:
    """Return what the compiler says of an executable that some tasks share."""
    memory = read.memory
    return CompiledTask(
        names=tuple(dict.fromkeys(task.name for task in tasks)),
        ranks=tuple(sorted({task.rank for task in tasks})),
        runs=runs,
        operations=read.text.operations,
        seconds=read.seconds,
        compile_seconds=compile_seconds,
        exchanges=exchanges(read.text.collectives, mesh),
        copies=read.text.copies,
        argument_bytes=_of(memory, "argument_size_in_bytes"),
        result_bytes=_of(memory, "output_size_in_bytes"),
        aliased_bytes=_of(memory, "alias_size_in_bytes"),
        workspace_bytes=_of(memory, "temp_size_in_bytes"),
        code_bytes=_of(memory, "generated_code_size_in_bytes"),
    )


def _of(memory: Any, name: str) -> int:
    return int(getattr(memory, name, 0))
