"""Unroll a placed step into instructions: each loop by its schedule, each edge between ranks into a transfer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from jaxpp_flax.engine.passes.loop.loop_tasks import LoopTask
from jaxpp_flax.engine.passes.placed import Loop, Move, Placed, Segment
from jaxpp_flax.engine.program.program import Instruction, Program, ProgramTask, Run, Transfer
from jaxpp_flax.engine.tracing.ir import Atom, Constant, Graph, Value, values
from jaxpp_flax.schedules.errors import ScheduleError
from jaxpp_flax.schedules.gathers import first_reads
from jaxpp_flax.schedules.order import merge_order
from jaxpp_flax.schedules.task import FusedTask, Task, TaskKind

__all__ = ["Unroller", "loop_prefix", "unroll"]

_F, _B, _I, _W = TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.BACKWARD_INPUT, TaskKind.BACKWARD_WEIGHT
# The tasks of a stage that replace a scheduled one; a stage may lack some (no gradient flows to a frozen stage).
_STANDS_FOR = {_F: (_F,), _B: (_B, _I, _W), _I: (_I, _B), _W: (_W,)}


@dataclass
class Unroller:
    """A program while it is written, with a slot for every value on every rank."""

    slots: dict[tuple[Atom, int], int] = field(default_factory=dict)  # of values outside loops, by rank
    instructions: list[Instruction] = field(default_factory=list)
    tasks: list[ProgramTask] = field(default_factory=list)
    indices: dict[tuple[int, int], int] = field(default_factory=dict)
    count: int = 0

    def new_slots(self, number: int) -> tuple[int, ...]:
        first, self.count = self.count, self.count + number
        return tuple(range(first, self.count))

    def new(self, value: Atom, rank: int) -> int:
        (self.slots[value, rank],) = self.new_slots(1)
        return self.slots[value, rank]

    def index(self, rank: int, microbatch: int) -> int:
        if (rank, microbatch) not in self.indices:
            (self.indices[rank, microbatch],) = self.new_slots(1)
        return self.indices[rank, microbatch]

    def add_task(self, task: ProgramTask) -> int:
        self.tasks.append(task)
        return len(self.tasks) - 1

    def segment(self, segment: Segment, number: int) -> None:
        inputs = tuple(self.slots[v, segment.rank] for v in segment.graph.inputs)
        outputs = tuple(self.new(v, segment.rank) for v in segment.graph.outputs)
        task = self.add_task(ProgramTask(f"outer_{number}", segment.rank, segment.graph))
        self.instructions.append(Run(task, -1, segment.rank, inputs, outputs))

    def finished(self, arguments: Sequence[dict[int, int]], results: Sequence[Any], num_ranks: int) -> Program:
        return Program(
            tuple(self.instructions),
            tuple(self.tasks),
            tuple(arguments),
            tuple(results),
            dict(self.indices),
            self.count,
            num_ranks,
        )

    def move(self, moves: Sequence[Move]) -> None:
        batches: dict[tuple[int, int], list[Move]] = {}
        for move in moves:
            batches.setdefault((move.source, move.target), []).append(move)
        for (source, target), batch in batches.items():
            sent = tuple(self.slots[m.value, source] for m in batch)
            received = tuple(self.new(m.value, target) for m in batch)
            self.instructions.append(Transfer(source, target, sent, received))


def _scheduled(loop: Loop) -> list[tuple[int, int]]:
    """Return the loop's (task, microbatch) pairs in a global order free of deadlock."""
    tasks = loop.partition.tasks
    by_kind = {(t.stage, t.kind): i for i, t in enumerate(tasks)}
    order: list[tuple[int, int]] = []

    def add(task: Task) -> None:
        found = [by_kind[task.stage, k] for k in _STANDS_FOR[task.kind] if (task.stage, k) in by_kind]
        for number in found if task.kind is _B else found[:1]:
            order.append((number, task.microbatch))

    for rank, task in merge_order(loop.schedule.tasks(loop.length)):
        home = loop.schedule.rank_of(task.stage)
        if rank != home:
            raise ScheduleError(
                f"{type(loop.schedule).__name__} runs {task!r} on rank {rank}, but its `rank_of` gives stage "
                f"{task.stage} to rank {home}, where the weights are. Make the two agree."
            )
        if isinstance(task, FusedTask):
            add(task.forward)
            add(task.backward)
        else:
            add(task)
    _check_order(loop, order)
    return order


def _check_order(loop: Loop, order: Sequence[tuple[int, int]]) -> None:
    """Refuse a schedule that leaves out or repeats work, or breaks the order of work that must go in order."""
    tasks, name = loop.partition.tasks, type(loop.schedule).__name__
    ran: list[list[int]] = [[] for _ in tasks]
    for task, microbatch in order:
        ran[task].append(microbatch)
    in_order = {c.task for c in loop.partition.carries} | {a.task for a in loop.partition.accumulators if a.ordered}
    for index, (task, microbatches) in enumerate(zip(tasks, ran, strict=True)):
        counts = Counter(microbatches)
        for microbatch in range(loop.length):
            if counts[microbatch] != 1:
                raise ScheduleError(
                    f"{name} runs {task.name} for microbatch {microbatch} {counts[microbatch]} times; each task of the "
                    f"step must run exactly once for each of its {loop.length} microbatches. "
                    "`jaxpp_flax.schedules.validate` checks a schedule without a model."
                )
        if index in in_order and microbatches != sorted(microbatches):
            raise ScheduleError(
                f"{name} runs {task.name} for the microbatches in the order {microbatches[:8]}, but the task hands a "
                "value from each microbatch to the next one (the loop's carry, or a reduction that depends on the "
                "order). Use a schedule that runs each stage's microbatches in order."
            )


# The slots of a loop by (value, or number of the carry; rank).
_Slots: TypeAlias = "dict[tuple[Value | int, int], int]"
# A key of such slots, and the slots that hold it: those of the microbatch, of the next one, or of the whole loop.
_Place: TypeAlias = "tuple[tuple[Value | int, int], int]"
_OWN, _NEXT, _SHARED = range(3)


@dataclass(frozen=True)
class _Send:
    """The outputs of a task, by position, that are sent to another rank, and their places there."""

    target: int
    positions: tuple[int, ...]
    writes: tuple[_Place, ...]


@dataclass(frozen=True)
class _Wiring:
    """The places of a loop task's inputs and outputs, computed once for all microbatches."""

    reads: tuple[_Place, ...]
    reads_index: bool
    writes: tuple[_Place, ...]
    sends: tuple[_Send, ...]
    last_sends: tuple[_Send, ...]  # of the last microbatch, which passes no carry on


def loop_prefix(number: int) -> str:
    """Return the text before the names of a loop's tasks: nothing for the first loop."""
    return f"loop{number}_" if number else ""


class _LoopUnroller:
    def __init__(self, program: Unroller, loop: Loop, number: int) -> None:
        self.program, self.loop, self.part = program, loop, loop.partition
        self.name = loop_prefix(number)
        tasks = self.part.tasks
        self.rank = [loop.rank_of_task(i) for i in range(len(tasks))]
        self.accumulated = {a.result: a.state for a in self.part.accumulators}
        self.carried = {c.result: k for k, c in enumerate(self.part.carries)}
        self.shared: _Slots = {}  # of the operands and the accumulators
        # The slots of each microbatch: its own values, and the carries with which it starts.
        self.values: list[_Slots] = [{} for _ in range(loop.length + 1)]
        self.carry_of = {i: self._carries_read(task) for i, task in enumerate(tasks)}

    def _carries_read(self, task: LoopTask) -> dict[Value, int]:
        """Return the copy of each carry leaf that a task reads: its own stage's, or the only one."""
        found: dict[Value, int] = {}
        for k, carry in enumerate(self.part.carries):
            own = self.part.tasks[carry.task].stage == task.stage
            if carry.state in task.graph.inputs and (own or carry.state not in found):
                found[carry.state] = k
        return found

    def run(self) -> None:
        slots = self.program.slots
        for operand, value in zip(self.loop.operands, self.part.operands, strict=True):
            if value not in self.loop.gathers:
                self.shared.update({(value, rank): slots[operand, rank] for rank in self.loop.readers.get(value, ())})
        self._initial_accumulators()
        for k, carry in enumerate(self.part.carries):
            for rank in {self.rank[carry.task], *self._carry_readers(k)}:
                self.values[0][k, rank] = slots[self.loop.carry_init[carry.leaf], rank]
        tasks = self.part.tasks
        wiring = [self._wire(i) for i in range(len(tasks))]
        numbers = [self.program.add_task(self._program_task(i)) for i in range(len(tasks))]
        order = _scheduled(self.loop)
        # A parameter is gathered on each rank that reads it.
        reads = [[(v, self.rank[i]) for v in tasks[i].graph.inputs if v in self.loop.gathers] for i, _ in order]
        for (task, microbatch), new in zip(order, first_reads(reads), strict=True):
            if new:
                self._gather(task, tuple(value for value, _ in new))
            self._run_task(wiring[task], numbers[task], self.rank[task], microbatch)
        for value, accumulator in zip(self.loop.accumulator_results, self.part.accumulators, strict=True):
            rank = self.rank[accumulator.task]
            slots[value, rank] = self.shared[accumulator.state, rank]
        for k, carry in enumerate(self.part.carries):
            rank = self.rank[carry.task]
            slots[self.loop.carry_results[carry.leaf], rank] = self.values[self.loop.length][k, rank]

    def _carry_readers(self, k: int) -> set[int]:
        return {self.rank[i] for i, carries in self.carry_of.items() if k in carries.values()}

    def _initial_accumulators(self) -> None:
        by_rank: dict[int, list[int]] = {}
        for k, accumulator in enumerate(self.part.accumulators):
            by_rank.setdefault(self.rank[accumulator.task], []).append(k)
        for rank, members in by_rank.items():
            graphs = [self.part.accumulators[k].init for k in members]
            graph = Graph((), tuple(g.outputs[0] for g in graphs), tuple(e for g in graphs for e in g.equations))
            batch_dims, like = (tuple(of[k] for k in members) for of in (self.loop.batch_dims, self.loop.like))
            task = ProgramTask(f"{self.name}init_{rank}", rank, graph, batch_dims=batch_dims, like=like)
            outputs = self.program.new_slots(len(members))
            self.program.instructions.append(Run(self.program.add_task(task), -1, rank, (), outputs))
            self.shared.update(
                {(self.part.accumulators[k].state, rank): s for k, s in zip(members, outputs, strict=True)}
            )

    def _gather(self, index: int, gathered: tuple[Value, ...]) -> None:
        """Run a task that gathers parameters, before a task that reads them."""
        rank, found = self.rank[index], [self.loop.gathers[value] for value in gathered]
        equations = tuple(gather.equation for gather in found)
        shards = tuple(value for e in equations for value in values(e.inputs))
        name = f"{self.name}gather_{self.part.tasks[index].stage}"
        graph, specs = Graph(shards, gathered, equations), tuple(gather.spec for gather in found)
        task = self.program.add_task(ProgramTask(name, rank, graph, out_specs=specs))
        outputs = self.program.new_slots(len(gathered))
        self.shared.update({(value, rank): slot for value, slot in zip(gathered, outputs, strict=True)})
        inputs = tuple(self.program.slots[shard, rank] for shard in shards)
        self.program.instructions.append(Run(task, -1, rank, inputs, outputs))

    def _program_task(self, index: int) -> ProgramTask:
        task = self.part.tasks[index]
        inputs = {v: p for p, v in enumerate(task.graph.inputs)}
        states = {turn.result: turn.state for turn in (*self.part.accumulators, *self.part.carries)}
        outputs = [(p, states[v]) for p, v in enumerate(values(task.graph.outputs)) if v in states]
        pins = tuple((p, inputs[state]) for p, state in outputs if state in inputs)
        return ProgramTask(
            self.name + task.name, self.rank[index], task.graph, task.stage, task.kind, task.fused, pins=pins
        )

    def _wire(self, index: int) -> _Wiring:
        task, rank, carries = self.part.tasks[index], self.rank[index], self.carry_of[index]
        shared = {*self.part.operands, *self.accumulated.values()}
        inputs, outputs = task.graph.inputs, values(task.graph.outputs)
        readers = {**self.loop.readers, **{c.result: self._carry_readers(k) for k, c in enumerate(self.part.carries)}}
        last_readers = {**self.loop.readers, **{c.result: set[int]() for c in self.part.carries}}
        return _Wiring(
            reads=tuple(((carries.get(v, v), rank), _SHARED if v in shared else _OWN) for v in inputs),
            reads_index=self.part.index in inputs,
            writes=self._places(outputs, rank),
            sends=self._sends(outputs, rank, readers),
            last_sends=self._sends(outputs, rank, last_readers),
        )

    def _places(self, outputs: Iterable[Value], rank: int) -> tuple[_Place, ...]:
        """Return the places of outputs of a task on a rank."""
        places: list[_Place] = []
        for value in outputs:
            if value in self.accumulated:
                places.append(((self.accumulated[value], rank), _SHARED))
            elif value in self.carried:
                places.append(((self.carried[value], rank), _NEXT))
            else:
                places.append(((value, rank), _OWN))
        return tuple(places)

    def _sends(self, outputs: Sequence[Value], rank: int, readers: Mapping[Value, set[int]]) -> tuple[_Send, ...]:
        leaving: dict[int, list[int]] = {}
        for position, value in enumerate(outputs):
            if value not in self.accumulated:
                for target in sorted(readers.get(value, set()) - {rank}):
                    leaving.setdefault(target, []).append(position)
        return tuple(
            _Send(target, tuple(positions), self._places([outputs[p] for p in positions], target))
            for target, positions in leaving.items()
        )

    def _run_task(self, wiring: _Wiring, number: int, rank: int, microbatch: int) -> None:
        program = self.program
        slots = (self.values[microbatch], self.values[microbatch + 1], self.shared)
        if wiring.reads_index:
            slots[_OWN][self.part.index, rank] = program.index(rank, microbatch)
        inputs = tuple([slots[where][key] for key, where in wiring.reads])
        outputs = program.new_slots(len(wiring.writes))
        for (key, where), slot in zip(wiring.writes, outputs, strict=True):
            slots[where][key] = slot
        program.instructions.append(Run(number, microbatch, rank, inputs, outputs))
        for send in wiring.sends if microbatch + 1 < self.loop.length else wiring.last_sends:
            received = program.new_slots(len(send.positions))
            for (key, where), slot in zip(send.writes, received, strict=True):
                slots[where][key] = slot
            sent = tuple(outputs[position] for position in send.positions)
            program.instructions.append(Transfer(rank, send.target, sent, received))


def unroll(placed: Placed, num_ranks: int) -> Program:
    """Turn a placed step into a program in which every value has a slot of its own (see `liveness` for reuse)."""
    program = Unroller()
    arguments = [
        {rank: program.new(value, rank) for rank in sorted(ranks)}
        for value, ranks in zip(placed.inputs, placed.arguments, strict=True)
    ]
    loops = segments = 0
    pending: list[Move] = []
    for step in placed.steps:
        if isinstance(step, Move):
            pending.append(step)
            continue
        program.move(pending)
        pending = []
        if isinstance(step, Segment):
            program.segment(step, segments)
            segments += 1
        else:
            _LoopUnroller(program, step, loops).run()
            loops += 1
    program.move(pending)
    results = [
        atom if isinstance(atom, Constant) else {rank: program.slots[atom, rank] for rank in sorted(ranks)}
        for atom, ranks in zip(placed.outputs, placed.results, strict=True)
    ]
    return program.finished(arguments, results, num_ranks)
