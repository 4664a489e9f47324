"""The bytes that are live on each rank while a program runs, on the devices and on the host."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from jaxpp_flax.engine.program.program import HOST_MEMORY, Free, Instruction, Program, Run, Transfer, Wait
from jaxpp_flax.engine.program.waits import AHEAD
from jaxpp_flax.engine.tracing.ir import memory_kind_of
from jaxpp_flax.schedules.memory import MemoryInUse

__all__ = ["LiveMemory", "Moment"]

_Held = int | tuple[int, int]
"""A value; or the copy of a value that is sent, with a number of its own."""

_NOTHING = 0, 0, False  # of a small value that nobody counts: the index of a microbatch


@dataclass(frozen=True, kw_only=True)
class Moment:
    """The run at which a rank's devices hold most.

    Attributes:
      task: the number of the task that runs; None before any does.
      inside: the bytes that it makes for itself.
      kinds: the bytes that are live beside these, by the kind of the values; a donated argument counts below 0.
    """

    task: int | None = None
    inside: float = 0.0
    kinds: Mapping[str, float] = field(default_factory=dict[str, float])


class LiveMemory:
    """The memory of the ranks while a program runs, in bytes on each device: the walk of `schedules.memory`.

    Call `hold` for the arguments, then `step` for each instruction in order.

    Args:
      program: the program.
      inside: the bytes that each of its tasks makes for itself while it runs.
      kinds: the kind of each value, for `fullest`; by default they have none.
      processes: for each rank, the processes that have devices of it; without them, all ranks are in one process.

    Attributes:
      devices: each rank's device memory, above the arguments. A donated argument frees memory.
      running: the most on each rank's devices, above the arguments, with what a task makes for itself while it runs.
      fullest: the run of each rank at which this is so.
      hosts: each rank's host memory: offloaded residuals, and results of tasks that lie there.
    """

    def __init__(
        self,
        program: Program,
        inside: Sequence[float] = (),
        kinds: Mapping[int, str] | None = None,
        processes: Sequence[frozenset[int]] = (),
    ) -> None:
        self._program, self._inside, self._kinds, self._processes = program, inside, kinds or {}, processes
        self.running = [0.0] * program.num_ranks
        self.fullest = [Moment()] * program.num_ranks
        self.devices = [MemoryInUse() for _ in range(program.num_ranks)]
        self.hosts = [MemoryInUse() for _ in range(program.num_ranks)]
        self._held: dict[_Held, tuple[int, int, bool]] = {}  # the rank, the bytes, and True for host memory
        self._in_flight: dict[tuple[frozenset[int], frozenset[int]], deque[Sequence[_Held]]] = {}
        self._unread: Counter[_Held] = Counter()  # in how many transfers in flight a value is
        self._freed: set[_Held] = set()  # those of them that the program has freed
        self._copies = 0
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
            if self._inside:
                self._run(instruction.rank, instruction.task)
            self._drop(self._program.taken_over(instruction))
            self._make(instruction.rank, instruction.outputs, written, self._results_on_host[instruction.task])
        elif not isinstance(instruction, Wait):
            memory = instruction.memory
            on_host = [
                self._held.get(value, _NOTHING)[2] if memory is None else memory == HOST_MEMORY
                for value in instruction.sent
            ]
            self._make(instruction.target, instruction.received, written, on_host)
            if memory is None and self._processes:
                self._send(instruction)

    def _send(self, transfer: Transfer) -> None:
        """Hold what is sent to other processes until the receiver is known to have come to it."""
        source, target = (self._processes[rank] for rank in (transfer.source, transfer.target))
        if source == target:
            return
        self._arrive(self._in_flight.pop((target, source), ()))  # who sends something back has come so far
        sent: list[_Held] = []
        for value in transfer.sent:
            if value in self._program.preset or value in self._program.returned:  # a copy is sent
                _, size, is_on_host = self._held.get(value, _NOTHING)
                self._copies += 1
                copy = value, self._copies
                self._make(transfer.source, [copy], [size], [is_on_host])
                self._freed.add(copy)
                sent.append(copy)
            else:
                sent.append(value)
        self._unread.update(sent)
        transfers = self._in_flight.setdefault((source, target), deque())
        transfers.append(sent)
        while len(transfers) > AHEAD:
            self._arrive([transfers.popleft()])

    def _arrive(self, transfers: Iterable[Sequence[_Held]]) -> None:
        for values in transfers:
            self._unread.subtract(values)
            over = {value for value in values if not self._unread[value]} & self._freed
            self._freed -= over
            self._drop(over)

    def _run(self, rank: int, task: int) -> None:
        """Note what is live while a task runs."""
        memory, inside = self.devices[rank], self._inside[task]
        if memory.live + inside > self.running[rank]:
            self.running[rank] = memory.live + inside
            self.fullest[rank] = Moment(task=task, inside=inside, kinds=memory.kinds.copy())

    def _make(self, rank: int, values: Sequence[_Held], sizes: Sequence[int], on_host: Sequence[bool]) -> None:
        for value, size, is_on_host in zip(values, sizes, on_host, strict=True):
            self._held[value] = rank, size, is_on_host
            (self.hosts if is_on_host else self.devices)[rank].change(size, self._kind(value))

    def _drop(self, values: Iterable[_Held]) -> None:
        for value in values:
            if self._unread[value]:
                self._freed.add(value)
                continue
            rank, size, is_on_host = self._held.pop(value, _NOTHING)
            (self.hosts if is_on_host else self.devices)[rank].change(-size, self._kind(value))

    def _kind(self, value: _Held) -> str:
        return self._kinds.get(value if isinstance(value, int) else value[0], "")
