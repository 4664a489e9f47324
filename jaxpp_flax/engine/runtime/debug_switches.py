"""JAX's switches for debugging: `debug_nans` and `debug_infs` work as in `jax.jit`; `disable_jit` is refused."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp_flax.engine.arrays.placing import place
from jaxpp_flax.engine.program.program import Free, Instruction, Program, Run

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
    """Stop JAX's own search for special values: arguments, and values that reach no result, may hold them."""
    if not kinds_looked_for():
        yield
        return
    with jax.debug_nans(False), jax.debug_infs(False):
        yield


@contextmanager
def watched(program: Program, steps: Sequence[Step | None], environment: list[Any]) -> Generator[Sequence[Step | None]]:
    """Look for the special values that the switches ask for, in one step of a program; give the steps to run for it.

    As under `jax.jit`, only special values that reach a result are an error; a masked one is not. The error names the
    task that made the first special value. The step waits for every task, so it is slower than others.

    Args:
      program: the program that runs.
      steps: the runtime's steps, one for each instruction; None for work of other processes.
      environment: arguments in their places; receives the results.
    """
    kinds = kinds_looked_for()
    if not kinds:
        yield steps
        return
    watch = _Watch(program, kinds)
    watch.keep_arguments(environment)
    yield [
        None if step is None else partial(watch.step, instruction, step)
        for instruction, step in zip(program.instructions, steps, strict=True)
    ]
    watch.check_results(environment)


@dataclass(eq=False)
class _Watch:
    """Watches one step of a program for some `kinds` of special values, "nan" and "inf"."""

    program: Program
    kinds: tuple[str, ...]
    first: str = ""  # what the first task did that made one

    def keep_arguments(self, environment: list[Any]) -> None:
        """Copy donated arguments, so that the step reuses the copies: with these switches `jax.jit` donates nothing."""
        deleted = {value for i in self.program.instructions if isinstance(i, Free) for value in i.delete}
        for value in (deleted | self.program.donated).intersection(self.program.preset):
            if environment[value] is not None:
                with looking_away():
                    environment[value] = place(environment[value], environment[value].sharding, may_alias=False)

    def step(self, instruction: Instruction, step: Step, environment: list[Any]) -> None:
        """Run one step; note the first task that makes a special value."""
        # JAX's own check would also refuse values that reach no result, and its error names no task.
        with looking_away():
            step(environment)
            if self.first or not isinstance(instruction, Run):
                return
            kind = next(filter(None, (self._kind_in(environment[value]) for value in instruction.outputs)), "")
        if kind:
            self.first = f"invalid value ({kind}) encountered in {self.program.task_text(instruction)}"

    def check_results(self, environment: list[Any]) -> None:
        """Refuse results that hold a special value."""
        results = (environment[value] for value in self.program.returned - self.program.preset.keys())
        with looking_away():
            if self.first and any(map(self._kind_in, results)):
                raise FloatingPointError(
                    f"{self.first}. To find the operation, run the same step under `jax.jit`, with the same switch."
                )

    def _kind_in(self, array: Any) -> str:
        """Return the first of the kinds that an array holds in this process, or "" if there is none."""
        if array is None or not jnp.issubdtype(array.dtype, np.inexact):
            return ""
        tests = {"nan": np.isnan, "inf": np.isinf}
        shards = [np.asarray(shard.data) for shard in array.addressable_shards]
        return next((kind for kind in self.kinds if any(tests[kind](shard).any() for shard in shards)), "")
