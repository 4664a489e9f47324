"""A loop over microbatches among the equations of a step: what each pass on loops adds to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from jaxpp_flax.engine.analyses.batch_dimensions import BatchDim
from jaxpp_flax.engine.passes.fsdp.rule import Gather
from jaxpp_flax.engine.passes.loop.label import Labels, label
from jaxpp_flax.engine.passes.loop.loop_tasks import Partition
from jaxpp_flax.engine.passes.loop.partition import partition, verify_effects
from jaxpp_flax.engine.tracing.inline import inline
from jaxpp_flax.engine.tracing.ir import Atom, Equation, Graph, Value, values
from jaxpp_flax.engine.tracing.loop_body import LoopBody
from jaxpp_flax.schedules.errors import ScheduleError
from jaxpp_flax.schedules.residuals import ResidualPlan
from jaxpp_flax.schedules.schedule import Schedule
from jaxpp_flax.schedules.task import TaskKind

__all__ = ["Loop", "Step"]


@dataclass(frozen=True, eq=False)
class Step:
    """A step and its loops, each a `treduce` among its equations, in program order.

    `sums` are the equations that add up partial results of loops: they mix ranks by design. `updated` gives for each
    output the position of the argument whose new value it is, or None. `lower_loops` finds both.
    """

    graph: Graph
    loops: tuple[Loop, ...]
    sums: frozenset[Equation] = frozenset()
    updated: tuple[int | None, ...] = ()

    @cached_property
    def loop_of(self) -> dict[Equation, Loop]:
        """The loop of each equation that is one."""
        return {loop.equation: loop for loop in self.loops}

    def each(self, change: Callable[[Loop], Loop]) -> Step:
        """Return the same step with `change` made to each loop."""
        return replace(self, loops=tuple(map(change, self.loops)))

    def verify(self) -> None:
        """Check the equations of the step, and its loops."""
        self.graph.verify()
        for loop in self.loops:
            loop.verify()

    def as_text(self) -> str:
        """Return each loop as text, and the equations around them."""
        return "\n".join([*(loop.as_text() for loop in self.loops), self.graph.as_text()])


@dataclass(frozen=True, eq=False)
class Loop:
    """A `treduce` of the step with its schedule and its body.

    Attributes:
      equation: the `treduce`. Once the loop is lowered, its results are accumulators: of a sum over several stages, the
        part of each stage.
      schedule: the schedule, for the mesh's number of ranks.
      body: the inlined body.
      data_axes: for each result, the mesh axes over which it must still be summed after the loop, or None.
      batch_dims: for each result, the dimension of its accumulator over the shards of the batch, and the mesh axes of
        that dimension; or None.
      batch_shards: the number of parts into which the examples of a microbatch are cut.
      gathered: the constants of the body that are parameters gathered from their shards (see `gather_parameters`).
      cuts: the indices of the marks that cut, once they are chosen.
      labels: the phase of each equation, once the body is labelled.
      tasks: the tasks, once the body is cut.
      like: for each accumulator, the position of the step's argument that it updates, or None; once it is lowered.
    """

    equation: Equation
    schedule: Schedule
    body: LoopBody
    data_axes: tuple[Any, ...]
    batch_dims: tuple[BatchDim | None, ...]
    batch_shards: int = 1
    gathered: Mapping[Value, Gather] = field(default_factory=dict[Value, Gather])
    cuts: tuple[int, ...] = ()
    labels: Labels | None = None
    tasks: Partition | None = None
    like: tuple[int | None, ...] = ()

    def flat_body(self) -> LoopBody:
        """Return the body with plain calls and regions of `jax.checkpoint` inlined, and without hints."""
        return self.body.rewritten(inline(self.body.graph, flatten=True, remat=True, hints=False))

    def labelled(self) -> Loop:
        """Return the loop with labels; its cuts are chosen."""
        return replace(self, labels=label(self.body, self.cuts))

    def parted(self, residuals: ResidualPlan | None) -> Loop:
        """Return the loop with the tasks that its schedule runs; its body is labelled.

        Raises:
          ScheduleError: if the plan of residuals has entries for another number of stages than the loop.
        """
        schedule, last = self.schedule, self.schedule.num_stages - 1
        try:
            if residuals is not None:
                residuals.check(schedule.num_stages)
        except ScheduleError as error:
            raise ScheduleError(f"residuals= of the treduce at {self.equation.where}: {error}") from error
        tasks = [t for rank in schedule.tasks(self.body.length) for t in rank if t.stage == last]
        fuse_last = all(t.kind is TaskKind.FUSED for t in tasks)
        labels = self.labels or label(self.body, self.cuts)
        parts = partition(labels, fuse_last=fuse_last, split_backward=schedule.splits_backward, residuals=residuals)
        has_backward = any(task.kind is not TaskKind.FORWARD for task in parts.tasks)
        return replace(self, tasks=parts, schedule=schedule.with_backward() if has_backward else schedule)

    @property
    def partition(self) -> Partition:
        """The tasks, of a loop that is cut."""
        if self.tasks is None:
            raise ValueError("the loop is not cut into tasks yet")
        return self.tasks

    @property
    def constants(self) -> tuple[Atom, ...]:
        return self.equation.inputs[: len(self.body.constants)]

    @property
    def carry_init(self) -> tuple[Atom, ...]:
        return self.equation.inputs[len(self.body.constants) :]

    @property
    def carry_results(self) -> tuple[Value, ...]:
        return self.equation.outputs[: len(self.body.carry)]

    @property
    def results(self) -> tuple[Value, ...]:
        return self.equation.outputs[len(self.body.carry) :]

    def rank_of_task(self, task: int) -> int:
        return self.schedule.rank_of(self.partition.tasks[task].stage)

    @cached_property
    def readers(self) -> dict[Value, set[int]]:
        """The ranks whose tasks read each value."""
        readers: dict[Value, set[int]] = {}
        for index, task in enumerate(self.partition.tasks):
            for value in task.graph.inputs:
                readers.setdefault(value, set()).add(self.rank_of_task(index))
        return readers

    def inputs(self) -> Iterator[tuple[Value, set[int]]]:
        """Yield each operand of the lowered loop with the ranks that read it."""
        for operand, value in zip(values(self.constants), self.partition.operands, strict=True):
            yield operand, self.readers.get(value, set())
        for leaf, initial in enumerate(values(self.carry_init)):
            owners = {self.rank_of_task(c.task) for c in self.partition.carries if c.leaf == leaf}
            states = {c.state for c in self.partition.carries if c.leaf == leaf}
            yield initial, owners.union(*(self.readers.get(s, set()) for s in states))

    @cached_property
    def homes(self) -> dict[Value, frozenset[int]]:
        """The ranks on which each result of the lowered loop is made."""
        homes = {
            value: frozenset({self.rank_of_task(a.task)})
            for value, a in zip(self.results, self.partition.accumulators, strict=True)
        }
        for leaf, value in enumerate(self.carry_results):
            homes[value] = frozenset(self.rank_of_task(c.task) for c in self.partition.carries if c.leaf == leaf)
        return homes

    def verify(self) -> None:
        """Check the body, the labels and the tasks, as far as they are made."""
        self.body.graph.verify()
        if self.labels is not None:
            self.labels.verify()
        if self.tasks is not None:
            self.tasks.verify()
        if self.labels is not None and self.tasks is not None:
            verify_effects(self.labels, self.tasks)

    def headline(self) -> str:
        """Return the schedule, the marks, and what the accumulators update, as one line."""
        marks = [f"{m.name or 'unnamed'}{' (cuts)' * (i in self.cuts)}" for i, m in enumerate(self.body.marks)]
        like = ", ".join("nothing" if at is None else f"argument {at}" for at in self.like)
        first = f"loop over {self.body.length} microbatches: {type(self.schedule).__name__}; marks: {', '.join(marks)}"
        return f"{first}; its accumulators update {like}" if self.like else first

    def as_text(self) -> str:
        """Return the schedule and the marks, and the tasks, or the body, with its labels if it has some, as text."""
        return f"{self.headline()}\n{(self.tasks or self.labels or self.body.graph).as_text()}"
