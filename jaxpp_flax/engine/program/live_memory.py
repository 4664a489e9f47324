"""The bytes that are live on each rank while a program runs, on the devices and on the host."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from jaxpp_flax.engine.program.program import HOST_MEMORY, Free, Instruction, Program, Run, Wait
from jaxpp_flax.engine.tracing.ir import memory_kind_of
from jaxpp_flax.schedules.memory import Memory
from jaxpp_flax.schedules.task import TaskKind

__all__ = ["LiveMemory"]

_Microbatch = tuple[int, int]  # of a stage: the stage and the number
_NOTHING = 0, 0, False  # of a small value that nobody counts: the index of a microbatch


class LiveMemory:
    """The memory of the ranks while a program runs, in bytes on each device: the walk of `schedules.memory`.

    Call `hold` for the arguments, then `step` for each instruction in order.

    Attributes:
      devices: each rank's device memory, above the arguments. A donated argument frees memory.
      hosts: each rank's host memory: offloaded residuals, and results of tasks that lie there.
      microbatches: for each stage, the number of microbatches whose activations the devices hold.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self.devices = [Memory() for _ in range(program.num_ranks)]
        self.hosts = [Memory() for _ in range(program.num_ranks)]
        self.microbatches = defaultdict[int, Memory](Memory)
        self._held: dict[int, tuple[int, int, bool]] = {}  # by value: the rank, the bytes, and True for host memory
        self._activations: dict[int, _Microbatch] = {}  # the values of a forward's results
        self._counts = Counter[_Microbatch]()  # of them, those on the devices
        # Of each task, whether its results lie in host memory: found once, and read for every run.
        self._results_on_host = [[memory_kind_of(a.aval) is not None for a in t.graph.outputs] for t in program.tasks]

    def hold(self, value: int, rank: int, size: int, on_host: bool) -> None:
        """Note an argument: its bytes are not counted as live, but its donation frees them."""
        self._held[value] = rank, size, on_host

    def step(self, instruction: Instruction, written: Sequence[int]) -> None:
        """Run an instruction; `written` has the bytes of the values that it makes."""
        if isinstance(instruction, Free):
            self._drop(instruction.values)
        elif isinstance(instruction, Run):  # its outputs take the memory of its donated inputs
            self._drop(self._program.taken_over(instruction))
            on_host, activations = self._results_on_host[instruction.task], self._activations_of(instruction)
            self._make(instruction.rank, instruction.outputs, written, on_host, activations)
        elif not isinstance(instruction, Wait):
            sent, memory = instruction.sent, instruction.memory
            on_host = [
                self._held.get(value, _NOTHING)[2] if memory is None else memory == HOST_MEMORY for value in sent
            ]
            activations = [None if memory is None else self._activations.get(value) for value in sent]
            self._make(instruction.target, instruction.received, written, on_host, activations)

    def _make(
        self,
        rank: int,
        values: Sequence[int],
        sizes: Sequence[int],
        on_host: Sequence[bool],
        activations: Sequence[_Microbatch | None],
    ) -> None:
        for value, size, is_on_host, microbatch in zip(values, sizes, on_host, activations, strict=True):
            self._held[value] = rank, size, is_on_host
            (self.hosts if is_on_host else self.devices)[rank].change(size)
            if microbatch is not None:
                self._activations[value] = microbatch
                self._count(microbatch, 0 if is_on_host else 1)

    def _drop(self, values: Iterable[int]) -> None:
        for value in values:
            rank, size, is_on_host = self._held.pop(value, _NOTHING)
            (self.hosts if is_on_host else self.devices)[rank].change(-size)
            if value in self._activations:
                self._count(self._activations.pop(value), 0 if is_on_host else -1)

    def _activations_of(self, run: Run) -> list[_Microbatch | None]:
        """Return for each result of a run its stage and microbatch, if it is an activation of a forward."""
        task = self._program.tasks[run.task]
        if task.stage is None or task.kind is not TaskKind.FORWARD:
            return [None] * len(run.outputs)
        going_round = {output for output, _ in task.pins}
        return [
            None if position in going_round else (task.stage, run.microbatch) for position in range(len(run.outputs))
        ]

    def _count(self, microbatch: _Microbatch, change: int) -> None:
        before = self._counts[microbatch] > 0
        self._counts[microbatch] += change
        self.microbatches[microbatch[0]].change((self._counts[microbatch] > 0) - before)
