"""Unroll a placed step into instructions: each loop by its schedule, each edge between ranks into a transfer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from jaxpp_flax.engine.passes.loop.loop_tasks import LoopTask
from jaxpp_flax.engine.passes.placed import Loop, Move, Placed, Segment
from jaxpp_flax.engine.program.program import Instruction, Program, ProgramTask, Run, Transfer
from jaxpp_flax.engine.tracing.ir import Atom, Constant, Graph, Value, values
from jaxpp_flax.schedules.errors import ScheduleError
from jaxpp_flax.schedules.order import merge_order
from jaxpp_flax.schedules.task import FusedTask, Task, TaskKind

__all__ = ["unroll"]

_F, _B, _I, _W = TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.BACKWARD_INPUT, TaskKind.BACKWARD_WEIGHT
# The tasks of a stage that replace a scheduled one; a stage may lack some (no gradient flows to a frozen stage).
_STANDS_FOR = {_F: (_F,), _B: (_B, _I, _W), _I: (_I, _B), _W: (_W,)}


@dataclass
class _Unroller:
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


# The values of a microbatch by (value or number of the carry, rank).
_Key: TypeAlias = "tuple[Atom | int, int]"
# A value that is written: its position, its key, and whether it is for the next microbatch.
_Written: TypeAlias = tuple[int, _Key, bool]


@dataclass(frozen=True)
class _Send:
    """The outputs of a task, by position, that are sent to another rank."""

    target: int
    positions: tuple[int, ...]
    written: tuple[_Written, ...]


@dataclass(frozen=True)
class _Wiring:
    """The inputs and outputs of a loop task by position, computed once for all microbatches.

    `fixed` holds the slots of the loop's operands, and -1 for other inputs; `index` is the position of the microbatch's
    index. `accumulators` and `accumulated` are (position, number of the accumulator) among inputs and outputs.
    """

    fixed: tuple[int, ...]
    index: int | None
    accumulators: tuple[tuple[int, int], ...]
    reads: tuple[tuple[int, _Key], ...]
    accumulated: tuple[tuple[int, int], ...]
    written: tuple[_Written, ...]
    sends: tuple[_Send, ...]
    last_sends: tuple[_Send, ...]  # of the last microbatch, which passes no carry on


class _LoopUnroller:
    def __init__(self, program: _Unroller, loop: Loop, number: int) -> None:
        self.program, self.loop, self.part = program, loop, loop.partition
        self.name = f"loop{number}_" if number else ""
        tasks = self.part.tasks
        self.rank = [loop.rank_of_task(i) for i in range(len(tasks))]
        self.operand = dict(zip(self.part.operands, loop.operands, strict=True))
        self.accumulator = {a.state: k for k, a in enumerate(self.part.accumulators)}
        self.accumulated = {a.result: k for k, a in enumerate(self.part.accumulators)}
        self.carried = {c.result: k for k, c in enumerate(self.part.carries)}
        self.current: dict[int, int] = {}  # the slot of each accumulator
        # Slots of each microbatch: its own values, and the carries with which it starts.
        self.values: list[dict[_Key, int]] = [{} for _ in range(loop.length + 1)]
        self.wiring: list[_Wiring] = []
        self.carry_of = {i: self._carries_read(i, task) for i, task in enumerate(tasks)}

    def _carries_read(self, index: int, task: LoopTask) -> dict[Value, int]:
        """Return the copy of each carry leaf that a task reads: its own stage's, or the only one."""
        found: dict[Value, int] = {}
        for k, carry in enumerate(self.part.carries):
            own = self.part.tasks[carry.task].stage == task.stage
            if carry.state in task.graph.inputs and (own or carry.state not in found):
                found[carry.state] = k
        return found

    def run(self) -> None:
        program = self.program
        self._initial_accumulators()
        for k, carry in enumerate(self.part.carries):
            atom = self.loop.carry_init[carry.leaf]
            for rank in {self.rank[carry.task], *self._carry_readers(k)}:
                self.values[0][k, rank] = program.slots[atom, rank]
        self.wiring = [self._wire(i) for i in range(len(self.part.tasks))]
        numbers = [program.add_task(self._program_task(i)) for i in range(len(self.part.tasks))]
        for task, microbatch in _scheduled(self.loop):
            self._run_task(task, numbers[task], microbatch)
        for k, value in enumerate(self.loop.accumulator_results):
            program.slots[value, self.rank[self.part.accumulators[k].task]] = self.current[k]
        for k, carry in enumerate(self.part.carries):
            rank = self.rank[carry.task]
            program.slots[self.loop.carry_results[carry.leaf], rank] = self.values[self.loop.length][k, rank]

    def _carry_readers(self, k: int) -> set[int]:
        return {self.rank[i] for i, carries in self.carry_of.items() if k in carries.values()}

    def _initial_accumulators(self) -> None:
        by_rank: dict[int, list[int]] = {}
        for k, accumulator in enumerate(self.part.accumulators):
            by_rank.setdefault(self.rank[accumulator.task], []).append(k)
        for rank, members in by_rank.items():
            graphs = [self.part.accumulators[k].init for k in members]
            graph = Graph((), tuple(g.outputs[0] for g in graphs), tuple(e for g in graphs for e in g.equations))
            leading, like = (tuple(of[k] for k in members) for of in (self.loop.leading, self.loop.like))
            task = ProgramTask(f"{self.name}init_{rank}", rank, graph, leading=leading, like=like)
            outputs = self.program.new_slots(len(members))
            self.program.instructions.append(Run(self.program.add_task(task), -1, rank, (), outputs))
            self.current.update(zip(members, outputs, strict=True))

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
        fixed = [-1] * len(task.graph.inputs)
        counter: int | None = None
        accumulators: list[tuple[int, int]] = []
        reads: list[tuple[int, _Key]] = []
        for position, value in enumerate(task.graph.inputs):
            if value in self.operand:
                fixed[position] = self.program.slots[self.operand[value], rank]
            elif value is self.part.index:
                counter = position
            elif value in self.accumulator:
                accumulators.append((position, self.accumulator[value]))
            else:
                reads.append((position, (carries.get(value, value), rank)))
        outputs = list(enumerate(values(task.graph.outputs)))
        written = [(p, v) for p, v in outputs if v not in self.accumulated]
        readers = {**self.loop.readers, **{c.result: self._carry_readers(k) for k, c in enumerate(self.part.carries)}}
        last_readers = {**self.loop.readers, **{c.result: set[int]() for c in self.part.carries}}
        return _Wiring(
            fixed=tuple(fixed),
            index=counter,
            accumulators=tuple(accumulators),
            reads=tuple(reads),
            accumulated=tuple((p, self.accumulated[v]) for p, v in outputs if v in self.accumulated),
            written=self._written(written, rank),
            sends=self._sends(written, rank, readers),
            last_sends=self._sends(written, rank, last_readers),
        )

    def _written(self, outputs: Iterable[tuple[int, Value]], rank: int) -> tuple[_Written, ...]:
        return tuple((p, (self.carried.get(v, v), rank), v in self.carried) for p, v in outputs)

    def _sends(
        self, outputs: Iterable[tuple[int, Value]], rank: int, readers: Mapping[Value, set[int]]
    ) -> tuple[_Send, ...]:
        leaving: dict[int, list[tuple[int, Value]]] = {}
        for position, value in outputs:
            for target in sorted(readers.get(value, set()) - {rank}):
                leaving.setdefault(target, []).append((position, value))
        return tuple(
            _Send(target, tuple(p for p, _ in batch), self._written(enumerate(v for _, v in batch), target))
            for target, batch in leaving.items()
        )

    def _run_task(self, index: int, number: int, microbatch: int) -> None:
        program, rank, wiring, own = self.program, self.rank[index], self.wiring[index], self.values[microbatch]
        inputs = list(wiring.fixed)
        if wiring.index is not None:
            inputs[wiring.index] = program.index(rank, microbatch)
        for position, k in wiring.accumulators:
            inputs[position] = self.current[k]
        for position, key in wiring.reads:
            inputs[position] = own[key]
        outputs = program.new_slots(len(program.tasks[number].graph.outputs))
        for position, k in wiring.accumulated:
            self.current[k] = outputs[position]
        self._enter(wiring.written, outputs, microbatch)
        program.instructions.append(Run(number, microbatch, rank, tuple(inputs), outputs))
        for send in wiring.sends if microbatch + 1 < self.loop.length else wiring.last_sends:
            sent = tuple(outputs[position] for position in send.positions)
            received = program.new_slots(len(sent))
            self._enter(send.written, received, microbatch)
            program.instructions.append(Transfer(rank, send.target, sent, received))

    def _enter(self, written: Sequence[_Written], slots: Sequence[int], microbatch: int) -> None:
        for position, key, is_for_next in written:
            self.values[microbatch + is_for_next][key] = slots[position]


def unroll(placed: Placed, num_ranks: int) -> Program:
    """Turn a placed step into a program in which every value has a slot of its own (see `liveness` for reuse)."""
    program = _Unroller()
    arguments = tuple(
        {rank: program.new(value, rank) for rank in sorted(ranks)}
        for value, ranks in zip(placed.inputs, placed.arguments, strict=True)
    )
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
    results = tuple(
        atom if isinstance(atom, Constant) else {rank: program.slots[atom, rank] for rank in sorted(ranks)}
        for atom, ranks in zip(placed.outputs, placed.results, strict=True)
    )
    instructions, tasks = tuple(program.instructions), tuple(program.tasks)
    return Program(instructions, tasks, arguments, results, program.indices, program.count, num_ranks)
