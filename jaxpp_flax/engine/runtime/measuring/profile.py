"""Measure a real step: the start and the end of each task on each rank, or the time of each task alone.

`run_profiled` runs each rank in a thread of its own, which waits for one task before it starts the next. So start and
end are the times of the work itself. Waiting costs some overlap of dispatch with work; the tasks' times and the idle
gaps between them are real. With several processes, each one measures its own ranks, and all get all times.

`timed`, inside `collect_task_times_ms`, waits for each task before it starts the next one on any rank. Nothing
overlaps, so such a step is slower than others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

import jax

from jaxpp_flax.engine.program.program import Program, Run, Transfer
from jaxpp_flax.schedules.task import FusedTask, Task

__all__ = ["TaskTiming", "collect_task_times_ms", "collector", "run_profiled", "timed"]

_WAIT_SECONDS = 600.0

Step = Callable[[Any], None]


@dataclass(frozen=True, kw_only=True)
class TaskTiming:
    """A run of one task of the loop; `start` and `end` in seconds since the step began."""

    rank: int
    task: Task | FusedTask
    start: float
    end: float


def run_profiled(
    program: Program,
    steps: Sequence[Step | None],
    environment: list[Any],
    ranks: Sequence[int],
    crossings: Sequence[int] = (),
) -> list[TaskTiming]:
    """Run one step over `environment`, each rank in a thread of its own, and time the loop's tasks.

    Args:
      program: the program that runs.
      steps: the runtime's steps, one for each instruction; None for work of other processes.
      environment: arguments and indices in their places; receives the results.
      ranks: the ranks of this process.
      crossings: the numbers of the transfers in which other processes take part, ascending. One thread begins them in
        this order, because some transports need one order in all processes.

    Returns:
      The times of the tasks of these ranks.

    Raises:
      RuntimeError: if a task failed; the failure is the cause.
    """
    step = _MeasuredStep(program, steps, environment, ranks, crossings)
    threads = [partial(step.run_rank, rank) for rank in ranks] + [step.run_crossings] * bool(crossings)
    for run in threads:
        # A daemon: after a failure, a thread may wait for another process forever.
        threading.Thread(target=step.run, args=(run,), daemon=True).start()
    for _ in threads:
        if (failure := step.ended.get()) is not None:
            raise RuntimeError(
                "a task failed while the step was measured; its error is above this one, and is to be mended"
            ) from failure
    return [timing for rank in ranks for timing in step.timings[rank]]


class _MeasuredStep:
    """One step that is measured: its ranks run in threads, and share the environment."""

    def __init__(
        self,
        program: Program,
        steps: Sequence[Step | None],
        environment: list[Any],
        own: Sequence[int],
        crossings: Sequence[int],
    ) -> None:
        self.program, self.steps, self.environment = program, steps, environment
        self.own = frozenset(own)
        self.ended: SimpleQueue[BaseException | None] = SimpleQueue()  # how each thread ended
        self.failed = False
        self.timings: dict[int, list[TaskTiming]] = {rank: [] for rank in own}
        transfers = [n for n, instruction in enumerate(program.instructions) if isinstance(instruction, Transfer)]
        self._arrived = {number: threading.Event() for number in transfers}
        self._reached = {number: threading.Event() for number in crossings}  # by the rank that sends
        self.begin = time.perf_counter()

    def run(self, part: Callable[[], None]) -> None:
        """Run a part of the step, and note how it ended."""
        try:
            part()
        except BaseException as error:
            self.ended.put(error)
            self.failed = True
            for event in (*self._arrived.values(), *self._reached.values()):
                event.set()
        else:
            self.ended.put(None)

    def run_rank(self, rank: int) -> None:
        """Run the instructions of one rank in order."""
        for number, (instruction, step) in enumerate(zip(self.program.instructions, self.steps, strict=True)):
            if step is None:
                continue
            if isinstance(instruction, Transfer):
                self._transfer(rank, number, instruction, step)
            elif instruction.rank == rank and isinstance(instruction, Run):
                self._task(instruction, step)
            elif instruction.rank == rank:
                step(self.environment)

    def run_crossings(self) -> None:
        """Begin the transfers between processes in order.

        The order cannot wait in a circle: what the next transfer sends needs only earlier instructions.
        """
        for number, reached in self._reached.items():
            transfer, step = self.program.instructions[number], self.steps[number]
            if isinstance(transfer, Transfer) and transfer.source in self.own:
                self._await(reached, number)
            if step is not None:
                step(self.environment)
            self._arrived[number].set()

    def _transfer(self, rank: int, number: int, transfer: Transfer, step: Step) -> None:
        if rank == transfer.source and number in self._reached:
            self._reached[number].set()
            self._await(self._arrived[number], number)  # the instructions that follow may free what is sent
        elif rank == transfer.source:
            step(self.environment)
            self._arrived[number].set()
        if rank == transfer.target:
            self._await(self._arrived[number], number)
            jax.block_until_ready([self.environment[value] for value in transfer.received])

    def _await(self, event: threading.Event, number: int) -> None:
        if not event.wait(_WAIT_SECONDS):
            raise TimeoutError(
                f"the step was measured, and what transfer {number} of its program brings did not arrive within "
                f"{_WAIT_SECONDS:.0f} s: the rank that sends it still runs a task, or waits for ever. Measure a "
                "smaller batch or fewer microbatches; `compiled.as_text()` lists the transfers."
            )
        if self.failed:
            raise RuntimeError("another rank failed while its task was measured")

    def _task(self, run: Run, step: Step) -> None:
        start = time.perf_counter() - self.begin
        step(self.environment)
        jax.block_until_ready([self.environment[value] for value in run.outputs])
        end = time.perf_counter() - self.begin
        scheduled = self.program.tasks[run.task].scheduled(run.microbatch)
        if scheduled is not None:
            self.timings[run.rank].append(TaskTiming(rank=run.rank, task=scheduled, start=start, end=end))


# -- the time of each task alone

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
      >>> from jaxpp_flax.engine.tracing.markers import mark_stage_end
      >>> from jaxpp_flax.engine.arrays.mesh import MpmdMesh
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


def collector() -> TaskTimes | None:
    """Return the dict of the innermost open context of this thread, or None."""
    return _collector.get()


def timed(program: Program, steps: Sequence[Step | None], times: TaskTimes) -> list[Step | None]:
    """Return the runtime's steps so that one task runs at a time, and adds its milliseconds to `times`."""
    return [
        partial(_time_one, times.setdefault(program.tasks[instruction.task].name, []), instruction, step)
        if step is not None and isinstance(instruction, Run)
        else step
        for instruction, step in zip(program.instructions, steps, strict=True)
    ]


def _time_one(times: list[float], run: Run, step: Step, environment: list[Any]) -> None:
    jax.block_until_ready([environment[value] for value in run.inputs])
    begin = time.perf_counter()
    step(environment)
    jax.block_until_ready([environment[value] for value in run.outputs])
    times.append((time.perf_counter() - begin) * 1e3)
