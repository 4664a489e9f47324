"""The marks and blocks of a loop body, for an assignment of stages.

The marks divide the body into blocks; the work after the last mark is one more block. Costs are computed only on
demand: an even assignment needs only the names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, overload

from jax.sharding import PartitionSpec

from jaxpp_flax.engine.costs import Work, work_of_blocks
from jaxpp_flax.engine.passes.loop.label import label
from jaxpp_flax.engine.passes.loop.loop_tasks import Partition
from jaxpp_flax.engine.passes.loop.partition import partition
from jaxpp_flax.engine.program.accumulators import accumulator_spec
from jaxpp_flax.engine.tracing.ir import Atom, Value, values
from jaxpp_flax.engine.tracing.loop_body import LoopBody
from jaxpp_flax.engine.tracing.markers import Mark
from jaxpp_flax.schedules.task import TaskKind

__all__ = ["Blocks", "Holding", "Marks"]


@dataclass(frozen=True, kw_only=True)
class Holding:
    """A value that blocks need in memory; a rank holds it once, even if several of its blocks need it.

    Attributes:
      kind: "parameters" (and all other operands that the loop reads whole), "data" (indexed by the microbatch, held for
        all microbatches), "gradients" (accumulators), or "activations" (made by a forward and read by a backward, or
        made by an input gradient and read by the weight gradient: held for each microbatch in flight).
      nbytes: bytes on each device of a rank.
      blocks: the blocks that need the value, in increasing order.
      argument: its position among the step's flat arguments, counted from the end (-1 is the last); or None.
      shards: the number of devices of a rank that share the value.
    """

    kind: str
    nbytes: float
    blocks: tuple[int, ...]
    argument: int | None = None
    shards: int = 1


@dataclass(frozen=True, eq=False)
class Blocks:
    """A loop body divided at every mark, with the facts about the step that are known before the cut.

    Args:
      body: an inlined body.
      split_backward: whether the schedule runs input and weight gradients apart.
      arguments: for each constant and carry leaf that is an argument of the step: its position from the end, and its
        spec.
      data_axes: for each result, the mesh axes over which it must still be summed after the loop, or None.
      shards_of: returns the number of shards over an entry of a PartitionSpec.
      batch_shards: the number of parts into which the examples of a microbatch are cut.
    """

    body: LoopBody
    split_backward: bool
    arguments: Mapping[Atom, tuple[int, PartitionSpec]] = field(default_factory=dict)
    data_axes: Sequence[Any] = ()
    shards_of: Callable[[Any], int] = lambda entry: 1
    batch_shards: int = 1

    @cached_property
    def partition(self) -> Partition:
        """The body cut at every mark, with forward and backward apart: block k is stage k.

        Raises:
          ValueError: if the body cannot be cut at some mark.
        """
        labels = label(self.body, range(len(self.body.marks)))
        return partition(labels, fuse_last=False, split_backward=self.split_backward)

    def spec_of(self, value: Value) -> PartitionSpec:
        """Return the partition of a constant or carry leaf inside a rank."""
        known = self.arguments.get(value)
        return PartitionSpec() if known is None else known[1]

    def state_specs(self) -> dict[Value, PartitionSpec]:
        """Return the spec of each accumulator; see `accumulator_spec`."""
        part, found = self.partition, dict[Value, PartitionSpec]()
        leading = part.leading_axes(self.data_axes or [None] * len(part.results))
        for accumulator, axes in zip(part.accumulators, leading, strict=True):
            inputs = part.tasks[accumulator.task].graph.inputs
            known = [(v.aval, self.spec_of(v)) for v in inputs if v in self.arguments]
            found[accumulator.state] = accumulator_spec(accumulator.state.aval, axes, None, known)
        return found

    @cached_property
    def holdings(self) -> tuple[Holding, ...]:
        """The values that each block needs in memory.

        Raises:
          ValueError: see `partition`.
        """
        part = self.partition
        readers: dict[Value, set[int]] = {}
        made: set[Value] = set()
        from_inputs: dict[int, set[Value]] = {}
        states = {a.state for a in part.accumulators}
        for task in part.tasks:
            for value in task.graph.inputs:
                readers.setdefault(value, set()).add(task.stage)
            results = set(values(task.graph.outputs))
            if task.kind is TaskKind.FORWARD:
                made |= results
            elif task.kind is TaskKind.BACKWARD_INPUT:
                from_inputs[task.stage] = results
        specs = self.state_specs()
        # The copies of a counter share one value; a carry is held like a parameter.
        outside = {*part.operands, *(c.state for c in part.carries)}
        found: list[Holding] = []
        for value, stages in readers.items():
            if value in states or value is part.index or value not in outside:
                continue
            known = self.arguments.get(value)
            shards = self._shards(self.spec_of(value))
            found.append(
                Holding(
                    kind="data" if value in part.data else "parameters",
                    nbytes=value.nbytes / shards,
                    blocks=tuple(sorted(stages)),
                    argument=None if known is None else known[0],
                    shards=shards,
                )
            )
        for accumulator in part.accumulators:
            stage = part.tasks[accumulator.task].stage
            nbytes = accumulator.state.nbytes / self._shards(specs[accumulator.state])
            found.append(Holding(kind="gradients", nbytes=nbytes, blocks=(stage,)))
        made -= {a.result for a in part.accumulators} | {c.result for c in part.carries}
        kept: dict[Value, set[int]] = {}
        for task in part.tasks:
            if task.kind is not TaskKind.FORWARD:
                # A weight gradient also reads results of its own input gradient.
                left = from_inputs.get(task.stage, set()) if task.kind is TaskKind.BACKWARD_WEIGHT else set[Value]()
                for value in task.graph.inputs:
                    if value in made or value in left:
                        kept.setdefault(value, set()).add(task.stage)
        found += [
            Holding(
                kind="activations",
                nbytes=value.nbytes / (self.batch_shards if value.aval.ndim else 1),
                blocks=tuple(sorted(stages)),
            )
            for value, stages in kept.items()
        ]
        return tuple(found)

    def _shards(self, spec: PartitionSpec) -> int:
        return math.prod(self.shards_of(entry) for entry in spec if entry is not None)


class Marks(Sequence[Mark]):
    """The marks of a loop body in program order; an assignment can also ask for the costs of the blocks."""

    def __init__(self, blocks: Blocks) -> None:
        self._marks, self.blocks = blocks.body.marks, blocks

    @overload
    def __getitem__(self, index: int) -> Mark: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Mark]: ...
    def __getitem__(self, index: Any) -> Any:
        return self._marks[index]

    def __len__(self) -> int:
        return len(self._marks)

    def work(self, flops_per_byte: float = 0.0) -> tuple[Work, ...]:
        """Estimate the work of each block; there is one block more than marks. See `work_of_blocks`."""
        return work_of_blocks(self.blocks.body, flops_per_byte)

    @property
    def sent(self) -> tuple[float, ...]:
        """Bytes of each mark's values: a cut at the mark sends them forward for each microbatch."""
        return tuple(float(sum(a.nbytes for a in marker.inputs)) for marker in self.blocks.body.markers)
