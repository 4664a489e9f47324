"""Make one loop of those that a `treduce` over microbatches of several shapes has been opened to, one for each shape.

The tasks of each shape stay apart; what goes from microbatch to microbatch is shared: they update the same accumulators
and carries, on the same ranks. So the schedule may run the microbatches in any order of shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from jaxpp_flax.engine.passes.loop.hoist_constants import equation_key
from jaxpp_flax.engine.passes.loop.loop import Accumulator, CutLoop, Loop, LoweredLoop, Partition, Shapes, loops_of
from jaxpp_flax.engine.program.program import LoopTask
from jaxpp_flax.engine.tracing.ir import Atom, Equation, Graph, Value, values
from jaxpp_flax.engine.tracing.loop_body import LoopBody

__all__ = ["check_joined", "join_shapes", "over_microbatches"]


def join_shapes(step: Graph) -> Graph:
    """Join the loops of each `treduce`; those over microbatches of one shape stay as they are.

    Raises:
      ValueError: if a result is reduced in another way for one shape than for another.
    """
    families: dict[Shapes, list[CutLoop]] = {}
    for loop in loops_of(step, CutLoop):
        if loop.shapes is not None:
            families.setdefault(loop.shapes, []).append(loop)
    if not families:
        return step
    last = {loops[-1]: shapes for shapes, loops in families.items()}
    equations, same = list[Equation](), _Same()
    for equation in step.equations:
        if not isinstance(equation, CutLoop) or equation.shapes is None:
            equations += same.kept(equation)
        elif equation in last:
            loops = [loop.reading(same.read(loop.inputs)) for loop in families[last[equation]]]
            equations.append(_joined([loop for loop in loops if isinstance(loop, CutLoop)], last[equation]))
    return replace(step, equations=tuple(equations))


def check_joined(step: Graph) -> None:
    """Check the loops: each is for all shapes of its microbatches."""
    for loop in loops_of(step, CutLoop):
        if loop.shapes is not None:
            raise ValueError(f"the loop at {loop.where} is for one shape of several")


class _Same:
    """Keeps one of the equations that compute the same: what passes move in front of the loop of each shape."""

    def __init__(self) -> None:
        self._first: dict[object, Equation] = {}
        self._names: dict[Atom, Atom] = {}

    def read(self, atoms: Iterable[Atom]) -> tuple[Atom, ...]:
        return tuple(self._names.get(atom, atom) for atom in atoms)

    def kept(self, equation: Equation) -> list[Equation]:
        """Return the equation over what is kept; nothing for one that computes what an earlier one does."""
        equation = equation.reading(self.read(equation.inputs))
        key = None if equation.effects or isinstance(equation, Loop) else equation_key(equation, equation.inputs)
        if key is None:
            return [equation]
        first = self._first.setdefault(key, equation)
        if first is equation:
            return [equation]
        self._names.update(zip(equation.outputs, first.outputs, strict=True))
        return []


def _joined(loops: Sequence[CutLoop], shapes: Shapes) -> CutLoop:
    _check_reductions(loops)
    first, num_leaves = loops[0], len(shapes.leaves[0])
    places: dict[Atom, Value] = {}  # of what all microbatches read: a value of the joined body
    names: list[dict[Value, Value]] = []
    for number, loop in enumerate(loops):
        own: dict[Value, Value] = {}
        for place, (value, atom) in enumerate(zip(loop.partition.operands, loop.constants, strict=True)):
            if not shapes.first <= place < shapes.first + num_leaves:
                own[value] = places.setdefault(atom, value)
        names.append(own | _shared_turns(loop, first, number))
    leaves = [loop.partition.operands[shapes.first : shapes.first + num_leaves] for loop in loops]
    of_entries = [value for number in shapes.numbers for value in leaves[number]]
    parts = [_renamed(loop, own, number) for number, (loop, own) in enumerate(zip(loops, names, strict=True))]
    partition = replace(
        first.partition,
        operands=(*places.values(), *of_entries),
        tasks=tuple(task for tasks in parts for task in tasks),
        shape_of=tuple(number for number, tasks in enumerate(parts) for _ in tasks),
    )
    body = with_constants(first.body, (*places.values(), *leaves[0]), len(partition.operands))
    return replace(
        loops[-1],
        inputs=(*places, *(atom for entry in shapes.leaves for atom in entry), *first.carry_init),
        body=body,
        labels=first.labels,
        partition=partition,
        gathered={value: gather for loop in loops for value, gather in loop.gathered.items()},
        shapes=None,
        pattern=shapes.numbers[: first.body.length],
        leaves_of=tuple(map(tuple, leaves)),
        first_leaf=len(places),
    )


def with_constants(body: LoopBody, read: Sequence[Value], count: int) -> LoopBody:
    """Return a body that takes so many constants: those that it reads, and others for what only other shapes read."""
    constants = (*read, *(Value(body.index.aval) for _ in range(count - len(read))))
    return replace(body, inputs=(*constants, body.index, *body.carry), num_consts=len(constants))


def _shared_turns(loop: CutLoop, first: CutLoop, number: int) -> dict[Value, Value]:
    """Return the names of the first shape for what goes from microbatch to microbatch, and for the index."""
    part, like = loop.partition, first.partition
    names = {part.index: like.index}
    wanted = {_key_of(first, a, k): a for k, a in _numbered(like.accumulators)}
    for k, accumulator in _numbered(part.accumulators):
        twin = wanted.get(_key_of(loop, accumulator, k))
        if twin is None or len(part.accumulators) != len(like.accumulators):
            raise ValueError(_differs(loop, accumulator.part_of, number, "is made by other stages"))
        names |= {accumulator.state: twin.state, accumulator.result: twin.result}
    copies = {(c.leaf, like.tasks[c.task].stage): c for c in like.carries}
    for carry in part.carries:
        twin = copies.get((carry.leaf, part.tasks[carry.task].stage))
        if twin is None or len(part.carries) != len(like.carries):
            raise ValueError(
                f"the treduce at {loop.where} keeps the carry{loop.body.carry_names[carry.leaf]} in other stages for "
                "one shape of its microbatches than for another. Read and write it in one stage for every shape."
            )
        names |= {carry.state: twin.state, carry.result: twin.result}
    return names


def _numbered(accumulators: Iterable[Accumulator]) -> list[tuple[int, Accumulator]]:
    """Return accumulators with their numbers among those of one result."""
    count: dict[int, int] = {}
    numbered: list[tuple[int, Accumulator]] = []
    for accumulator in accumulators:
        count[accumulator.part_of] = count.get(accumulator.part_of, -1) + 1
        numbered.append((count[accumulator.part_of], accumulator))
    return numbered


def _key_of(loop: CutLoop, accumulator: Accumulator, number: int) -> object:
    aval, task = accumulator.state.aval, loop.partition.tasks[accumulator.task]
    return accumulator.part_of, number, task.rank, task.stage, tuple(aval.shape), aval.dtype


def _check_reductions(loops: Sequence[CutLoop]) -> None:
    first = loops[0]
    for number, loop in enumerate(loops):
        for result, pair in enumerate(zip(loop.data_axes, loop.batch_dims, strict=True)):
            if pair != (first.data_axes[result], first.batch_dims[result]):
                raise ValueError(_differs(loop, result, number, "is summed over other devices of a stage"))


def _differs(loop: CutLoop, result: int, number: int, how: str) -> str:
    aval = loop.body.results[result].aval
    return (
        f"result {result} of the treduce at {loop.where}, {aval.dtype}{list(aval.shape)}, {how} for microbatches of "
        f"shape {number} than for those of the first shape, so no accumulator serves both. Let the body compute it by "
        "the same operations for every shape."
    )


def _renamed(loop: CutLoop, names: Mapping[Value, Value], number: int) -> list[LoopTask]:
    """Return the tasks of a shape over the joined loop's values."""

    def name(atom: Atom) -> Atom:
        return names.get(atom, atom) if isinstance(atom, Value) else atom

    def task_of(task: LoopTask) -> LoopTask:
        inputs = [names.get(value, value) for value in task.graph.inputs]
        equations = tuple(
            replace(e, inputs=tuple(map(name, e.inputs)), outputs=tuple(names.get(v, v) for v in e.outputs))
            if any(v in names for v in (*e.inputs, *e.outputs))
            else e
            for e in task.graph.equations
        )
        graph = Graph(tuple(inputs), tuple(map(name, task.graph.outputs)), equations)
        return replace(task, graph=graph, name=f"{task.name}_shape{number}" if number else task.name)

    return [
        replace(task_of(task), donatable=positions)
        for task, positions in zip(loop.partition.tasks, _donatable(loop.partition), strict=True)
    ]


def _donatable(part: Partition) -> list[frozenset[int]]:
    """Return the positions of the inputs that each task may donate, whatever the pattern of shapes is.

    These are the accumulators, and what another task makes, if all its other readers come before by what they read. So
    the tasks of a shape are compiled once for all patterns.
    """
    makers = {value: n for n, task in enumerate(part.tasks) for value in values(task.graph.outputs)}
    readers: dict[Value, set[int]] = {}
    before: list[set[int]] = []  # the tasks that each task needs
    for number, task in enumerate(part.tasks):
        needed = {makers[value] for value in task.graph.inputs if value in makers}
        before.append(needed.union(*(before[n] for n in needed if n < number)))
        for value in task.graph.inputs:
            readers.setdefault(value, set()).add(number)
    states = {accumulator.state for accumulator in part.accumulators}
    return [
        frozenset(
            place
            for place, value in enumerate(task.graph.inputs)
            if value in states or (value in makers and readers[value] - {number} <= before[number])
        )
        for number, task in enumerate(part.tasks)
    ]


def over_microbatches(loop: LoweredLoop, leaves: Sequence[Atom], pattern: Sequence[int]) -> LoweredLoop:
    """Return a loop over other microbatches of its shapes: their leaves, one microbatch after another, and shapes."""
    part, params = loop.partition, loop.body.constants[: loop.first_leaf]
    operands = (*part.operands[: loop.first_leaf], *(value for shape in pattern for value in loop.leaves_of[shape]))
    body = with_constants(loop.body, (*params, *loop.leaves_of[0]), max(len(operands), len(params)))
    return replace(
        loop,
        inputs=(*loop.constants[: loop.first_leaf], *leaves, *loop.carry_init),
        body=replace(body, length=len(pattern)),
        partition=replace(part, operands=operands),
        pattern=tuple(pattern),
    )
