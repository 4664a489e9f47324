"""Unroll a placed step into instructions: each loop by its schedule, each edge between ranks into a transfer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from jaxpp_flax.engine.ir import Constant, Graph, Value
from jaxpp_flax.engine.passes.partition import LoopTask
from jaxpp_flax.engine.passes.place import Loop, Move, Placed, Segment
from jaxpp_flax.engine.program import Instruction, Program, ProgramTask, Run, Transfer
from jaxpp_flax.schedules.errors import ScheduleError
from jaxpp_flax.schedules.order import merge_order
from jaxpp_flax.schedules.task import FusedTask, Task, TaskKind

__all__ = ["unroll"]

_F, _B, _I, _W = TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.BACKWARD_INPUT, TaskKind.BACKWARD_WEIGHT
# Which of a stage's tasks stand for a scheduled one; a stage may lack some (no gradient flows to a frozen stage).
_STANDS_FOR = {_F: (_F,), _B: (_B, _I, _W), _I: (_I, _B), _W: (_W,)}


@dataclass
class _Unroller:
    slots: dict[Hashable, int] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)
    tasks: list[ProgramTask] = field(default_factory=list)
    indices: dict[tuple[int, int], int] = field(default_factory=dict)
    count: int = 0

    def new(self, key: Hashable) -> int:
        self.slots[key] = self.count
        self.count += 1
        return self.count - 1

    def index(self, rank: int, microbatch: int) -> int:
        if (rank, microbatch) not in self.indices:
            self.indices[rank, microbatch] = self.new(("index", rank, microbatch))
        return self.indices[rank, microbatch]

    def add_task(self, task: ProgramTask) -> int:
        self.tasks.append(task)
        return len(self.tasks) - 1

    def segment(self, segment: Segment, number: int) -> None:
        inputs = tuple(self.slots[v, segment.rank] for v in segment.graph.inputs)
        outputs = tuple(self.new((v, segment.rank)) for v in segment.graph.outputs)
        task = self.add_task(ProgramTask(f"outer_{number}", segment.rank, segment.graph))
        self.instructions.append(Run(task, -1, segment.rank, inputs, outputs))

    def move(self, moves: Sequence[Move]) -> None:
        batches: dict[tuple[int, int], list[Move]] = {}
        for move in moves:
            batches.setdefault((move.source, move.target), []).append(move)
        for (source, target), batch in batches.items():
            sent = tuple(self.slots[m.value, source] for m in batch)
            received = tuple(self.new((m.value, target)) for m in batch)
            self.instructions.append(Transfer(source, target, sent, received))


def _scheduled(loop: Loop) -> list[tuple[int, int]]:
    """The loop's (task, microbatch) in a global order free of deadlock."""
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
    """Refuse a schedule that leaves out or repeats work, or runs out of order what must go in order."""
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


class _LoopUnroller:
    def __init__(self, program: _Unroller, loop: Loop, number: int) -> None:
        self.program, self.loop, self.part = program, loop, loop.partition
        self.name = f"loop{number}_" if number else ""
        self.number = number
        tasks = self.part.tasks
        self.rank = [loop.rank_of_task(i) for i in range(len(tasks))]
        self.operand = dict(zip(self.part.operands, loop.operands, strict=True))
        self.accumulator = {a.state: k for k, a in enumerate(self.part.accumulators)}
        self.accumulated = {a.result: k for k, a in enumerate(self.part.accumulators)}
        self.carried = {c.result: k for k, c in enumerate(self.part.carries)}
        self.readers: dict[Value, set[int]] = {}
        for i, task in enumerate(tasks):
            for value in task.graph.inputs:
                self.readers.setdefault(value, set()).add(self.rank[i])
        self.current: dict[int, int] = {}
        self.carry_of = {i: self._carries_read(i, task) for i, task in enumerate(tasks)}

    def _carries_read(self, index: int, task: LoopTask) -> dict[Value, int]:
        """Which copy of each carry leaf a task reads: its own stage's, or the only one."""
        found: dict[Value, int] = {}
        for k, carry in enumerate(self.part.carries):
            if carry.state in task.graph.inputs:
                own = self.part.tasks[carry.task].stage == task.stage
                if own or carry.state not in found:
                    found[carry.state] = k
        return found

    def run(self) -> None:
        program = self.program
        self._initial_accumulators()
        for k, carry in enumerate(self.part.carries):
            atom = self.loop.carry_init[carry.leaf]
            for rank in {self.rank[carry.task], *self._carry_readers(k)}:
                program.slots["carry", self.number, k, 0, rank] = program.slots[atom, rank]
        numbers = [program.add_task(self._program_task(i)) for i in range(len(self.part.tasks))]
        for task, microbatch in _scheduled(self.loop):
            self._run_task(task, numbers[task], microbatch)
        for k, value in enumerate(self.loop.accumulator_results):
            program.slots[value, self.rank[self.part.accumulators[k].task]] = self.current[k]
        for k, carry in enumerate(self.part.carries):
            rank = self.rank[carry.task]
            final = program.slots["carry", self.number, k, self.loop.length, rank]
            program.slots[self.loop.carry_results[carry.leaf], rank] = final

    def _carry_readers(self, k: int) -> set[int]:
        return {self.rank[i] for i, carries in self.carry_of.items() if k in carries.values()}

    def _initial_accumulators(self) -> None:
        by_rank: dict[int, list[int]] = {}
        for k, accumulator in enumerate(self.part.accumulators):
            by_rank.setdefault(self.rank[accumulator.task], []).append(k)
        for rank, members in by_rank.items():
            graphs = [self.part.accumulators[k].init for k in members]
            graph = Graph((), tuple(g.outputs[0] for g in graphs), tuple(e for g in graphs for e in g.equations))
            task = self.program.add_task(
                ProgramTask(
                    f"{self.name}init_{rank}",
                    rank,
                    graph,
                    leading=tuple(self.loop.leading[k] for k in members),
                    like=tuple(self.loop.like[k] for k in members),
                )
            )
            outputs = tuple(self.program.new(("accumulator", self.number, k, 0)) for k in members)
            self.program.instructions.append(Run(task, -1, rank, (), outputs))
            self.current.update(zip(members, outputs, strict=True))

    def _program_task(self, index: int) -> ProgramTask:
        task = self.part.tasks[index]
        inputs = {v: p for p, v in enumerate(task.graph.inputs)}
        pins = [
            (position, inputs[state])
            for position, value in enumerate(task.graph.outputs)
            for state in [self._state_of(value)]  # type: ignore[arg-type]
            if state in inputs
        ]
        return ProgramTask(
            self.name + task.name, self.rank[index], task.graph, task.stage, task.kind, task.fused, pins=tuple(pins)
        )

    def _state_of(self, result: Value) -> Value | None:
        if result in self.accumulated:
            return self.part.accumulators[self.accumulated[result]].state
        if result in self.carried:
            return self.part.carries[self.carried[result]].state
        return None

    def _run_task(self, index: int, number: int, microbatch: int) -> None:
        program, task, rank = self.program, self.part.tasks[index], self.rank[index]
        carries = self.carry_of[index]

        def slot(value: Value) -> int:
            if value in self.operand:
                return program.slots[self.operand[value], rank]
            if value is self.part.index:
                return program.index(rank, microbatch)
            if value in self.accumulator:
                return self.current[self.accumulator[value]]
            if value in carries:
                return program.slots["carry", self.number, carries[value], microbatch, rank]
            return program.slots["edge", self.number, value, microbatch, rank]

        inputs = tuple(slot(v) for v in task.graph.inputs)
        outputs: list[int] = []
        leaving: dict[int, list[tuple[int, Hashable]]] = {}
        for value in task.graph.outputs:
            if value in self.accumulated:
                k = self.accumulated[value]  # type: ignore[index]
                self.current[k] = program.new(("accumulator", self.number, k, microbatch + 1))
                outputs.append(self.current[k])
                continue
            if value in self.carried:
                k = self.carried[value]  # type: ignore[index]
                key = ("carry", self.number, k, microbatch + 1)
                targets = self._carry_readers(k) if microbatch + 1 < self.loop.length else set()
            else:
                key = ("edge", self.number, value, microbatch)
                targets = self.readers.get(value, set())  # type: ignore[arg-type]
            outputs.append(program.new((*key, rank)))
            for target in sorted(targets - {rank}):
                leaving.setdefault(target, []).append((outputs[-1], (*key, target)))
        program.instructions.append(Run(number, microbatch, rank, inputs, tuple(outputs)))
        for target, values in leaving.items():
            received = tuple(program.new(key) for _, key in values)
            program.instructions.append(Transfer(rank, target, tuple(s for s, _ in values), received))


def unroll(placed: Placed, num_ranks: int) -> Program:
    """Turn a placed step into a program whose every value has a slot of its own (see `liveness` for reuse)."""
    program = _Unroller()
    arguments = tuple(
        {rank: program.new((value, rank)) for rank in sorted(ranks)}
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
    return Program(
        tuple(program.instructions),
        tuple(program.tasks),
        arguments,
        results,
        dict(program.indices),
        program.count,
        num_ranks,
    )
