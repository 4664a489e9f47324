"""Open the loops of a step: read each schedule, and make each body a structure of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jaxpp_flax.engine.analyses.batch_dimensions import BatchDim
from jaxpp_flax.engine.passes.check_supported import check_supported
from jaxpp_flax.engine.passes.fsdp.rule import Gather
from jaxpp_flax.engine.passes.loop.label import Labels, label
from jaxpp_flax.engine.passes.loop.loop_tasks import Partition
from jaxpp_flax.engine.passes.loop.partition import partition, verify_effects
from jaxpp_flax.engine.program.one_pass import OnePass
from jaxpp_flax.engine.tracing.inline import count_marks, inline
from jaxpp_flax.engine.tracing.ir import Atom, Equation, Graph, Value
from jaxpp_flax.engine.tracing.loop_body import LoopBody
from jaxpp_flax.engine.tracing.treduce import treduce_p
from jaxpp_flax.schedules.errors import ScheduleError
from jaxpp_flax.schedules.residuals import ResidualPlan
from jaxpp_flax.schedules.schedule import Schedule
from jaxpp_flax.schedules.task import FusedTask

__all__ = ["OpenLoop", "Opened", "open_loops"]


@dataclass(frozen=True, eq=False)
class Opened:
    """A step and its loops in program order; passed between the passes on loop bodies."""

    graph: Graph
    loops: tuple[OpenLoop, ...]

    def each(self, change: Callable[[OpenLoop], OpenLoop]) -> Opened:
        """Return the same step with `change` made to each loop."""
        return replace(self, loops=tuple(map(change, self.loops)))

    def verify(self) -> None:
        for loop in self.loops:
            loop.verify()

    def as_text(self) -> str:
        """Return each loop as text; the step around the loops is unchanged since the last graph."""
        return "\n".join(loop.as_text() for loop in self.loops)


@dataclass(frozen=True, eq=False)
class OpenLoop:
    """A `treduce` of the step with its schedule and its body.

    Attributes:
      equation: the `treduce`.
      schedule: the schedule, for the mesh's number of ranks.
      body: the inlined body.
      data_axes: for each result, the mesh axes over which it must still be summed after the loop, or None.
      batch_dims: for each result, the dimension of its accumulator over the shards of the batch, and the mesh axes of
        that dimension; or None.
      batch_shards: the number of parts into which the examples of a microbatch are cut.
      gathered: the constants of the body that are parameters gathered from their shards (see `gather_parameters`).
      cuts: the indices of the marks that cut, once they are chosen.
      labels: the phase of each equation, once the body is labelled.
      partition: the tasks, once the body is cut.
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
    partition: Partition | None = None

    def flat_body(self) -> LoopBody:
        """Return the body with plain calls and regions of `jax.checkpoint` inlined, and without hints."""
        return self.body.rewritten(inline(self.body.graph, flatten=True, remat=True, hints=False))

    def labelled(self) -> OpenLoop:
        """Return the loop with labels; its cuts are chosen."""
        return replace(self, labels=label(self.body, self.cuts))

    def parted(self, residuals: ResidualPlan | None) -> OpenLoop:
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
        fuse_last = all(isinstance(t, FusedTask) for t in tasks)
        labels = self.labels or label(self.body, self.cuts)
        parts = partition(labels, fuse_last=fuse_last, split_backward=schedule.splits_backward, residuals=residuals)
        return replace(self, partition=parts)

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

    def verify(self) -> None:
        """Check the body, the labels and the tasks, as far as they are made."""
        self.body.graph.verify()
        if self.labels is not None:
            self.labels.verify()
        if self.partition is not None:
            self.partition.verify()
        if self.labels is not None and self.partition is not None:
            verify_effects(self.labels, self.partition)

    def as_text(self) -> str:
        """Return the tasks, or the body with its labels, or the body after its schedule and marks, as text."""
        made = self.partition or self.labels
        if made is not None:
            return made.as_text()
        marks = [f"{m.name or 'unnamed'}{' (cuts)' * (i in self.cuts)}" for i, m in enumerate(self.body.marks)]
        first = f"loop over {self.body.length} microbatches: {type(self.schedule).__name__}; marks: {', '.join(marks)}"
        return f"{first}\n{self.body.graph.as_text()}"


def open_loops(graph: Graph, num_ranks: int) -> Opened:
    """Read the schedule of each loop, and inline its body.

    Raises:
      ValueError, TypeError: if the step holds no loop, or a loop's schedule does not fit the mesh.
      ValueError, NotImplementedError: if the step has what no pipeline runs; see `check_supported`.
    """
    check_supported(graph)
    loops = tuple(_open(e, num_ranks) for e in graph.equations if e.primitive is treduce_p)
    if not loops:
        raise ValueError(
            "the step given to mpmd_jit_with_loop holds no `treduce`: there is no loop over microbatches to pipeline. "
            "Wrap the work of one microbatch: `treduce(jax.value_and_grad(loss), batch, schedule=Std1F1B(n))`; "
            "for inference use `mpmd_jit`."
        )
    return Opened(graph, loops)


def _open(equation: Equation, num_ranks: int) -> OpenLoop:
    schedule = _read_schedule(equation, num_ranks)
    graph = inline(equation.params["body"], hints=False)
    check_supported(graph)
    body = LoopBody.of(graph, equation.params)
    if isinstance(schedule, OnePass):
        schedule = schedule.without_dead_stages(count_marks(equation.params["body"]), len(body.markers))
    none = (None,) * len(body.operations)
    return OpenLoop(equation, schedule, body, data_axes=none, batch_dims=none)


def _read_schedule(equation: Equation, num_ranks: int) -> Schedule:
    schedule, length = equation.params["schedule"], equation.params["length"]
    where = equation.where
    if schedule is None:
        raise ValueError(
            f"the treduce at {where} has no schedule, so its tasks have no order. Pass one: "
            f"`treduce(..., schedule=Std1F1B({num_ranks}))`."
        )
    if not isinstance(schedule, Schedule):
        raise TypeError(
            f"the treduce at {where} got schedule={schedule!r} ({type(schedule).__name__}). Pass a Schedule object, "
            f"e.g. `Std1F1B({num_ranks})`; `jaxpp_flax.schedules.by_name` makes one from a name."
        )
    if schedule.num_ranks != num_ranks:
        raise ValueError(
            f"the schedule of the treduce at {where}, {type(schedule).__name__}, is for {schedule.num_ranks} ranks, "
            f"but the mesh has {num_ranks}. Make it with the mesh's `mpmd_dim`."
        )
    schedule.check(length)
    return schedule
