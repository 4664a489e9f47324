"""Open the loops of a step: read each schedule, and make each body a structure of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from jaxpp_flax.engine.analyses.partial_sums import refuse_partial_sums
from jaxpp_flax.engine.tracing.hints import without_hints
from jaxpp_flax.engine.tracing.inline import inline
from jaxpp_flax.engine.tracing.ir import Atom, Equation, Graph, Value
from jaxpp_flax.engine.tracing.loop_body import LoopBody
from jaxpp_flax.engine.tracing.treduce import treduce_p
from jaxpp_flax.schedules.schedule import Schedule

__all__ = ["OpenLoop", "Opened", "open_loops"]


class _Printable(Protocol):
    def verify(self) -> None: ...

    def as_text(self) -> str: ...


L = TypeVar("L", bound=_Printable)
M = TypeVar("M", bound=_Printable)


@dataclass(frozen=True, eq=False)
class Opened(Generic[L]):
    """A step and its loops in program order; passed between the passes on loop bodies."""

    graph: Graph
    loops: tuple[L, ...]

    def each(self, change: Callable[[L], M]) -> Opened[M]:
        """Return the same step with `change` made to each loop."""
        return Opened(self.graph, tuple(map(change, self.loops)))

    def verify(self) -> None:
        """Check each loop."""
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
      batch_shards: the number of parts into which the examples of a microbatch are cut.
      cuts: the indices of the marks that cut, once they are chosen.
    """

    equation: Equation
    schedule: Schedule
    body: LoopBody
    data_axes: tuple[Any, ...]
    batch_shards: int = 1
    cuts: tuple[int, ...] = ()

    @property
    def constants(self) -> tuple[Atom, ...]:
        """The operands that every microbatch reads."""
        return self.equation.inputs[: len(self.body.constants)]

    @property
    def carry_init(self) -> tuple[Atom, ...]:
        """The carry of the first microbatch."""
        return self.equation.inputs[len(self.body.constants) :]

    @property
    def carry_results(self) -> tuple[Value, ...]:
        """The carry after the last microbatch."""
        return self.equation.outputs[: len(self.body.carry)]

    @property
    def results(self) -> tuple[Value, ...]:
        """The reduced results."""
        return self.equation.outputs[len(self.body.carry) :]

    def verify(self) -> None:
        """Check the body."""
        self.body.graph.verify()

    def as_text(self) -> str:
        """Return the schedule, the marks, the marks that cut, and the body, as text."""
        marks = [f"{m.name or 'unnamed'}{' (cuts)' * (i in self.cuts)}" for i, m in enumerate(self.body.marks)]
        first = f"loop over {self.body.length} microbatches: {type(self.schedule).__name__}; marks: {', '.join(marks)}"
        return f"{first}\n{self.body.graph.as_text()}"


def open_loops(graph: Graph, num_ranks: int) -> Opened[OpenLoop]:
    """Read the schedule of each loop, and inline its body.

    Raises:
      ValueError, TypeError: if the step holds no loop, or a loop's schedule does not fit the mesh.
    """
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
    graph = without_hints(inline(equation.params["body"]))
    refuse_partial_sums(graph)
    body = LoopBody.of(graph, **equation.params)
    return OpenLoop(equation, schedule, body, data_axes=(None,) * len(body.operations))


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
