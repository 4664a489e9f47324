"""Waits: a program whose processes would wait for one another is refused by its two tasks, and no right one is.

Random programs of all named schedules, of processes that share ranks or hold several, get one planted fault; a second
model, which runs the processes step by step, says whether they hang.
"""

from __future__ import annotations

import random
import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import jax
import pytest

from jaxpp_flax.engine.program import waits
from jaxpp_flax.engine.program.numbering import TaskStep, TransferStep, numbered
from jaxpp_flax.engine.program.program import Program, ProgramTask, Run, Transfer
from jaxpp_flax.engine.program.waits import AHEAD, SIGNED
from jaxpp_flax.engine.runtime import executables
from jaxpp_flax.engine.runtime.task_compiler import TaskCompiler
from jaxpp_flax.engine.tracing.ir import Constant, Graph, Value, VerificationError
from jaxpp_flax.schedules import by_name, names
from jaxpp_flax.schedules.order import merge_order
from jaxpp_flax.schedules.task import needs, results
from tests.engine.toys import built, chain, identity, mesh_of, sgd_step
from tests.helpers import batch_of
from tests.schedules.helpers import shape_of

NOTHING = Constant(0, jax.ShapeDtypeStruct((), "int32"))
Processes = Sequence[frozenset[int]]
Walks = dict[int, list[int]]


def drawn(rng: random.Random, name: str | None = None) -> Program:
    """A random program: the tasks of a schedule, each with what it reads and makes, without anything to compute."""
    name = name or rng.choice(names())
    stages, ranks = shape_of(name, rng.randint(2, 4), rng.randint(1, 2))
    schedule = by_name(name, stages, ranks)
    tasks, numbers, values = list[ProgramTask](), dict[object, int](), dict[object, Value]()
    steps = list[TaskStep | TransferStep]()
    order = merge_order(schedule.tasks(rng.randint(2, 5)))
    readers = defaultdict[object, set[int]](set)
    for rank, task in order:
        for need in needs(task, stages):
            readers[need].add(rank)
    for rank, task in order:
        reads, makes, kind = [*needs(task, stages)], [*results(task)], task.kind
        key = (task.stage, kind)
        if key not in numbers:
            described = Graph(identity(*[(2,)] * len(reads)).inputs, (NOTHING,) * len(makes), ())
            numbers[key] = len(tasks)
            tasks.append(ProgramTask(f"{kind.name}_{task.stage}".lower(), rank, described, task.stage, kind))
        values.update((result, Value(NOTHING.aval)) for result in makes)
        inputs, outputs = [values[need] for need in reads], [values[result] for result in makes]
        steps.append(TaskStep(numbers[key], inputs, outputs, task.microbatch))
        for target in sorted({r for result in makes for r in readers[result]} - {rank}):
            sent = [values[result] for result in makes if target in readers[result]]
            steps.append(TransferStep(rank, target, sent))
    return numbered(ranks, tasks, steps, {}, [])


def drawn_processes(rng: random.Random, ranks: int) -> Processes:
    """Each rank is of a process, of one that has others too, or of two processes: its own, or those of all."""
    one_each = [frozenset({rank}) for rank in range(ranks)]
    two_each = [frozenset({2 * rank, 2 * rank + 1}) for rank in range(ranks)]
    in_pairs = [frozenset({rank // 2}) for rank in range(ranks)]
    return rng.choice([one_each, two_each, in_pairs, [frozenset({0, 1})] * ranks])


def walks_of(program: Program, processes: Processes) -> Walks:
    walks: Walks = {process: [] for process in frozenset[int]().union(*processes)}
    for number in range(len(program.instructions)):
        for process in frozenset[int]().union(*(processes[rank] for rank in ranks_of(program, number))):
            walks[process].append(number)
    return walks


def ranks_of(program: Program, number: int) -> tuple[int, ...]:
    instruction = program.instructions[number]
    return (instruction.source, instruction.target) if isinstance(instruction, Transfer) else (instruction.rank,)


class Processing:
    """Processes that walk a program under the runtime's limits, one event after the other, until nothing moves."""

    def __init__(self, program: Program, processes: Processes, walks: Mapping[int, Sequence[int]]) -> None:
        self.program, self.processes, self.walks = program, processes, walks
        self.next = dict.fromkeys(walks, 0)
        self.sent = dict[int, int]()  # by processes: the last transfer that it has offered, while it waits there
        self.begun: dict[int, set[int]] = {process: set(program.preset) for process in walks}
        self.there = {(process, value) for process in walks for value in program.preset}
        self.queues = defaultdict[tuple[int, int], deque[int]](deque)
        self.channels = defaultdict[tuple[int, int], deque[int]](deque)
        self.signed = set[tuple[int, int]]()  # the receiver, the transfer that it has come to
        self.one_way = defaultdict[tuple[int, int], list[int]](list)

    def hang(self) -> bool:
        while any([*map(self.advance, self.walks), *map(self.compute, self.walks)]):
            pass
        return any(self.next[process] < len(walk) for process, walk in self.walks.items()) or any(self.queues.values())

    def sides(self, number: int) -> Iterable[frozenset[int]]:
        return (self.processes[rank] for rank in ranks_of(self.program, number))

    def advance(self, process: int) -> bool:
        """Let the thread of a process take its next step, if it can."""
        if self.next[process] == len(self.walks[process]):
            return False
        number = self.walks[process][self.next[process]]
        instruction = self.program.instructions[number]
        if isinstance(instruction, Run):
            queue = self.queues[process, instruction.rank]
            if not self.begun[process].issuperset(instruction.inputs) or len(queue) == waits.IN_FLIGHT:
                return False
            queue.append(number)
            self.begun[process].update(instruction.outputs)
        else:
            assert isinstance(instruction, Transfer)
            if not self.moves(process, number, instruction):
                return False
        self.next[process] += 1
        return True

    def moves(self, process: int, number: int, transfer: Transfer) -> bool:
        """Return whether a process has got over a transfer."""
        senders, receivers = self.sides(number)
        if process in senders and self.sent.get(process) != number:
            if not self.begun[process].issuperset(transfer.sent) or not self.has_credit(process, number):
                return False
            self.sent[process] = number
            for receiver in receivers - {process}:
                self.channels[process, receiver].append(number)
        if process in receivers:
            own = process in senders
            for sender in senders - {process}:
                channel = self.channels[sender, process]
                if not channel or channel[0] != number or not self.has(sender, transfer.sent):
                    return False
            for sender in senders - {process}:
                self.channels[sender, process].popleft()
                self.one_way[process, sender].clear()
            self.begun[process].update(transfer.received)
            # A copy inside the process is there when its source is.
            copies = zip(transfer.sent, transfer.received, strict=True)
            self.there |= {(process, new) for old, new in copies if not own or (process, old) in self.there}
            self.signed.add((process, number))
        return True

    def has(self, process: int, values: Iterable[int]) -> bool:
        for value in values:
            maker, position = self.program.maker(value)
            if isinstance(maker, Transfer) and (process, value) not in self.there:
                local = process in self.processes[maker.source] and value in self.begun[process]
                if not local or not self.has(process, [maker.sent[position]]):
                    return False
            elif (process, value) not in self.there:
                return False
        return True

    def has_credit(self, process: int, number: int) -> bool:
        senders, receivers = self.sides(number)
        for receiver in receivers - {process}:
            if process in receivers and receiver in senders:
                continue
            sends = self.one_way[process, receiver]
            count = len(sends)
            asks = count >= AHEAD and not (count - AHEAD) % SIGNED
            if asks and (receiver, sends[count - AHEAD + SIGNED - 1]) not in self.signed:
                return False
        for receiver in receivers - {process}:
            if process in receivers and receiver in senders:
                self.one_way[process, receiver].clear()
            else:
                self.one_way[process, receiver].append(number)
        return True

    def compute(self, process: int) -> bool:
        """Let the devices end the tasks at the head of their queues, if all processes of the rank have come there."""
        moved = False
        for (owner, rank), queue in list(self.queues.items()):
            if owner != process or not queue:
                continue
            run = self.program.instructions[queue[0]]
            assert isinstance(run, Run)
            others = [self.queues[other, rank] for other in self.processes[rank]]
            if all(other and other[0] == queue[0] for other in others) and all(
                self.has(other, run.inputs) for other in self.processes[rank]
            ):
                for other in others:
                    other.popleft()
                self.there |= {(other, value) for other in self.processes[rank] for value in run.outputs}
                moved = True
        return moved


# Each returns the two instructions that it has moved, or None where a program has no place for the fault.
Plant = Callable[[random.Random, Program, Processes, Walks], tuple[int, int] | None]


def moved_before(walk: list[int], number: int, other: int) -> None:
    walk.remove(number)
    walk.insert(walk.index(other), number)


def two_transfers(rng: random.Random, program: Program, processes: Processes, walks: Walks, side: int):
    """A process comes to two transfers to (or from) one process in the other order."""
    places = list[tuple[int, int, int]]()
    for process, walk in walks.items():
        last = dict[int, int]()
        for number in walk:
            if not isinstance(program.instructions[number], Transfer):
                continue
            sides = [*(processes[rank] for rank in ranks_of(program, number))]
            for peer in sides[1 - side] - {process} if process in sides[side] else ():
                if peer in last:
                    places.append((process, last[peer], number))
                last[peer] = number
    if not places:
        return None
    process, first, second = rng.choice(places)
    walk = walks[process]
    if side:
        moved_before(walk, second, first)
    else:  # after the other, so that what it sends has been computed
        walk.remove(first)
        walk.insert(walk.index(second) + 1, first)
    return first, second


def two_sends(rng: random.Random, program: Program, processes: Processes, walks: Walks):
    return two_transfers(rng, program, processes, walks, 0)


def two_receives(rng: random.Random, program: Program, processes: Processes, walks: Walks):
    return two_transfers(rng, program, processes, walks, 1)


def two_collectives(rng: random.Random, program: Program, processes: Processes, walks: Walks):
    """One of the processes of a rank comes to two of its tasks in the other order; the later one could go first."""
    places = list[tuple[int, int, int]]()
    for process, walk in walks.items():
        last = dict[int, int]()
        for number in walk:
            run = program.instructions[number]
            if not isinstance(run, Run) or len(processes[run.rank]) == 1:
                continue
            makers = [program.makers[value][0] for value in run.inputs]
            if run.rank in last and all(walk.index(m) < walk.index(last[run.rank]) for m in makers):
                places.append((process, last[run.rank], number))
            last[run.rank] = number
    if not places:
        return None
    process, first, second = rng.choice(places)
    moved_before(walks[process], second, first)
    return first, second


def a_send_before_its_task(rng: random.Random, program: Program, processes: Processes, walks: Walks):
    """A process comes to a send before the task that makes what is sent."""
    places = list[tuple[int, int]]()
    for process, walk in walks.items():
        for number in walk:
            source, *target = ranks_of(program, number)
            if target and process in processes[source]:
                places.append((process, number))
    process, number = rng.choice(places)
    task = program.makers[program.instructions[number].reads()[0]][0]
    moved_before(walks[process], number, task)
    return task, number


PLANTS: list[Plant] = [two_sends, two_receives, two_collectives, a_send_before_its_task]


def words(program: Program, number: int) -> str:
    """The task that an instruction runs, or whose results it sends, as a refusal names it."""
    instruction = program.instructions[number]
    run = instruction if isinstance(instruction, Run) else program.origin(instruction.reads()[0])[0]
    assert run is not None
    task = program.tasks[run.task]
    return f"task {task.name} (rank {task.rank}, stage {task.stage}, microbatch {run.microbatch})"


def refusal(program: Program, processes: Processes, walks: Walks) -> str:
    try:
        program.check_waits(processes, walks)
    except VerificationError as error:
        return str(error)
    return ""


def check_planted(seed: int, plant: Plant) -> bool:
    """Plant a fault; return whether the program has a place for it."""
    rng = random.Random(seed)
    program = drawn(rng)
    processes = drawn_processes(rng, program.num_ranks)
    walks = walks_of(program, processes)
    program.verify()
    program.check_waits(processes)
    assert not Processing(program, processes, walks).hang()
    planted = plant(rng, program, processes, walks)
    if planted is None:
        return False
    assert Processing(program, processes, walks).hang(), f"seed {seed}: no fault"
    head = refusal(program, processes, walks).partition(" wait for one another: ")[0]
    for number in planted:
        assert words(program, number) in head, f"seed {seed}: {words(program, number)} not in {head}"
    return True


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_fault_is_named_by_its_two_tasks(plant: Plant):
    assert sum(check_planted(seed, plant) for seed in range(25)) >= 5


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("plant", PLANTS)
def test_many_planted_faults(plant: Plant):
    assert sum(check_planted(seed, plant) for seed in range(1_000, 2_000)) >= 300


def check_any_change(seed: int) -> bool:
    """Two instructions of one process change places, wherever they stand; return whether that is a fault."""
    rng = random.Random(seed)
    program = drawn(rng)
    processes = drawn_processes(rng, program.num_ranks)
    walks = walks_of(program, processes)
    walk = walks[rng.choice([*walks])]
    first = rng.randrange(len(walk) - 1)
    second = min(len(walk) - 1, first + rng.randint(1, 3))
    walk[first], walk[second] = walk[second], walk[first]
    hangs = Processing(program, processes, walks).hang()
    assert bool(refusal(program, processes, walks)) == hangs, f"seed {seed}"
    return hangs


@pytest.mark.parametrize("in_flight", [2, waits.IN_FLIGHT])
def test_a_change_of_order_is_refused_if_and_only_if_processes_hang(in_flight: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(waits, "IN_FLIGHT", in_flight)
    found = [check_any_change(seed) for seed in range(60)]
    assert 10 < sum(found) < 55  # some changes do no harm


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("in_flight", [2, waits.IN_FLIGHT])
def test_many_changes_of_order(in_flight: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(waits, "IN_FLIGHT", in_flight)
    for seed in range(1_000, 2_000):
        check_any_change(seed)


def check_other_microbatch(seed: int) -> None:
    """Two transfers of one edge give each other's values."""
    rng = random.Random(seed)
    program = drawn(rng)
    edges = defaultdict[object, list[int]](list)
    for number, instruction in enumerate(program.instructions):
        if isinstance(instruction, Transfer):
            maker, position = program.maker(instruction.sent[0])
            assert isinstance(maker, Run)
            edges[maker.task, position, instruction.target].append(number)
    pair = sorted(rng.sample(rng.choice([*edges.values()]), 2))
    instructions = list(program.instructions)
    for number, other in (pair, reversed(pair)):
        received = program.instructions[other].writes()
        instructions[number] = replace(program.instructions[number], received=received)  # pyright: ignore[reportCallIssue]
    with pytest.raises(VerificationError, match="receives what") as caught:
        replace(program, instructions=tuple(instructions)).verify()
    readers = [words(program, program.readers[program.instructions[number].writes()[0]][0]) for number in pair]
    makers = [words(program, number) for number in pair]
    named = [f"{readers[0]} receives what {makers[1]}", f"{readers[1]} receives what {makers[0]}"]
    first = f"but {readers[0]} what {makers[1]}"  # where the first microbatch is wrong, and a right one is compared
    assert any(text in str(caught.value) for text in (*named, first)), seed


def test_values_of_another_microbatch_are_refused():
    for seed in range(25):
        check_other_microbatch(seed)


@pytest.mark.slow
@pytest.mark.soak
def test_many_values_of_another_microbatch():
    for seed in range(1_000, 2_000):
        check_other_microbatch(seed)


def test_processes_are_checked_before_any_compilation(monkeypatch: pytest.MonkeyPatch):
    def refuse(program: Program, processes: Processes) -> None:
        raise VerificationError(f"{len(program.instructions)} instructions of {processes}")

    program, mesh = drawn(random.Random(0)), mesh_of(2)
    monkeypatch.setattr(executables, "compare_programs", lambda *_: object())
    monkeypatch.setattr(Program, "check_waits", refuse)
    with pytest.raises(VerificationError, match=re.escape(f"{len(program.instructions)} instructions")):
        executables.compile_program(program, TaskCompiler(mesh), [], [], [])


def test_a_text_says_who_comes_where_first():
    program = drawn(random.Random(0), "gpipe")
    apart = [frozenset({rank}) for rank in range(program.num_ranks)]
    walks = walks_of(program, apart)
    sends = [n for n in walks[0] if isinstance(program.instructions[n], Transfer) and n in walks[1]][:2]
    walks[0].remove(sends[0])
    walks[0].insert(walks[0].index(sends[1]) + 1, sends[0])
    zero, one = (f"the transfer from task forward_0 (rank 0, stage 0, microbatch {m}) to rank 1" for m in (0, 1))
    assert refusal(program, apart, walks).splitlines()[0] == (
        f"{one} and {zero} wait for one another: process 0 comes to {one} before {zero}; "
        f"process 1 comes to {zero} before {one}"
    )


@pytest.mark.parametrize("name", names())
def test_no_right_program_is_refused(name: str):
    stages, ranks = shape_of(name, 3, 2)
    step = sgd_step(by_name(name, stages, ranks))
    program = built(step, ranks, chain(stages), batch_of(4)).program
    program.verify()
    for processes in ([frozenset({rank // 2}) for rank in range(ranks)], [frozenset({0, 1})] * ranks):
        program.check_waits(processes)
