"""Measure a real step: the start and the end of each task on each rank, or the time of each task alone.

`run_profiled` runs each rank in a thread of its own, which waits for one task before it starts the next. So start and
end are the times of the work itself. Waiting costs some overlap of dispatch with work; the tasks' times and the idle
gaps between them are real.

`run_timed`, inside `collect_task_times_ms`, waits for each task before it starts the next one on any rank. Nothing
overlaps, so such a step is slower than others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax

from jaxpp_flax.engine.program.program import Program, Run, Transfer
from jaxpp_flax.schedules.task import FusedTask, Task

__all__ = ["TaskTiming", "collect_task_times_ms", "collector", "run_profiled", "run_timed"]

_WAIT_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True)
class TaskTiming:
    """A run of one task of the loop; `start` and `end` in seconds since the step began."""

    rank: int
    task: Task | FusedTask
    start: float
    end: float


class _Mailbox:
    """The values that ranks send to one another, by the number of the transfer."""

    def __init__(self) -> None:
        self._arrived: dict[int, Any] = {}
        self._condition = threading.Condition()
        self.failure: BaseException | None = None

    def post(self, number: int, values: Any) -> None:
        with self._condition:
            self._arrived[number] = values
            self._condition.notify_all()

    def fail(self, error: BaseException) -> None:
        with self._condition:
            self.failure = self.failure or error
            self._condition.notify_all()

    def take(self, number: int) -> Any:
        with self._condition:
            done = self._condition.wait_for(
                lambda: number in self._arrived or self.failure is not None, timeout=_WAIT_SECONDS
            )
            if self.failure is not None:
                raise RuntimeError(
                    "another rank failed while its task was measured; its error is above this one, and is to be mended"
                ) from self.failure
            if not done:
                raise TimeoutError(
                    f"the step was measured, and what transfer {number} of its program brings did not arrive within "
                    f"{_WAIT_SECONDS:.0f} s: the rank that sends it still runs a task, or waits for ever. Measure a "
                    "smaller batch or fewer microbatches; `compiled.as_text('program')` lists the transfers."
                )
            return self._arrived.pop(number)


def run_profiled(
    program: Program,
    steps: list[Callable[[list[Any]], None]],
    environment: list[Any],
    at_once: int | None = None,
) -> list[TaskTiming]:
    """Run one step over `environment`, each rank in a thread of its own, and time the loop's tasks.

    Args:
      program: the program that runs.
      steps: the runtime's steps, one for each instruction.
      environment: arguments and indices in their slots; receives the results.
      at_once: the number of tasks that may run at a time, over all ranks. If ranks are virtual devices on fewer cores,
        pass the number of cores: then a task's time does not include its wait for a core.

    Raises:
      RuntimeError: if a task failed; the failure is the cause.
    """
    step = _MeasuredStep(program, steps, environment, program.num_ranks if at_once is None else at_once)
    threads = [threading.Thread(target=step.run_rank, args=(rank,), daemon=True) for rank in range(program.num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if step.mailbox.failure is not None:
        raise RuntimeError(
            "a task failed while the step was measured; its error is above this one, and is to be mended"
        ) from step.mailbox.failure
    return [timing for rank in step.timings for timing in rank]


class _MeasuredStep:
    """One step that is measured: its ranks run in threads, and share the environment, the cores and the mailbox."""

    def __init__(
        self, program: Program, steps: list[Callable[[list[Any]], None]], environment: list[Any], cores: int
    ) -> None:
        self.program, self.steps, self.environment = program, steps, environment
        self.cores = threading.Semaphore(cores)
        self.mailbox = _Mailbox()
        self.timings: list[list[TaskTiming]] = [[] for _ in range(program.num_ranks)]
        self.begin = time.perf_counter()

    def run_rank(self, rank: int) -> None:
        """Run the instructions of one rank in order."""
        try:
            for number, instruction in enumerate(self.program.instructions):
                if isinstance(instruction, Transfer):
                    self._transfer(rank, number, instruction)
                elif instruction.rank == rank and isinstance(instruction, Run):
                    self._task(number, instruction)
                elif instruction.rank == rank:
                    self.steps[number](self.environment)
        except BaseException as error:
            self.mailbox.fail(error)

    def _transfer(self, rank: int, number: int, transfer: Transfer) -> None:
        if transfer.source == rank:
            # The runtime's step copies within one environment; here the received slots may still be in use.
            apart = _Overlay(self.environment)
            self.steps[number](apart)  # type: ignore[arg-type]
            copies = [apart.written[slot] for slot in transfer.received]
            for copy in copies:
                copy.block_until_ready()
            self.mailbox.post(number, copies)
        if transfer.target == rank:
            for slot, copy in zip(transfer.received, self.mailbox.take(number), strict=True):
                self.environment[slot] = copy

    def _task(self, number: int, run: Run) -> None:
        with self.cores:
            start = time.perf_counter() - self.begin
            self.steps[number](self.environment)
            for slot in run.outputs:
                self.environment[slot].block_until_ready()
            end = time.perf_counter() - self.begin
        task = self.program.tasks[run.task].scheduled(run.microbatch)
        if task is not None:
            self.timings[run.rank].append(TaskTiming(rank=run.rank, task=task, start=start, end=end))


class _Overlay:
    """Reads from the environment, but keeps writes apart."""

    def __init__(self, environment: list[Any]) -> None:
        self.environment = environment
        self.written: dict[int, Any] = {}

    def __getitem__(self, slot: int) -> Any:
        return self.environment[slot]

    def __setitem__(self, slot: int, value: Any) -> None:
        self.written[slot] = value


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


def run_timed(
    program: Program, steps: Sequence[Callable[[list[Any]], None] | None], environment: list[Any], times: TaskTimes
) -> None:
    """Run one step over `environment`, one task at a time, adding each task's milliseconds to `times`."""
    for instruction, step in zip(program.instructions, steps, strict=True):
        if step is None:
            continue
        if not isinstance(instruction, Run):
            step(environment)
            continue
        jax.block_until_ready([environment[slot] for slot in instruction.inputs])
        begin = time.perf_counter()
        step(environment)
        jax.block_until_ready([environment[slot] for slot in instruction.outputs])
        name = program.tasks[instruction.task].name
        times.setdefault(name, []).append((time.perf_counter() - begin) * 1e3)
