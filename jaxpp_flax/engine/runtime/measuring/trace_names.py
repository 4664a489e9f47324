"""The names of tasks and transfers in a trace of XLA's profiler, while a profile runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jax.profiler import TraceAnnotation

from jaxpp_flax.engine.program.program import Program, Run, Transfer

__all__ = ["instruction_names", "is_profiled", "run_named"]

Name = tuple[str, dict[str, Any]]


def is_profiled() -> bool:
    """Return True while a profile runs in this process, no matter what began it."""
    return TraceAnnotation.is_enabled()


def instruction_names(program: Program, blocks: Mapping[int, Sequence[str]]) -> Iterator[Name | None]:
    """Yield each instruction's name and its facts for a trace; None for an instruction without work.

    Args:
      program: the program that runs.
      blocks: the names of the user's blocks, by task.
    """
    for instruction in program.instructions:
        if isinstance(instruction, Transfer):
            yield f"transfer {instruction.source} to {instruction.target}", {"values": len(instruction.sent)}
        elif isinstance(instruction, Run):
            task = program.tasks[instruction.task]
            facts: dict[str, Any] = {"rank": instruction.rank}
            if task.stage is None:
                yield task.name, facts
            else:
                facts |= {"stage": task.stage, "microbatch": instruction.microbatch}
                if instruction.task in blocks:
                    # The profiler separates the facts by these characters.
                    facts["blocks"] = re.sub("[,#=]", "_", " ".join(blocks[instruction.task]))
                yield f"{task.name} microbatch {instruction.microbatch}", facts
        else:
            yield None


def run_named(
    names: Sequence[Name | None], steps: Sequence[Callable[[list[Any]], None] | None], environment: list[Any]
) -> None:
    """Run one step over `environment`; each dispatch has its name in the trace."""
    for name, step in zip(names, steps, strict=True):
        if step is None:
            continue
        if name is None:
            step(environment)
            continue
        with TraceAnnotation(name[0], **name[1]):
            step(environment)
