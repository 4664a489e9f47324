"""The instruction loop: runs a compiled program over an environment of slots, and never waits for a result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxpp_flax.engine._compat import copy_arrays
from jaxpp_flax.engine.compile import Executables
from jaxpp_flax.engine.mesh import RankMeshes
from jaxpp_flax.engine.profile import TaskTiming, run_profiled
from jaxpp_flax.engine.program import Free, Program, Run, Transfer

__all__ = ["Runtime"]

Environment = list[Any]
Step = Callable[[Environment], None]


class Runtime:
    """A program bound to its executables; `run` is called once per step.

    Each instruction becomes one closure over plain integers, so that a step evaluates nothing but calls, copies and
    list accesses.
    """

    def __init__(self, program: Program, executables: Executables, mesh: RankMeshes) -> None:
        self.program = program
        self._steps = [
            self._bind(number, instruction, executables, mesh)
            for number, instruction in enumerate(program.instructions)
        ]
        self._indices = self._place_indices(mesh)

    def _place_indices(self, mesh: RankMeshes) -> dict[int, jax.Array]:
        """The microbatch index as a device scalar on each rank, made once: no step pays for it."""
        placed: dict[int, jax.Array] = {}
        for (rank, microbatch), slot in self.program.indices.items():
            sharding = NamedSharding(mesh.unstack[rank], jax.sharding.PartitionSpec())
            placed[slot] = jax.device_put(jax.numpy.int32(microbatch), sharding)
        return placed

    def _bind(
        self, number: int, instruction: Run | Transfer | Free, executables: Executables, mesh: RankMeshes
    ) -> Step:
        if isinstance(instruction, Run):
            return _bind_run(executables.tasks[instruction.task], instruction.inputs, instruction.outputs)
        if isinstance(instruction, Transfer):
            target = mesh.unstack[instruction.target]
            shardings = [NamedSharding(target, spec) for spec in executables.transfer_specs[number]]
            return _bind_transfer(instruction.sent, instruction.received, shardings)
        return _bind_free(instruction.slots, instruction.delete)

    def run(self, environment: Environment) -> None:
        """Run one step; `environment` holds the arguments in their slots and receives the results in theirs."""
        for slot, index in self._indices.items():
            environment[slot] = index
        for step in self._steps:
            step(environment)

    def profile(self, environment: Environment, at_once: int | None = None) -> list[TaskTiming]:
        """Run one step as `run` does, measuring when each task of the loop ran; at most `at_once` at a time."""
        for slot, index in self._indices.items():
            environment[slot] = index
        return run_profiled(self.program, self._steps, environment, at_once)


def _bind_run(executable: Any, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Step:
    def step(environment: Environment) -> None:
        results = executable(*[environment[slot] for slot in inputs])
        for slot, result in zip(outputs, results, strict=True):
            environment[slot] = result

    return step


def _bind_transfer(sent: tuple[int, ...], received: tuple[int, ...], shardings: Sequence[Any]) -> Step:
    targets = list(shardings)

    def step(environment: Environment) -> None:
        for slot, copy in zip(received, copy_arrays([environment[slot] for slot in sent], targets), strict=True):
            environment[slot] = copy

    return step


def _bind_free(slots: tuple[int, ...], delete: tuple[int, ...]) -> Step:
    def step(environment: Environment) -> None:
        for slot in delete:
            environment[slot].delete()
        for slot in slots:
            environment[slot] = None

    return step
