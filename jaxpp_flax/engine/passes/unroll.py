"""Unroll a placed step into instructions: each loop by its schedule, each edge between ranks into a transfer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

from jax.sharding import PartitionSpec

from jaxpp_flax.engine.analyses.data_flow import delayed
from jaxpp_flax.engine.passes.loop.loop import LoweredLoop
from jaxpp_flax.engine.passes.memory.stream_updates import stream_updates
from jaxpp_flax.engine.passes.placed import Placed
from jaxpp_flax.engine.program.builder import ProgramBuilder
from jaxpp_flax.engine.program.program import LoopTask, Program, ProgramTask
from jaxpp_flax.engine.program.specs import accumulator_spec, followed_spec
from jaxpp_flax.engine.tracing.ir import Atom, Equation, Graph, Value, graph_of, values
from jaxpp_flax.schedules.errors import ScheduleError
from jaxpp_flax.schedules.order import merge_order
from jaxpp_flax.schedules.task import Task, TaskKind, parts

__all__ = ["loop_prefix", "unroll"]

_F, _B, _I, _W = TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.BACKWARD_INPUT, TaskKind.BACKWARD_WEIGHT
# The tasks of a stage that replace a scheduled one; a stage may lack some (no gradient flows to a frozen stage).
_STANDS_FOR = {_F: (_F,), _B: (_B, _I, _W), _I: (_I, _B), _W: (_W,)}


def _scheduled(loop: LoweredLoop) -> list[tuple[int, int]]:
    """Return the loop's (task, microbatch) pairs in a global order free of deadlock."""
    tasks = loop.partition.tasks
    by_kind = {(t.stage, t.kind): i for i, t in enumerate(tasks)}
    order: list[tuple[int, int]] = []

    def add(task: Task) -> None:
        found = [by_kind[task.stage, k] for k in _STANDS_FOR[task.kind] if (task.stage, k) in by_kind]
        for number in found if task.kind is _B else found[:1]:
            order.append((number, task.microbatch))

    for rank, task in merge_order(loop.schedule.tasks(loop.body.length)):
        home = loop.schedule.rank_of(task.stage)
        if rank != home:
            raise ScheduleError(
                f"{type(loop.schedule).__name__} runs {task!r} on rank {rank}, but its `rank_of` gives stage "
                f"{task.stage} to rank {home}, where the weights are. Make the two agree."
            )
        for part in parts(task):
            add(part)
    _check_order(loop, order)
    return order


def _check_order(loop: LoweredLoop, order: Sequence[tuple[int, int]]) -> None:
    """Refuse a schedule that leaves out or repeats work, or breaks the order of work that must go in order."""
    tasks, name = loop.partition.tasks, type(loop.schedule).__name__
    ran: list[list[int]] = [[] for _ in tasks]
    for task, microbatch in order:
        ran[task].append(microbatch)
    in_order = {c.task for c in loop.partition.carries} | {a.task for a in loop.partition.accumulators if a.ordered}
    for index, (task, microbatches) in enumerate(zip(tasks, ran, strict=True)):
        if sorted(microbatches) != [*range(loop.body.length)]:
            raise ScheduleError(
                f"{name} runs {task.name} for the microbatches {microbatches[:8]}; each task of the step must run "
                f"exactly once for each of its {loop.body.length} microbatches. `jaxpp_flax.schedules.validate` checks "
                "a schedule without a model."
            )
        if index in in_order and microbatches != sorted(microbatches):
            raise ScheduleError(
                f"{name} runs {task.name} for the microbatches in the order {microbatches[:8]}, but the task hands a "
                "value from each microbatch to the next one (the loop's carry, or a reduction that depends on the "
                "order). Use a schedule that runs each stage's microbatches in order."
            )


def loop_prefix(number: int) -> str:
    """Return the text before the names of a loop's tasks: nothing for the first loop."""
    return f"loop{number}_" if number else ""


class _LoopUnroller:
    """Writes the runs and the transfers of a loop, in the order of its schedule.

    A task reads edges of the whole loop (operands and accumulators), edges of its own microbatch, and in place of the
    carry's leaves what a task has made of them in the microbatch before. `shared` and `own` hold their values by rank;
    `own[m + 1]` is of microbatch m, and `own[0]` holds the first carry.
    """

    def __init__(
        self, builder: ProgramBuilder, loop: LoweredLoop, number: int, specs: Mapping[Atom, PartitionSpec]
    ) -> None:
        self.builder, self.loop, self.part, self.specs = builder, loop, loop.partition, specs
        self.name = loop_prefix(number)
        self.rank = [task.rank for task in self.part.tasks]
        self.accumulated = {a.result: a.state for a in self.part.accumulators}
        self.of_the_loop = {*self.part.operands, *self.accumulated.values()}
        self.shared: dict[tuple[Value, int], int] = {}
        self.own: list[dict[tuple[Value, int], int]] = [{} for _ in range(loop.body.length + 1)]
        self.carries = [self._carries_read(task) for task in self.part.tasks]
        self.carried: dict[Value, set[int]] = {  # the ranks that read each next value of the carry
            c.result: {self.rank[i] for i, read in enumerate(self.carries) if c.result in read.values()}
            for c in self.part.carries
        }
        self.sends = cache(self._sends)

    def _carries_read(self, task: LoopTask) -> dict[Value, Value]:
        """Return the next value of each leaf of the carry that a task reads: its own stage's copy, or the only one."""
        found: dict[Value, Value] = {}
        for carry in self.part.carries:
            own = self.part.tasks[carry.task].stage == task.stage
            if carry.state in task.graph.inputs and (own or carry.state not in found):
                found[carry.state] = carry.result
        return found

    def run(self) -> None:
        at = self.builder.at
        for operand, edge in zip(values(self.loop.constants), self.part.operands, strict=True):
            self.shared.update({(edge, rank): at[operand, rank] for rank in self.part.readers.get(edge, ())})
        self._initial_accumulators()
        for carry in self.part.carries:
            for rank in {self.rank[carry.task], *self.carried[carry.result]}:
                self.own[0][carry.result, rank] = at[self.loop.carry_init[carry.leaf], rank]
        numbers = [self.builder.task(replace(task, name=self.name + task.name)) for task in self.part.tasks]
        for task, microbatch in _scheduled(self.loop):
            self._run_task(task, numbers[task], microbatch)
        for edge, accumulator in zip(self.loop.results, self.part.accumulators, strict=True):
            rank = self.rank[accumulator.task]
            at[edge, rank] = self.shared[accumulator.state, rank]
        for carry in self.part.carries:
            rank = self.rank[carry.task]
            at[self.loop.carry_results[carry.leaf], rank] = self.own[-1][carry.result, rank]

    def _initial_accumulators(self) -> None:
        by_rank: dict[int, list[int]] = {}
        for k, accumulator in enumerate(self.part.accumulators):
            by_rank.setdefault(self.rank[accumulator.task], []).append(k)
        for rank, members in by_rank.items():
            graphs = [self.part.accumulators[k].init for k in members]
            graph = Graph((), tuple(g.outputs[0] for g in graphs), tuple(e for g in graphs for e in g.equations))
            specs = tuple(map(self._spec_of, members))
            task = ProgramTask(f"{self.name}init_{rank}", rank, graph, out_specs=specs)
            made = self.builder.run(self.builder.task(task), ())
            self.shared.update(
                {(self.part.accumulators[k].state, rank): value for k, value in zip(members, made, strict=True)}
            )

    def _spec_of(self, number: int) -> PartitionSpec:
        accumulator, like = self.part.accumulators[number], self.loop.like[number]
        outer = dict(zip(self.part.operands, self.loop.constants, strict=True))
        read = self.part.tasks[accumulator.task].graph.inputs
        known = [(v.aval, self.specs[outer[v]]) for v in read if v in outer and outer[v] in self.specs]
        wish = None if like is None else [*self.specs.values()][like]
        return accumulator_spec(accumulator.state.aval, self.loop.batch_dims[number], wish, known)

    def _run_task(self, index: int, number: int, microbatch: int) -> None:
        graph, rank, carries = self.part.tasks[index].graph, self.rank[index], self.carries[index]
        before, own, edges = self.own[microbatch], self.own[microbatch + 1], values(graph.outputs)
        if self.part.index in graph.inputs:
            own[self.part.index, rank] = self.builder.index(rank, microbatch)

        def value_of(edge: Value) -> int:
            if edge in self.of_the_loop:
                return self.shared[edge, rank]
            return before[carries[edge], rank] if edge in carries else own[edge, rank]

        made = self.builder.run(number, [value_of(edge) for edge in graph.inputs], microbatch)
        self._keep(own, edges, made, rank)
        for target, positions in self.sends(index, microbatch + 1 == self.loop.body.length).items():
            received = self.builder.transfer(rank, target, [made[position] for position in positions])
            self._keep(own, [edges[position] for position in positions], received, target)

    def _keep(self, own: dict[tuple[Value, int], int], edges: Sequence[Value], made: Sequence[int], rank: int) -> None:
        for edge, value in zip(edges, made, strict=True):
            if edge in self.accumulated:
                self.shared[self.accumulated[edge], rank] = value
            else:
                own[edge, rank] = value

    def _sends(self, index: int, last: bool) -> dict[int, list[int]]:
        """Return the outputs of a task, by position, that other ranks read; the last microbatch passes no carry on."""
        found: dict[int, list[int]] = {}
        for position, edge in enumerate(values(self.part.tasks[index].graph.outputs)):
            if edge in self.accumulated or (last and edge in self.carried):
                continue
            readers = self.carried.get(edge) or self.part.readers.get(edge, set[int]())
            for target in sorted(readers - {self.rank[index]}):
                found.setdefault(target, []).append(position)
        return found


def unroll(placed: Placed, num_ranks: int, specs: Sequence[PartitionSpec]) -> Program:
    """Turn a placed step into a program.

    Each rank runs the equations around the loops in rounds: a round is a program, made of all that no transfer is
    missing for. A loop has a round of its own. `specs` are the partitions of the step's inputs inside a submesh.
    """
    spec_of = _known_specs(placed, specs)
    builder = ProgramBuilder(num_ranks)
    for edge in placed.inputs:
        builder.argument(edge, sorted(placed.need[edge]))
    rounds = _Rounds(placed)
    segments = rounds.segments()
    loops = outer = 0
    for at in range(rounds.count):
        for rank, graph in segments.get(at, ()):
            task = builder.task(ProgramTask(f"outer_{outer}", rank, graph))
            builder.run_on(task, graph.inputs, graph.outputs)
            outer += 1
        if (loop := rounds.loops.get(at)) is not None:
            _LoopUnroller(builder, loop, loops, spec_of).run()
            loops += 1
        for (source, target), edges in rounds.moves.get(at, {}).items():
            builder.send(edges, source, target)
    for atom in placed.outputs:
        builder.result(atom, placed.need[atom] if isinstance(atom, Value) else ())
    return builder.finish()


def _known_specs(placed: Placed, specs: Sequence[PartitionSpec]) -> dict[Atom, PartitionSpec]:
    """Return the partitions of the step's inputs, in their order, of what follows them, and of gathered parameters."""
    found: dict[Atom, PartitionSpec] = dict(zip(placed.inputs, specs, strict=True))
    for equation in placed.equations:
        if isinstance(equation, LoweredLoop):
            found.update({gather.made: gather.spec for gather in equation.gathered.values()})
        elif (spec := followed_spec(equation, found)) is not None:
            found[equation.outputs[0]] = spec
    return found


class _Rounds:
    """The first round in which each rank can run each equation, loop and move; a move is at the end of its round."""

    def __init__(self, placed: Placed) -> None:
        self.loops: dict[int, LoweredLoop] = {}
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
                at = max([max(self.loops, default=-1) + 1, *(ready.get(key, 0) for key in reads)])
                self.loops[at] = equation
                for value, rank in reads:
                    self.read[rank].add(value)
                rounds = dict.fromkeys(frozenset[int]().union(*equation.homes.values()), at)
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
            self.count = max([self.count, *(at + 1 for at in rounds.values())])

    def segments(self) -> dict[int, list[tuple[int, Graph]]]:
        """Return the programs of each round, in the order of ranks; what a program makes is what later ones read."""
        found: dict[int, list[tuple[int, Graph]]] = {}
        for rank, times in sorted(self.work.items()):
            read = self.read[rank]
            kept = {equation for equation in times if not read.isdisjoint(equation.outputs)}
            programs = [(at, part) for at, equations in delayed(times, kept) for part in stream_updates(equations)]
            graphs: list[tuple[int, Graph]] = []
            for at, equations in reversed(programs):
                graph = graph_of(equations, read)
                read.update(graph.inputs)
                graphs.append((at, graph))
            for at, graph in reversed(graphs):
                found.setdefault(at, []).append((rank, graph))
        return found
