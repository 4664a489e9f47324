"""Unroll a placed step into instructions: each loop by its schedule, each edge between ranks into a transfer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from jax.sharding import PartitionSpec

from jaxpp_flax.engine.analyses.data_flow import delayed
from jaxpp_flax.engine.passes.loop.loop import LoweredLoop, Partition
from jaxpp_flax.engine.passes.place import StepOnRanks
from jaxpp_flax.engine.passes.stream_updates import stream_updates
from jaxpp_flax.engine.program.numbering import TaskStep, TransferStep, numbered, with_transfers
from jaxpp_flax.engine.program.program import LoopTask, Program, ProgramTask
from jaxpp_flax.engine.program.specs import accumulator_spec, followed_spec
from jaxpp_flax.engine.tracing.ir import Atom, Equation, Graph, Value, graph_of, values
from jaxpp_flax.schedules.errors import ScheduleError
from jaxpp_flax.schedules.order import merge_order
from jaxpp_flax.schedules.task import Task, TaskKind, parts

__all__ = ["Rounds", "loop_prefix", "unroll"]

_F, _B, _I, _W, _FUSED = TaskKind
# The tasks of a stage that replace a scheduled one; a stage may lack some (no gradient flows to a frozen stage).
_STANDS_FOR = {_F: (_F,), _B: (_B, _I, _W), _I: (_I, _B), _W: (_W,), _FUSED: (_FUSED,)}


def _scheduled(loop: LoweredLoop) -> list[tuple[int, int]]:
    """Return the loop's (task, microbatch) pairs in a global order free of deadlock."""
    pattern = loop.pattern or (0,) * loop.body.length
    tasks_of = {shape: loop.partition.tasks_of(shape) for shape in {*pattern}}
    by_kind = {(shape, t.stage, t.kind): n for shape, tasks in tasks_of.items() for n, t in tasks.items()}
    order: list[tuple[int, int]] = []

    def add(task: Task) -> None:
        shape = pattern[task.microbatch]
        keys = [(shape, task.stage, kind) for kind in _STANDS_FOR[task.kind]]
        numbers = [by_kind[key] for key in keys if key in by_kind]
        for number in numbers if task.kind is _B else numbers[:1]:
            order.append((number, task.microbatch))

    for rank, task in merge_order(loop.schedule.tasks(loop.body.length)):
        home = loop.schedule.rank_of(task.stage)
        if rank != home:
            raise ScheduleError(
                f"{type(loop.schedule).__name__} runs {task!r} on rank {rank}, but its `rank_of` gives stage "
                f"{task.stage} to rank {home}, where the weights are. Make the two agree."
            )
        for part in (task,) if (pattern[task.microbatch], task.stage, task.kind) in by_kind else parts(task):
            add(part)
    _check_order(loop, pattern, order)
    return order


def _check_order(loop: LoweredLoop, pattern: Sequence[int], order: Sequence[tuple[int, int]]) -> None:
    """Refuse a schedule that leaves out or repeats work, or breaks the order of work that must go in order."""
    part, name = loop.partition, type(loop.schedule).__name__
    turns = {*(c.result for c in part.carries), *(a.result for a in part.accumulators if a.ordered)}
    ran: list[list[int]] = [[] for _ in part.tasks]
    in_turn: dict[Value, list[int]] = {result: [] for result in turns}  # of the tasks of all shapes
    turns_of = [turns.intersection(values(task.graph.outputs)) for task in part.tasks]
    for task, microbatch in order:
        ran[task].append(microbatch)
        for result in turns_of[task]:
            in_turn[result].append(microbatch)
    of_shape = {shape: [m for m, other in enumerate(pattern) if other == shape] for shape in {*pattern}}
    for shape, wanted in of_shape.items():
        for index, task in part.tasks_of(shape).items():
            if sorted(ran[index]) != wanted:
                raise ScheduleError(
                    f"{name} runs {task.name} for the microbatches {ran[index][:8]}; each task of the step must run "
                    f"exactly once for each of its {len(wanted)} microbatches. `jaxpp_flax.schedules.validate` checks "
                    "a schedule without a model."
                )
            microbatches = next((in_turn[v] for v in turns_of[index] if in_turn[v] != sorted(in_turn[v])), None)
            if microbatches is not None:
                raise ScheduleError(
                    f"{name} runs {task.name} for the microbatches in the order {microbatches[:8]}, but the task hands "
                    "a value from each microbatch to the next one (the loop's carry, or a reduction that depends on "
                    "the order). Use a schedule that runs each stage's microbatches in order."
                )


def loop_prefix(number: int) -> str:
    """Return the text before the names of a loop's tasks: nothing for the first loop."""
    return f"loop{number}_" if number else ""


def _runs(loop: LoweredLoop, indices: Sequence[Value], before_these: int) -> Iterator[TaskStep]:
    """Yield the runs of a loop in the order of its schedule, each over values of its own.

    A task reads operands, accumulators as the run before has left them, edges of its own microbatch, and in place of
    the carry's leaves what a task has made of them in the microbatch before. `indices` are those of the microbatches,
    and `before_these` is the number of tasks before the loop's.
    """
    part, tasks = loop.partition, loop.partition.tasks
    states = {a.result: a.state for a in part.accumulators}
    whole: dict[Value, Atom] = dict(zip(part.operands, loop.constants, strict=True))
    whole |= {state: state for state in states.values()}
    totals = {a.result: total for a, total in zip(part.accumulators, loop.results, strict=True)}
    # Of several copies of a counter on one rank, one is the result.
    returned = {(c.leaf, tasks[c.task].rank): c.result for c in part.carries}
    last_carry = {edge: loop.carry_results[leaf] for (leaf, _), edge in returned.items()}
    carries = [_carries_read(part, task) for task in tasks]
    edges = [values(task.graph.outputs) for task in tasks]
    left = dict.fromkeys(states, loop.body.length)  # the updates of each accumulator that are still to come
    first: dict[Value, Atom] = {c.result: loop.carry_init[c.leaf] for c in part.carries}
    own_leaves = _leaves_read(loop)
    for edge in (edge for own in own_leaves for edge in own):
        whole.pop(edge, None)
    instances = [
        first,
        *({part.index: i, **own} for i, own in zip(indices[: loop.body.length], own_leaves, strict=True)),
    ]  # by a microbatch, counted from 1
    for number, microbatch in _scheduled(loop):
        before, own, carried, inputs = instances[microbatch], instances[microbatch + 1], carries[number], list[Atom]()
        for edge in tasks[number].graph.inputs:
            if edge in whole:
                inputs.append(whole[edge])
            else:
                inputs.append(before[carried[edge]] if edge in carried else own[edge])
        outputs: list[Value] = []
        for edge in edges[number]:
            if edge in states:
                left[edge] -= 1
                value = Value(edge.aval) if left[edge] else totals[edge]
                whole[states[edge]] = value
            else:
                is_last = microbatch + 1 == loop.body.length and edge in last_carry
                value = own[edge] = last_carry[edge] if is_last else Value(edge.aval)
            outputs.append(value)
        yield TaskStep(before_these + number, tuple(inputs), tuple(outputs), microbatch)


def _leaves_read(loop: LoweredLoop) -> list[dict[Value, Atom]]:
    """Return what the tasks of each microbatch read for the operands of their shape.

    Without several shapes there is nothing: tasks slice their microbatch themselves.
    """
    if not loop.pattern:
        return [{} for _ in range(loop.body.length)]
    leaves, count = loop.constants[loop.first_leaf :], len(loop.leaves_of[0])
    return [
        dict(zip(loop.leaves_of[shape], leaves[m * count : (m + 1) * count], strict=True))
        for m, shape in enumerate(loop.pattern)
    ]


def _carries_read(part: Partition, task: LoopTask) -> dict[Value, Value]:
    """Return the next value of each leaf of the carry that a task reads: its own stage's copy, or the only one."""
    next_values: dict[Value, Value] = {}
    for carry in part.carries:
        own = part.tasks[carry.task].stage == task.stage
        if carry.state in task.graph.inputs and (own or carry.state not in next_values):
            next_values[carry.state] = carry.result
    return next_values


def _initial_accumulators(
    loop: LoweredLoop, prefix: str, arguments: Sequence[Value], spec_of: Mapping[Atom, PartitionSpec]
) -> Iterator[tuple[ProgramTask, list[Value]]]:
    """Yield a task for each rank that makes its accumulators, with these, before the first microbatch.

    `arguments` are those of the step, and `spec_of` has the partitions of these and of other values.
    """
    by_rank: dict[int, list[int]] = {}
    for k, accumulator in enumerate(loop.partition.accumulators):
        by_rank.setdefault(loop.partition.tasks[accumulator.task].rank, []).append(k)
    for rank, members in by_rank.items():
        accumulators = [loop.partition.accumulators[k] for k in members]
        outputs = tuple(a.init.outputs[0] for a in accumulators)
        graph = Graph((), outputs, tuple(e for a in accumulators for e in a.init.equations))
        out_specs = tuple(_spec_of_sum(loop, k, arguments, spec_of) for k in members)
        yield ProgramTask(f"{prefix}init_{rank}", rank, graph, out_specs=out_specs), [a.state for a in accumulators]


def _spec_of_sum(
    loop: LoweredLoop, number: int, arguments: Sequence[Value], spec_of: Mapping[Atom, PartitionSpec]
) -> PartitionSpec:
    accumulator, like = loop.partition.accumulators[number], loop.like[number]
    outer = dict(zip(loop.partition.operands, loop.constants, strict=True))
    read = loop.partition.tasks[accumulator.task].graph.inputs
    alike = [(v.aval, spec_of[outer[v]]) for v in read if v in outer and outer[v] in spec_of]
    wish = None if like is None else spec_of[arguments[like]]
    return accumulator_spec(accumulator.state.aval, loop.batch_dims[number], wish, alike)


def unroll(
    placed: StepOnRanks, num_ranks: int, specs: Sequence[PartitionSpec], rounds: Rounds | None = None
) -> Program:
    """Turn a placed step into a program.

    Each rank runs the equations around the loops in rounds: a round is a program, made of all that no transfer is
    missing for. A loop has a round of its own. `specs` are the partitions of the step's inputs inside a submesh.
    `rounds` are those of the step, or of one that differs in its microbatches alone; by default they are computed.
    """
    spec_of = _known_specs(placed, specs)
    tasks, steps = list[ProgramTask](), list[TaskStep | TransferStep]()
    indices: list[Value] = []

    def run(task: ProgramTask, inputs: Sequence[Atom], outputs: Sequence[Value]) -> None:
        steps.append(TaskStep(len(tasks), inputs, outputs))
        tasks.append(task)

    rounds = rounds or Rounds(placed)
    loops = outer = 0
    for time in range(rounds.count):
        for rank, graph in rounds.segments.get(time, ()):
            run(ProgramTask(f"outer_{outer}", rank, graph), graph.inputs, values(graph.outputs))
            outer += 1
        if time in rounds.loops:
            loop = placed.loops[loops]
            prefix = loop_prefix(loops)
            for task, states in _initial_accumulators(loop, prefix, placed.inputs, spec_of):
                run(task, (), states)
            # All loops share the indices of their microbatches.
            indices += [Value(loop.partition.index.aval) for _ in range(len(indices), loop.body.length)]
            runs = list(_runs(loop, indices, len(tasks)))
            tasks += [replace(task, name=prefix + task.name) for task in loop.partition.tasks]
            steps += with_transfers(runs, tasks)
            loops += 1
        steps += [TransferStep(*ends, edges) for ends, edges in rounds.moves.get(time, {}).items()]
    arguments = {value: sorted(placed.need[value]) for value in placed.inputs}
    results = [(atom, placed.need[atom] if isinstance(atom, Value) else ()) for atom in placed.outputs]
    return numbered(num_ranks, tasks, steps, arguments, results, {index: m for m, index in enumerate(indices)})


def _known_specs(placed: StepOnRanks, specs: Sequence[PartitionSpec]) -> dict[Atom, PartitionSpec]:
    """Return the partitions of the step's inputs, of what follows them, and of gathered parameters."""
    spec_of: dict[Atom, PartitionSpec] = dict(zip(placed.inputs, specs, strict=True))
    for equation in placed.equations:
        if isinstance(equation, LoweredLoop):
            spec_of.update({gather.result: gather.spec for gather in equation.gathered.values()})
        elif (spec := followed_spec(equation, spec_of)) is not None:
            spec_of[equation.outputs[0]] = spec
    return spec_of


class Rounds:
    """The first round in which each rank can run each equation, loop and move; a move is at the end of its round.

    They do not depend on the microbatches of a loop: these are inputs of the step, which are there before.
    """

    def __init__(self, placed: StepOnRanks) -> None:
        self.loops: list[int] = []  # the round of each loop, in program order
        self.moves: dict[int, dict[tuple[int, int], list[Value]]] = {}
        self.work: dict[int, dict[Equation, int]] = {}  # the round of each equation, by rank
        self.read: defaultdict[int, set[Value]] = defaultdict(set)  # what moves, loops and results read, by rank
        self.count = 1
        for value in values(placed.outputs):
            for rank in placed.need[value]:
                self.read[rank].add(value)
        ready: dict[tuple[Value, int], int] = {}  # the first round that can read a value on a rank
        for equation in placed.equations:
            rounds, is_loop = dict[int, int](), isinstance(equation, LoweredLoop)
            if isinstance(equation, LoweredLoop):
                reads = placed.read_by(equation)
                time = max([max(self.loops, default=-1) + 1, *(ready.get(key, 0) for key in reads)])
                self.loops.append(time)
                for value, rank in reads:
                    self.read[rank].add(value)
                rounds = dict.fromkeys(frozenset[int]().union(*equation.homes.values()), time)
            else:
                for rank in placed.native[equation]:
                    rounds[rank] = max((ready.get((v, rank), 0) for v in values(equation.inputs)), default=0)
                    self.work.setdefault(rank, {})[equation] = rounds[rank]
            for value, ranks in placed.made_by(equation).items():
                ready.update({(value, rank): rounds[rank] + is_loop for rank in ranks})
            for value, source, target in placed.sent_by(equation):
                self.moves.setdefault(rounds[source], {}).setdefault((source, target), []).append(value)
                self.read[source].add(value)
                ready[value, target] = rounds[source] + 1
            self.count = max([self.count, *(time + 1 for time in rounds.values())])

    @cached_property
    def segments(self) -> dict[int, list[tuple[int, Graph]]]:
        """The programs of each round, in the order of ranks; what a program makes is what later ones read."""
        graphs_at: dict[int, list[tuple[int, Graph]]] = {}
        for rank, times in sorted(self.work.items()):
            read = self.read[rank]
            kept = {equation for equation in times if not read.isdisjoint(equation.outputs)}
            programs = [(time, part) for time, equations in delayed(times, kept) for part in stream_updates(equations)]
            graphs: list[tuple[int, Graph]] = []
            for time, equations in reversed(programs):
                graph = graph_of(equations, read)
                read.update(graph.inputs)
                graphs.append((time, graph))
            for time, graph in reversed(graphs):
                graphs_at.setdefault(time, []).append((rank, graph))
        return graphs_at
