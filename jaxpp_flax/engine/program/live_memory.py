"""The bytes that are live on each rank while a program runs, on the devices and on the host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jaxpp_flax.engine.program.program import HOST_MEMORY, Free, Instruction, Program, Run, Transfer, Wait
from jaxpp_flax.engine.tracing.ir import memory_kind_of
from jaxpp_flax.schedules.task import TaskKind

__all__ = ["LiveMemory"]


class LiveMemory:
    """The memory of the ranks while a program runs, in bytes on each device.

    Call `hold` for the arguments, then `step` for each instruction in order.

    Attributes:
      held: the rank, the bytes and the memory of each value (True for host memory).
      live, peak: of each rank's device memory, above the arguments. A donated argument frees memory.
      host_live, host_peak: the same of host memory: offloaded residuals, and results of tasks that lie there.
      most: for each stage, the largest number of microbatches whose activations it holds.
    """

    def __init__(self, program: Program) -> None:
        self.tasks = program.tasks
        self.held: dict[int, tuple[int, int, bool]] = {}
        self.live, self.peak = [0] * program.num_ranks, [0] * program.num_ranks
        self.host_live, self.host_peak = [0] * program.num_ranks, [0] * program.num_ranks
        self.most: dict[int, int] = {}
        # Of each task, whether its results lie in host memory: found once, and read for every run.
        self._results_on_host = [[memory_kind_of(a.aval) is not None for a in t.graph.outputs] for t in self.tasks]
        self._activations: dict[int, tuple[int, int]] = {}  # the stage and the microbatch of a forward's results

    def hold(self, value: int, rank: int, size: int, on_host: bool) -> None:
        """Note an argument: its bytes are not counted as live, but its donation frees them."""
        self.held[value] = rank, size, on_host

    def step(self, instruction: Instruction, written: Sequence[int]) -> None:
        """Run an instruction; `written` has the bytes of the values that it makes."""
        if isinstance(instruction, Free):
            self._drop(instruction.values)
        if isinstance(instruction, Free | Wait):
            return
        rank = instruction.target if isinstance(instruction, Transfer) else instruction.rank
        on_host = self._are_on_host(instruction)
        if isinstance(instruction, Run):  # its outputs take the memory of its donated inputs
            self._drop(instruction.inputs[position] for position in self.tasks[instruction.task].donate)
        for value, size, is_on_host in zip(instruction.writes(), written, on_host, strict=True):
            self.held[value] = (rank, size, is_on_host)
            (self.host_live if is_on_host else self.live)[rank] += size
        self.peak[rank] = max(self.peak[rank], self.live[rank])
        self.host_peak[rank] = max(self.host_peak[rank], self.host_live[rank])
        if isinstance(instruction, Run):
            self._note_activations(instruction)
        elif instruction.memory is not None:
            self._note_move(instruction)

    def _are_on_host(self, instruction: Run | Transfer) -> list[bool]:
        """Return for each value that an instruction writes whether this value lies in host memory."""
        if isinstance(instruction, Run):
            return self._results_on_host[instruction.task]
        if instruction.memory is not None:
            return [instruction.memory == HOST_MEMORY] * len(instruction.received)
        return [value in self.held and self.held[value][2] for value in instruction.sent]

    def _drop(self, values: Iterable[int]) -> None:
        for value in values:
            rank, size, on_host = self.held.pop(value, (0, 0, False))
            (self.host_live if on_host else self.live)[rank] -= size
            self._activations.pop(value, None)

    def _note_activations(self, run: Run) -> None:
        task = self.tasks[run.task]
        if task.stage is None or task.kind is not TaskKind.FORWARD:
            return
        going_round = {output for output, _ in task.pins}
        for position, value in enumerate(run.outputs):
            if position not in going_round:
                self._activations[value] = (task.stage, run.microbatch)
        self._count_microbatches(task.stage)

    def _note_move(self, move: Transfer) -> None:
        for sent, received in zip(move.sent, move.received, strict=True):
            if sent in self._activations:
                self._activations[received] = self._activations[sent]
                self._count_microbatches(self._activations[sent][0])

    def _count_microbatches(self, stage: int) -> None:
        """Count the microbatches of which the devices hold an activation."""
        on_devices = (found for value, found in self._activations.items() if not self.held[value][2])
        count = len({microbatch for of, microbatch in on_devices if of == stage})
        self.most[stage] = max(self.most.get(stage, 0), count)
