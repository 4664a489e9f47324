"""Measure a real step: the start and the end of each task on each rank.

Each rank runs in a thread of its own, and waits for one task before it starts the next. So start and end are the times
of the work itself. Waiting costs some overlap of dispatch with work; the tasks' times and the idle gaps between them
are real.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxpp_flax.engine.program.program import Program, Run, Transfer
from jaxpp_flax.schedules.task import FusedTask, Task, TaskKind

__all__ = ["TaskTiming", "run_profiled"]

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
    mailbox = _Mailbox()
    cores = threading.Semaphore(program.num_ranks if at_once is None else at_once)
    timings: list[list[TaskTiming]] = [[] for _ in range(program.num_ranks)]
    numbered = list(enumerate(program.instructions))
    mine: list[list[int]] = [[] for _ in range(program.num_ranks)]
    for number, instruction in numbered:
        if isinstance(instruction, Transfer):
            mine[instruction.source].append(number)
            mine[instruction.target].append(number)
        else:
            mine[instruction.rank].append(number)
    begin = time.perf_counter()

    def send(number: int, instruction: Transfer) -> None:
        # The runtime's step copies within one environment; here the received slots may still be in use.
        apart = _Overlay(environment)
        steps[number](apart)  # type: ignore[arg-type]
        copies = [apart.written[slot] for slot in instruction.received]
        for copy in copies:
            copy.block_until_ready()
        mailbox.post(number, copies)

    def run(rank: int) -> None:
        try:
            for number in mine[rank]:
                instruction = program.instructions[number]
                if isinstance(instruction, Transfer):
                    if instruction.source == rank:
                        send(number, instruction)
                    if instruction.target == rank:
                        for slot, copy in zip(instruction.received, mailbox.take(number), strict=True):
                            environment[slot] = copy
                    continue
                if not isinstance(instruction, Run):
                    steps[number](environment)
                    continue
                with cores:
                    start = time.perf_counter() - begin
                    steps[number](environment)
                    for slot in instruction.outputs:
                        environment[slot].block_until_ready()
                    end = time.perf_counter() - begin
                task = _scheduled(program, instruction)
                if task is not None:
                    timings[rank].append(TaskTiming(rank=rank, task=task, start=start, end=end))
        except BaseException as error:
            mailbox.fail(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(program.num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if mailbox.failure is not None:
        raise RuntimeError(
            "a task failed while the step was measured; its error is above this one, and is to be mended"
        ) from mailbox.failure
    return [timing for rank in timings for timing in rank]


class _Overlay:
    """Reads from the environment, but keeps writes apart."""

    def __init__(self, environment: list[Any]) -> None:
        self.environment = environment
        self.written: dict[int, Any] = {}

    def __getitem__(self, slot: int) -> Any:
        return self.environment[slot]

    def __setitem__(self, slot: int, value: Any) -> None:
        self.written[slot] = value


def _scheduled(program: Program, run: Run) -> Task | FusedTask | None:
    task = program.tasks[run.task]
    if task.stage is None or task.kind is None:
        return None
    if task.fused:
        forward = Task(TaskKind.FORWARD, task.stage, run.microbatch)
        return FusedTask(forward, Task(TaskKind.BACKWARD, task.stage, run.microbatch))
    return Task(task.kind, task.stage, run.microbatch)
