"""JAX's switches for debugging: `debug_nans` and `debug_infs` work as in `jax.jit`; `disable_jit` is refused."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp_flax.engine.arrays.placing import place
from jaxpp_flax.engine.program.program import Free, Program, Run, Transfer

__all__ = ["SpecialValues", "kinds_looked_for", "looking_away", "refuse_disabled_jit"]

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


@dataclass(eq=False)
class SpecialValues:
    """Watches one step of a program for NaNs or infinities.

    As under `jax.jit`, only special values that reach a result are an error; a masked one is not. The error names the
    task that made the first special value. The step waits for every task, so it is slower than others.

    Args:
      program: the program that runs.
      kinds: some of "nan" and "inf".
    """

    program: Program
    kinds: tuple[str, ...]
    _special: set[int] = field(default_factory=set[int])  # of the values that tasks make
    _first: str = ""

    @classmethod
    def wanted(cls, program: Program) -> SpecialValues | None:
        """Make a watch for the kinds that `jax.debug_nans` and `jax.debug_infs` ask for now, or None."""
        kinds = kinds_looked_for()
        return cls(program, kinds) if kinds else None

    def watching(self, steps: Sequence[Step | None]) -> list[Step | None]:
        """Return the runtime's steps, one for each instruction, each followed by a check of its outputs."""
        return [
            None if step is None else partial(self._step, instruction, step)
            for instruction, step in zip(self.program.instructions, steps, strict=True)
        ]

    def keep_arguments(self, environment: list[Any]) -> None:
        """Copy donated arguments, so that the step reuses the copies: with these switches `jax.jit` donates nothing."""
        deleted = {value for i in self.program.instructions if isinstance(i, Free) for value in i.delete}
        for value in (deleted | self.program.donated).intersection(self.program.preset):
            if environment[value] is not None:
                with looking_away():
                    environment[value] = place(environment[value], environment[value].sharding, may_alias=False)

    def finish(self) -> None:
        """Refuse results that hold such a value, naming the first task that made one."""
        if not self.program.returned.isdisjoint(self._special):
            raise FloatingPointError(
                f"{self._first}. To find the operation, run the same step under `jax.jit`, with the same switch."
            )

    def _step(self, instruction: Any, step: Step, environment: list[Any]) -> None:
        # JAX's own check would also refuse values that reach no result, and its error names no task.
        with looking_away():
            step(environment)
            if isinstance(instruction, Transfer):
                pairs = zip(instruction.sent, instruction.received, strict=True)
                self._special.update(received for sent, received in pairs if sent in self._special)
            elif isinstance(instruction, Run):
                found = {value: self._found(environment[value]) for value in instruction.outputs}
                self._special.update(value for value, kind in found.items() if kind)
                self._note(instruction, next(filter(None, found.values()), ""))

    def _note(self, run: Run, kind: str) -> None:
        if not kind or self._first:
            return
        task = self.program.tasks[run.task]
        stage = "" if task.stage is None else f", stage {task.stage}, microbatch {run.microbatch}"
        self._first = f"invalid value ({kind}) encountered in task {task.name} (rank {task.rank}{stage})"

    def _found(self, array: Any) -> str:
        """Return the first of the kinds that an array holds in this process, or ""."""
        if not jnp.issubdtype(array.dtype, np.inexact):
            return ""
        tests = {"nan": np.isnan, "inf": np.isinf}
        shards = [np.asarray(shard.data) for shard in array.addressable_shards]
        return next((kind for kind in self.kinds if any(tests[kind](shard).any() for shard in shards)), "")
