"""The time that each task takes, collected from steps that run while a context is open.

The step waits for each task before it starts the next one. So nothing overlaps, and a time is the time of the work
alone. Such a step is slower than others; `Compiled.profile` measures the pipeline with its overlap.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax

from jaxpp_flax.engine.program.program import Program, Run

__all__ = ["collect_task_times_ms", "collector", "run_timed"]

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
    """Run one step over `environment`, one task at a time, adding each task's milliseconds to `times`.

    Args:
      program: the program that runs.
      steps: the runtime's steps, one for each instruction; None for instructions of other processes.
      environment: arguments and indices in their slots; receives the results.
      times: the times by name of the task.
    """
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
