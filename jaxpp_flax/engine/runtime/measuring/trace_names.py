"""The names of tasks and transfers in a trace of XLA's profiler, while a profile runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from jax.profiler import TraceAnnotation

from jaxpp_flax.engine.program.program import Program, Run, Transfer

__all__ = ["instruction_names", "is_profiled", "named"]

Step = Callable[[list[Any]], None]


def is_profiled() -> bool:
    """Return True while a profile runs in this process, no matter what began it."""
    return TraceAnnotation.is_enabled()


def instruction_names(program: Program) -> Iterator[str]:
    """Yield the name of each instruction of a program for a trace; "" for one without work."""
    for instruction in program.instructions:
        if isinstance(instruction, Transfer):
            yield f"transfer {instruction.source} to {instruction.target}"
        elif isinstance(instruction, Run):
            task = program.tasks[instruction.task]
            yield task.name if task.stage is None else f"{task.name} microbatch {instruction.microbatch}"
        else:
            yield ""


def named(program: Program, steps: Sequence[Step | None]) -> list[Step | None]:
    """Return the runtime's steps, one for each instruction, so that each dispatch has its name in the trace."""
    return [
        step if step is None or not name else partial(_run_named, name, step)
        for name, step in zip(instruction_names(program), steps, strict=True)
    ]


def _run_named(name: str, step: Step, environment: list[Any]) -> None:
    with TraceAnnotation(name):
        step(environment)
