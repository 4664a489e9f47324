"""A loop cut into tasks: `partition` makes it, and the later passes read it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from jaxpp_flax.engine.tracing.inline import inline
from jaxpp_flax.engine.tracing.ir import Graph, Value, VerificationError
from jaxpp_flax.engine.tracing.loop_body import sliced_by_index
from jaxpp_flax.schedules.task import MEANING, TaskKind

__all__ = ["UNNUMBERED", "Accumulator", "Carry", "LoopTask", "Partition"]

UNNUMBERED = -1  # the task of an accumulator or a carry while the loop is cut: tasks get their numbers last


@dataclass(frozen=True, eq=False)
class LoopTask:
    """The work of one stage and kind for one microbatch.

    `fused` marks a last stage whose forward and backward run as one task (its kind is FORWARD).
    """

    stage: int
    kind: TaskKind
    graph: Graph
    fused: bool = False

    @property
    def name(self) -> str:
        """The name as in schedules: `fwd_2`, `bwd_2`, ..."""
        return f"{'fwd_bwd' if self.fused else MEANING[self.kind].prefix}_{self.stage}"


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
    """A loop cut into tasks."""

    num_stages: int
    operands: tuple[Value, ...]
    index: Value
    tasks: tuple[LoopTask, ...]
    accumulators: tuple[Accumulator, ...]
    carries: tuple[Carry, ...]

    @cached_property
    def data(self) -> frozenset[Value]:
        """The operands that some task slices by the microbatch's index; the other operands are parameters."""
        graphs = [inline(task.graph, flatten=True) for task in self.tasks]
        sliced = {v for graph in graphs for v in sliced_by_index(graph.equations, self.index)}
        return frozenset(sliced.intersection(self.operands))

    def verify(self) -> None:
        """Check each task, and that each edge is defined by one task, earlier in the order of phases."""
        known = {*self.operands, self.index}
        known.update(a.state for a in self.accumulators)
        known.update(c.state for c in self.carries)
        made: set[Value] = set()
        for task in self.tasks:
            task.graph.verify()
            for value in task.graph.inputs:
                if value not in known and value not in made:
                    raise VerificationError(f"task {task.name} reads a value that no earlier task makes")
            for atom in task.graph.outputs:
                if not isinstance(atom, Value):
                    raise VerificationError(f"task {task.name} returns a constant")
                made.add(atom)

    def as_text(self) -> str:
        return "\n".join(f"task {t.name} (stage {t.stage})\n{t.graph.as_text()}" for t in self.tasks)
