"""Measure a real step: the time of each task and of each transfer alone, put together to a timeline of the step.

In a step that is measured, a process waits for each instruction before it starts the next one. So nothing overlaps, and
each time is that of the work itself. `timeline` then puts the times together: it starts each task when its rank is free
and its inputs have arrived.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from jaxpp_flax.engine.program.program import Instruction, Program, Run, Transfer, Wait
from jaxpp_flax.processes.comparison import exchange_values
from jaxpp_flax.processes.group import ProcessGroup
from jaxpp_flax.schedules.task import Task

__all__ = [
    "TaskTiming",
    "Times",
    "arranged",
    "collect",
    "collect_task_times_ms",
    "gathered",
    "is_collecting",
    "timed",
    "timeline",
]

Step = Callable[[list[Any]], None]
# By the number of an instruction: when it began in this process and when it ended, in seconds of the host's clock.
Times = dict[int, tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class TaskTiming:
    """A run of one task of the loop; `start` and `end` in seconds since the step began."""

    rank: int
    task: Task
    start: float
    end: float


def timed(program: Program, steps: Sequence[Step | None], times: Times) -> list[Step | None]:
    """Return the runtime's steps so that one instruction runs at a time, and notes its times in `times`.

    The waits cannot form a circle: what an instruction needs was begun earlier in the one order of all processes.
    """
    return [
        partial(_time_one, times, number, instruction, step)
        if step is not None and isinstance(instruction, (Run, Transfer))
        else step
        for number, (instruction, step) in enumerate(zip(program.instructions, steps, strict=True))
    ]


def _time_one(times: Times, number: int, instruction: Instruction, step: Step, environment: list[Any]) -> None:
    # A place is None if its rank belongs to another process.
    reads = jax.block_until_ready([environment[value] for value in instruction.reads()])
    begin = time.time()
    step(environment)
    writes = jax.block_until_ready([environment[value] for value in instruction.writes()])
    # A process that has no part of a transfer passes it by; when it comes there says nothing of the transfer.
    if any(value is not None for value in (*reads, *writes)):
        times[number] = (begin, time.time())


def gathered(times: Times, group: ProcessGroup) -> Times:
    """Return the times of all processes, the same in each; every process calls this after the measured step.

    An instruction of several processes lasts from the last of its beginnings to the last of its ends: a receiver that
    waits for the sender's earlier work does not receive yet. The clocks of several hosts are compared as they are; an
    error of them changes the times of the transfers between these hosts, and no task's.
    """
    mine = [[number, *span] for number, span in times.items()]
    spans: Times = {}
    for answer in exchange_values(group, "the times of a measured step", mine):
        for number, begin, end in answer:
            others = spans.get(number, (begin, end))
            spans[number] = max(begin, others[0]), max(end, others[1])
    return spans


def timeline(program: Program, times: Mapping[int, tuple[float, float]]) -> list[TaskTiming]:
    """Put the times of a measured step together: return when each task of the loop runs if work overlaps as it may."""
    seconds = {number: max(end - begin, 0.0) for number, (begin, end) in times.items()}
    timings: list[TaskTiming] = []
    for number, (started, ended) in arranged(program, seconds).items():
        run = program.instructions[number]
        if isinstance(run, Run) and (scheduled := program.tasks[run.task].scheduled(run.microbatch)) is not None:
            timings.append(TaskTiming(rank=run.rank, task=scheduled, start=started, end=ended))
    return timings


def arranged(program: Program, seconds: Mapping[int, float]) -> Times:
    """Return when each run and each transfer begins and ends, if it takes its seconds and overlaps as it may.

    A task starts when its rank is free and its inputs have arrived, and a transfer when its values are there.
    """
    free = [0.0] * program.num_ranks
    ready: dict[int, float] = {}
    spans: Times = {}
    for number, instruction in enumerate(program.instructions):
        if isinstance(instruction, Wait):
            copied = max(ready.get(value, 0.0) for value in instruction.copies)
            free[instruction.rank] = max(free[instruction.rank], copied)
        if not isinstance(instruction, (Run, Transfer)):
            continue
        started = max((ready.get(value, 0.0) for value in instruction.reads()), default=0.0)
        if isinstance(instruction, Run):
            started = max(started, free[instruction.rank])
        ended = started + seconds.get(number, 0.0)
        ready.update(dict.fromkeys(instruction.writes(), ended))
        if isinstance(instruction, Run):
            free[instruction.rank] = ended
        spans[number] = started, ended
    return spans


TaskTimes = dict[str, list[float]]

# A context variable: each thread, and each asynchronous task, has its own.
_collector: ContextVar[TaskTimes | None] = ContextVar("jaxpp_flax_task_times", default=None)


@contextmanager
def collect_task_times_ms(enabled: bool = True) -> Generator[TaskTimes | None]:
    """Collect the time of every task that this thread's steps run, in milliseconds.

    Args:
      enabled: if False, nothing is measured and the context gives None.

    Yields:
      A dict that steps fill: for each task of this process's ranks (`fwd_0`, `bwd_0`, `init_0`, `outer_2`, ...), the
      times of its runs in order, one for each microbatch. An inner context collects into its own dict.

    Example:
      >>> import jax, jax.numpy as jnp, numpy as np
      >>> from jaxpp_flax.engine.jit import mpmd_jit
      >>> from jaxpp_flax import mark_stage_end
      >>> from jaxpp_flax import MpmdMesh
      >>> mesh = MpmdMesh(jax.sharding.Mesh(np.array(jax.devices()[:2]), ("stage",)), "stage")
      >>> forward = mpmd_jit(lambda w, x: mark_stage_end(x @ w[0]) @ w[1], mesh)
      >>> with collect_task_times_ms() as times:
      ...     _ = forward([jnp.eye(2), jnp.eye(2)], jnp.ones((1, 2)))
      >>> len(times["fwd_0"]), all(ms > 0 for ms in times["fwd_1"])
      (1, True)

    The name is that of NVIDIA's JaxPP.
    """
    if not enabled:
        yield None
        return
    times: TaskTimes = {}
    token = _collector.set(times)
    try:
        yield times
    finally:
        _collector.reset(token)


def collect(program: Program, times: Times) -> None:
    """Add the times of a step's tasks to the dict of the innermost open context of this thread."""
    by_name = _collector.get()
    for number, (begin, end) in times.items():
        instruction = program.instructions[number]
        if by_name is not None and isinstance(instruction, Run):
            by_name.setdefault(program.tasks[instruction.task].name, []).append((end - begin) * 1e3)


def is_collecting() -> bool:
    """Return whether this thread is inside `collect_task_times_ms`."""
    return _collector.get() is not None
