"""A loop over microbatches among the equations of a step: a type for each state in which passes leave it.

`open_loops` makes a `Loop` of a `treduce`, `label` a `LabelledLoop` of it, `partition` a `CutLoop`, and `lower_loops` a
`LoweredLoop`. Each has what the one before it has, and more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from jaxpp_flax.engine.analyses.batch_dimensions import BatchDim
from jaxpp_flax.engine.passes.fsdp.rule import Gather
from jaxpp_flax.engine.program.program import LoopTask
from jaxpp_flax.engine.tracing.inline import inline
from jaxpp_flax.engine.tracing.ir import Atom, Equation, Graph, Value, VerificationError, values, verify_order
from jaxpp_flax.engine.tracing.loop_body import LoopBody, sliced_by_index
from jaxpp_flax.schedules.schedule import Schedule

__all__ = [
    "Accumulator", "Carry", "CutLoop", "LabelledLoop", "Labels", "Loop", "LoweredLoop", "Partition", "TaskKey",
    "TaskOf", "advanced", "by_task", "each_loop", "loops_of", "verify_effects",
]  # fmt: skip


@dataclass(frozen=True, eq=False, kw_only=True)
class Shapes:
    """The entries of a loop over microbatches of several shapes: the microbatches, and one for each further shape.

    Attributes:
      numbers: for each entry, the number of its shape.
      leaves: the leaves of each entry. A loop of one shape reads those of its first entry.
      first: the place of these leaves among the constants of each loop.
    """

    numbers: tuple[int, ...]
    leaves: tuple[tuple[Atom, ...], ...]
    first: int


@dataclass(frozen=True, eq=False, kw_only=True)
class Loop(Equation):
    """A `treduce` of the step with its schedule and its body, opened.

    Attributes:
      schedule: the schedule, for the mesh's number of ranks.
      body: the inlined body.
      data_axes: for each result, the mesh axes over which it must still be summed after the loop, or None.
      batch_dims: for each result, the dimension of its accumulator over the shards of the batch, and the mesh axes of
        that dimension; or None.
      batch_shards: the number of parts into which the examples of a microbatch are cut.
      gathered: the constants of the body that are parameters gathered from their shards (see `gather_parameters`).
      shapes: if the loop is for one shape of microbatches, all shapes of its `treduce`, until `join_shapes` makes one
        loop of theirs; None for any other loop.
    """

    schedule: Schedule
    body: LoopBody
    data_axes: tuple[Any, ...]
    batch_dims: tuple[BatchDim | None, ...]
    batch_shards: int = 1
    gathered: Mapping[Value, Gather] = field(default_factory=dict[Value, Gather])
    shapes: Shapes | None = None

    def reading(self, inputs: tuple[Atom, ...]) -> Loop:
        """Return the loop over other operands."""
        return replace(self, inputs=inputs)

    def flat_body(self) -> LoopBody:
        """Return the body with plain calls and regions of `jax.checkpoint` inlined, and without hints."""
        return self.body.rewritten(inline(self.body, flatten=True, remat=True, hints=False))

    @property
    def constants(self) -> tuple[Atom, ...]:
        return self.inputs[: len(self.body.constants)]

    @property
    def carry_init(self) -> tuple[Atom, ...]:
        return self.inputs[len(self.body.constants) :]

    @property
    def carry_results(self) -> tuple[Value, ...]:
        return self.outputs[: len(self.body.carry)]

    @property
    def results(self) -> tuple[Value, ...]:
        """The reduced results; of a lowered loop, its accumulators."""
        return self.outputs[len(self.body.carry) :]

    def verify(self) -> None:
        """Check the body."""
        self.body.verify()

    @property
    def cuts(self) -> tuple[int, ...]:
        """The indices of the marks that cut: none before the loop is labelled."""
        return ()

    def headline(self) -> str:
        """Return the schedule and the marks as one line."""
        marks = [f"{m.name or 'unnamed'}{' (cuts)' * (i in self.cuts)}" for i, m in enumerate(self.body.marks)]
        return f"loop over {self.body.length} microbatches: {type(self.schedule).__name__}; marks: {', '.join(marks)}"

    def details(self) -> str:
        """Return the schedule, the marks and the body as text."""
        return f"{self.headline()}\n{self.body.as_text()}"


L = TypeVar("L", bound=Loop)


def loops_of(graph: Graph, state: type[L]) -> tuple[L, ...]:
    """Return the loops of a step in program order.

    Raises:
      VerificationError: if a loop is not yet in this state.
    """
    loops: list[L] = []
    for equation in graph.equations:
        if isinstance(equation, Loop):
            if not isinstance(equation, state):
                kind = type(equation).__name__
                raise VerificationError(f"the loop at {equation.where} is a {kind}, not yet a {state.__name__}")
            loops.append(equation)
    return tuple(loops)


def each_loop(graph: Graph, state: type[L], change: Callable[[L], Loop]) -> Graph:
    """Return the step with `change` made to each loop."""
    changed = {loop: change(loop) for loop in loops_of(graph, state)}
    return replace(graph, equations=tuple(changed.get(e, e) if isinstance(e, state) else e for e in graph.equations))


def advanced(state: type[L], before: Equation, **facts: Any) -> L:
    """Return a loop in its next state: with all that the equation before has, and these facts."""
    return state(**{field.name: getattr(before, field.name) for field in fields(before)} | facts)


@dataclass(frozen=True, eq=False)
class Labels:
    """The body of a loop without its marks, with a phase for each equation.

    Attributes:
      body: the body without markers: equations read what a marker reads.
      cuts: the indices of the marks that cut.
      phase: the phase of each equation. Every task may compute an equation without a phase for itself: it is free.
      counters: the leaves of the carry of which each stage keeps its own copy.
      marked: the values that pass a forward marker.
      has_second_order: whether a backward is differentiated again: all of that work is in the last phase.
    """

    body: LoopBody
    cuts: tuple[int, ...]
    phase: Mapping[Equation, int]
    counters: frozenset[int]
    marked: frozenset[Value]
    has_second_order: bool = False

    @property
    def num_stages(self) -> int:
        return len(self.cuts) + 1

    def stage_of(self, phase: int) -> int:
        """Return the stage that runs a phase."""
        return min(phase, 2 * self.num_stages - 1 - phase)

    @cached_property
    def free(self) -> frozenset[Equation]:
        """The equations that every task may compute for itself."""
        return frozenset(equation for equation in self.body.equations if equation not in self.phase)

    def verify(self) -> None:
        """Check that no equation runs in an earlier phase than its operands."""
        phases: dict[Value, int] = {}
        for equation in self.body.equations:
            operands = values(equation.inputs)
            phase = self.phase.get(equation)
            if phase is None:
                if not phases.keys().isdisjoint(operands):
                    raise VerificationError(f"{equation.name} at {equation.where} has no label")
                continue
            if any(phases.get(value, 0) > phase for value in operands):
                raise VerificationError(f"{equation.name} at {equation.where} runs before its operand is made")
            phases.update(dict.fromkeys(equation.outputs, phase))

    def as_text(self) -> str:
        """Return the body as text, each equation with its phase; `free` ones run in every task that needs them."""
        return self.body.as_text({**dict.fromkeys(self.free, "free"), **self.phase})


class TaskKey(NamedTuple):
    """A task before it has a number: its phase, and whether it is the weight gradient of a split backward."""

    phase: int
    of_weights: bool = False


TaskOf = dict[Equation, TaskKey | None]
"""The equations of a body in executable order, each with its task; free ones have none."""


def by_task(task_of: TaskOf) -> dict[TaskKey, list[Equation]]:
    """Return the equations of each task in executable order, without free ones; tasks in the order of phases."""
    tasks: dict[TaskKey, list[Equation]] = {}
    for equation, key in task_of.items():
        if key is not None:
            tasks.setdefault(key, []).append(equation)
    return dict(sorted(tasks.items()))


@dataclass(frozen=True, eq=False, kw_only=True)
class LabelledLoop(Loop):
    """A loop with its cuts, and the phase of each equation of its body."""

    labels: Labels

    def verify(self) -> None:
        """Check the body, and the order of the phases."""
        super().verify()
        self.labels.verify()

    @property
    def cuts(self) -> tuple[int, ...]:
        """The indices of the marks that cut."""
        return self.labels.cuts

    def details(self) -> str:
        """Return the schedule, the marks, and the body with its phases as text."""
        return f"{self.headline()}\n{self.labels.as_text()}"


@dataclass(frozen=True, eq=False)
class Accumulator:
    """One reduced result, or one stage's part of it: `task` reads `state` and defines `result`.

    `part_of` is the number of the reduced result, the sum of its parts. `ordered` says that the microbatches must come
    in order: a user's own reduction may need this.
    """

    part_of: int
    task: int
    state: Value
    result: Value
    init: Graph
    ordered: bool = False


@dataclass(frozen=True, eq=False)
class Carry:
    """One copy of a carry leaf, kept by the stage of `task`, which reads `state` and defines `result`."""

    leaf: int
    task: int
    state: Value
    result: Value


@dataclass(frozen=True)
class Partition:
    """A loop's body cut into tasks.

    Of microbatches of several shapes, `shape_of` has the shape of each task; without it, all have one. The tasks of
    each shape define the results of the same accumulators and carries.
    """

    num_stages: int
    operands: tuple[Value, ...]
    index: Value
    tasks: tuple[LoopTask, ...]
    accumulators: tuple[Accumulator, ...]
    carries: tuple[Carry, ...]
    shape_of: tuple[int, ...] = ()

    def tasks_of(self, shape: int) -> dict[int, LoopTask]:
        """Return the tasks of microbatches of a shape, by their numbers."""
        return {n: task for n, task in enumerate(self.tasks) if not self.shape_of or self.shape_of[n] == shape}

    def of_one_shape(self) -> Partition:
        """Return the tasks of the shape with the largest results alone, in place of those of all shapes."""
        if not self.shape_of:
            return self
        nbytes = dict.fromkeys(self.shape_of, 0)
        for task, shape in zip(self.tasks, self.shape_of, strict=True):
            nbytes[shape] += sum(value.nbytes for value in values(task.graph.outputs))
        largest = max(nbytes, key=nbytes.__getitem__)
        return replace(self, tasks=tuple(self.tasks_of(largest).values()), shape_of=())

    @cached_property
    def data(self) -> frozenset[Value]:
        """The operands that some task slices by the microbatch's index; the other operands are parameters."""
        graphs = [inline(task.graph, flatten=True) for task in self.tasks]
        sliced = {v for graph in graphs for v in sliced_by_index(graph.equations, self.index)}
        return frozenset(sliced.intersection(self.operands))

    @cached_property
    def readers(self) -> dict[Value, set[int]]:
        """The ranks whose tasks read each value."""
        readers: dict[Value, set[int]] = {}
        for task in self.tasks:
            for value in task.graph.inputs:
                readers.setdefault(value, set()).add(task.rank)
        return readers

    def verify(self) -> None:
        """Check each task, and that each edge is defined by one task, earlier in the order of phases."""
        states = dict.fromkeys(turn.state for turn in (*self.accumulators, *self.carries))
        for task in self.tasks:
            task.graph.verify()
            if len(values(task.graph.outputs)) < len(task.graph.outputs):
                raise VerificationError(f"task {task.name} returns a constant")
        for shape in {*self.shape_of} or {0}:
            tasks = self.tasks_of(shape).values()
            steps = ((f"task {t.name}", t.graph.inputs, values(t.graph.outputs)) for t in tasks)
            verify_order((*self.operands, self.index, *states), steps, ())

    def as_text(self) -> str:
        return "\n".join(f"task {t.name} (stage {t.stage})\n{t.graph.as_text()}" for t in self.tasks)


def verify_effects(labels: Labels, partitioned: Partition) -> None:
    """Check that no labelled equation is in two tasks (`Partition.verify` finds equations that are in no task)."""
    count = Counter(v for task in partitioned.tasks for e in task.graph.equations for v in e.outputs)
    for equation in labels.phase:
        if any(count[v] > 1 for v in equation.outputs):
            raise VerificationError(f"{equation.name} at {equation.where} stands in several tasks")


@dataclass(frozen=True, eq=False, kw_only=True)
class CutLoop(LabelledLoop):
    """A loop with the tasks that its schedule runs.

    Attributes:
      partition: the tasks.
      pattern: for each microbatch, the number of its shape, if there are several.
      leaves_of: then, for each shape, the operands that its tasks read in place of the leaves of a microbatch.
      first_leaf: then, the place among the constants where the leaves of one microbatch after another begin.
    """

    partition: Partition
    pattern: tuple[int, ...] = ()
    leaves_of: tuple[tuple[Value, ...], ...] = ()
    first_leaf: int = 0

    def verify(self) -> None:
        """Check the body, the phases and the tasks."""
        super().verify()
        self.partition.verify()
        verify_effects(self.labels, self.partition)

    def details(self) -> str:
        """Return the schedule, the marks and the tasks as text."""
        return f"{self.headline()}\n{self.partition.as_text()}"


@dataclass(frozen=True, eq=False, kw_only=True)
class LoweredLoop(CutLoop):
    """A loop that returns its accumulators: of a sum over several stages, the part of each stage.

    Attributes:
      like: for each accumulator, the position of the step's argument that it updates, or None.
    """

    like: tuple[int | None, ...]

    def headline(self) -> str:
        """Return the schedule, the marks, and what the accumulators update, as one line."""
        like = ", ".join("nothing" if argument is None else f"argument {argument}" for argument in self.like)
        return f"{super().headline()}; its accumulators update {like}" if self.like else super().headline()

    def reads(self) -> Iterator[tuple[Value, set[int]]]:
        """Yield each operand with the ranks that read it."""
        readers, carries, tasks = self.partition.readers, self.partition.carries, self.partition.tasks
        for operand, value in zip(values(self.constants), self.partition.operands, strict=True):
            yield operand, readers.get(value, set())
        for leaf, initial in enumerate(values(self.carry_init)):
            owners = {tasks[c.task].rank for c in carries if c.leaf == leaf}
            states = {c.state for c in carries if c.leaf == leaf}
            yield initial, owners.union(*(readers.get(s, set()) for s in states))

    @cached_property
    def homes(self) -> dict[Value, frozenset[int]]:
        """The ranks on which each result is made."""
        tasks = self.partition.tasks
        homes = {
            value: frozenset({tasks[a.task].rank})
            for value, a in zip(self.results, self.partition.accumulators, strict=True)
        }
        for leaf, value in enumerate(self.carry_results):
            homes[value] = frozenset(tasks[c.task].rank for c in self.partition.carries if c.leaf == leaf)
        return homes
