"""JAX's switches for debugging: `debug_nans` and `debug_infs` name the task that errs; `disable_jit` is refused."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp_flax.engine.program.program import Program, Run

__all__ = ["kinds_looked_for", "looking_away", "refuse_disabled_jit", "watched"]

Step = Callable[[list[Any]], None]


def refuse_disabled_jit(what: str) -> None:
    """Refuse to compile `what` while `jax.disable_jit` is on."""
    if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
        raise RuntimeError(
            f"jax.disable_jit is on (or JAX_DISABLE_JIT is set), but {what} runs as compiled programs, one for each "
            "stage: switch it off around this call; to go through the step operation by operation, call the function "
            "itself on plain arrays."
        )


def kinds_looked_for() -> tuple[str, ...]:
    """Return the kinds, "nan" and "inf", that `jax.debug_nans` and `jax.debug_infs` ask for now.

    Example:
      >>> with jax.debug_nans(True):
      ...     kinds_looked_for()
      ('nan',)
    """
    switches = {"nan": jax.config.jax_debug_nans, "inf": jax.config.jax_debug_infs}  # pyright: ignore[reportAttributeAccessIssue]
    return tuple(kind for kind, is_on in switches.items() if is_on)


@contextmanager
def looking_away() -> Generator[None]:
    """Stop JAX's own search for special values: arguments may hold them, and its error would name no task."""
    if not kinds_looked_for():
        yield
        return
    with jax.debug_nans(False), jax.debug_infs(False):
        yield


def watched(program: Program, steps: Sequence[Step | None]) -> Sequence[Step | None]:
    """Return the runtime's steps so that they look for the special values that the switches ask for now.

    The error names the task that made the first one. As under `jax.jit`, what a task makes and does not return may hold
    them; what goes from one task to another may not. The step waits for every task, so it is slower than others.

    Args:
      program: the program that runs.
      steps: the runtime's steps, one for each instruction; None for work of other processes.
    """
    kinds = kinds_looked_for()
    if not kinds:
        return steps
    return [
        partial(_run_watched, kinds, program, instruction, step)
        if step is not None and isinstance(instruction, Run)
        else step
        for instruction, step in zip(program.instructions, steps, strict=True)
    ]


def _run_watched(kinds: Sequence[str], program: Program, run: Run, step: Step, environment: list[Any]) -> None:
    step(environment)
    kind = next(filter(None, (_found(kinds, environment[value]) for value in run.outputs)), "")
    if kind:
        task = program.tasks[run.task]
        stage = "" if task.stage is None else f", stage {task.stage}, microbatch {run.microbatch}"
        raise FloatingPointError(
            f"invalid value ({kind}) encountered in task {task.name} (rank {task.rank}{stage}). To find the operation, "
            "run the same step under `jax.jit`, with the same switch."
        )


def _found(kinds: Sequence[str], array: Any) -> str:
    """Return the first of the kinds that an array holds in this process, or "" if there is none."""
    if not jnp.issubdtype(array.dtype, np.inexact):
        return ""
    tests = {"nan": np.isnan, "inf": np.isinf}
    shards = [np.asarray(shard.data) for shard in array.addressable_shards]
    return next((kind for kind in kinds if any(tests[kind](shard).any() for shard in shards)), "")
