"""The blocks of a loop's body: what each of them costs and holds, before it is known which marks cut.

The marks divide the body into blocks; the work after the last mark is one more block. All is computed only on demand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from jax import ShapeDtypeStruct
from jax.sharding import PartitionSpec

from jaxpp_flax.engine.analyses.batch_dimensions import ShardCounts
from jaxpp_flax.engine.analyses.data_flow import makers_of
from jaxpp_flax.engine.analyses.spec_flow import specs_after
from jaxpp_flax.engine.analyses.work import work_of
from jaxpp_flax.engine.analyses.workspace import stored, workspace
from jaxpp_flax.engine.passes.loop.label import label
from jaxpp_flax.engine.passes.loop.loop import Labels, Loop, Partition
from jaxpp_flax.engine.passes.loop.partition import CarryError, partition, residuals_of
from jaxpp_flax.engine.passes.loop.recompute import saved_by_policies
from jaxpp_flax.engine.program.specs import accumulator_spec
from jaxpp_flax.engine.traced import Marks
from jaxpp_flax.engine.tracing.inline import inline
from jaxpp_flax.engine.tracing.ir import Graph, Value, memory_kind_of, values
from jaxpp_flax.engine.tracing.loop_body import LoopBody
from jaxpp_flax.schedules.task import TaskKind

__all__ = ["Blocks", "Holding", "Work"]


@dataclass(frozen=True)
class Work:
    """The work of one microbatch in a block, forward and backward, in FLOPs (or in FLOPs that take the same time)."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        """Forward and backward work together."""
        return self.forward + self.backward


@dataclass(frozen=True, kw_only=True)
class Holding:
    """A value that blocks need in memory; a rank holds it once, even if several of its blocks need it.

    Attributes:
      kind: "parameters" (and all other operands that the loop reads whole), "data" (indexed by the microbatch, held for
        all microbatches), "gradients" (accumulators), "gathered" (whole copies of sharded parameters, with
        `fsdp="step"`); while the block's backward runs: "workspace" (what it makes for itself); for each microbatch in
        flight: "activations" and "kept" (see `residuals_of`), "saved" (activations that a policy of the user saves),
        "fused" (what is in memory of the activations if forward and backward are one task).
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
    """A loop body divided at every mark; for the arguments, see `Marks`."""

    loop: Loop
    arguments: Mapping[Value, tuple[int, PartitionSpec]] = field(default_factory=dict[Value, tuple[int, PartitionSpec]])
    shards_of: ShardCounts = field(default_factory=lambda: ShardCounts({}))

    @classmethod
    def of(cls, marks: Marks) -> Blocks:
        """Divide the body that the engine's marks are those of."""
        return cls(marks.loop, marks.arguments, marks.shards_of)

    @property
    def body(self) -> LoopBody:
        """The loop's body, with all marks."""
        return self.loop.body

    @cached_property
    def labels(self) -> Labels:
        """The phases of the body cut at every mark."""
        return label(self.body, range(len(self.body.marks)))

    @cached_property
    def partition(self) -> Partition:
        """The body cut at every mark, with forward and backward apart: block k is stage k.

        Raises:
          ValueError: if the body cannot be cut at some mark.
        """
        return partition(self.labels, fuse_last=False, splits_backward=self.loop.schedule.splits_backward)

    def work(self, flops_per_byte: float = 0.0) -> tuple[Work, ...]:
        """Estimate the work of each block; the last block is the work after the last mark.

        `flops_per_byte` gives the FLOPs in the time of moving one byte; 0 counts only operations.
        """
        last = len(self.body.marks)
        forward, backward = [0.0] * (last + 1), [0.0] * (last + 1)
        for equation, phase in self.labels.phase.items():
            of_block, block = (forward, phase) if phase <= last else (backward, 2 * last + 1 - phase)
            of_block[block] += work_of(equation, flops_per_byte)
        return tuple(map(Work, forward, backward))

    @property
    def sent(self) -> tuple[float, ...]:
        """Bytes of each mark's values: a cut at the mark sends them forward for each microbatch."""
        return tuple(float(sum(a.nbytes for marker in group for a in marker.inputs)) for group in self.body.cut_groups)

    def can_cut(self, cuts: Sequence[int]) -> bool:
        """Return whether the body can be cut at these marks; it cannot where a carry is used by two stages."""
        try:
            partition(label(self.body, cuts), fuse_last=False, splits_backward=self.loop.schedule.splits_backward)
        except CarryError:
            return False
        return True

    def spec_of(self, value: Value) -> PartitionSpec:
        """Return the partition of a constant or carry leaf inside a rank."""
        known = self.arguments.get(value)
        return PartitionSpec() if known is None else known[1]

    def state_specs(self) -> dict[Value, PartitionSpec]:
        """Return the spec of each accumulator; see `accumulator_spec`."""
        part, found = self.partition, dict[Value, PartitionSpec]()
        for accumulator in part.accumulators:
            batch_dim = self.loop.batch_dims[accumulator.part_of]
            inputs = part.tasks[accumulator.task].graph.inputs
            # A sum may be wider than its parameter is in the loop.
            dtype = accumulator.state.aval.dtype
            known = [(ShapeDtypeStruct(v.aval.shape, dtype), self.spec_of(v)) for v in inputs if v in self.arguments]
            found[accumulator.state] = accumulator_spec(accumulator.state.aval, batch_dim, None, known)
        return found

    @cached_property
    def holdings(self) -> tuple[Holding, ...]:
        """The values that each block needs in memory.

        Raises:
          ValueError: see `partition`.
        """
        part = self.partition
        readers: dict[Value, set[int]] = {}
        states = {a.state for a in part.accumulators}
        for task in part.tasks:
            for value in task.graph.inputs:
                readers.setdefault(value, set()).add(task.stage)
        specs = self.state_specs()
        # The copies of a counter share one value; a carry is held like a parameter.
        outside = {*part.operands, *(c.state for c in part.carries)}
        found: list[Holding] = []
        for value, stages in readers.items():
            if value in states or value is part.index or value not in outside:
                continue
            known = self.arguments.get(value)
            spec = self.spec_of(value)
            found.append(
                Holding(
                    kind="data" if value in part.data else "parameters",
                    nbytes=self.shards_of.nbytes(value, spec),
                    blocks=tuple(sorted(stages)),
                    argument=None if known is None else known[0],
                    shards=self.shards_of.parts(spec),
                )
            )
            if value in self.loop.gathered:
                blocks = tuple(sorted(stages))
                found.append(Holding(kind="gathered", nbytes=float(self.loop.gathered[value].nbytes), blocks=blocks))
        for accumulator in part.accumulators:
            stage = part.tasks[accumulator.task].stage
            nbytes = self.shards_of.nbytes(accumulator.state, specs[accumulator.state])
            found.append(Holding(kind="gradients", nbytes=nbytes, blocks=(stage,)))
        activations, kept = residuals_of(part)
        saved = {value: stages & self._saving.get(value, set()) for value, stages in activations.items()}
        return (
            *found,
            *self._in_flight("activations", activations),
            *self._in_flight("kept", kept),
            *self._in_flight("saved", {v: stages for v, stages in saved.items() if stages}),
            *self._in_one_task(activations),
            *self._workspaces,
        )

    @cached_property
    def _workspaces(self) -> list[Holding]:
        found = dict[int, float]()
        for task in self.partition.tasks:
            if task.kind is not TaskKind.FORWARD:
                read = [self._specs_made.get(v) or self._spec_read(v) for v in task.graph.inputs]
                nbytes = workspace(task.graph, read, self.shards_of.axes)
                found[task.stage] = max(nbytes, found.get(task.stage, 0.0))
        return [Holding(kind="workspace", nbytes=nbytes, blocks=(at,)) for at, nbytes in found.items() if nbytes]

    @cached_property
    def _saving(self) -> dict[Value, set[int]]:
        """The blocks in which a policy of the user saves a value."""
        part, found = self.partition, dict[Value, set[int]]()
        for task in part.tasks:
            if task.kind is not TaskKind.FORWARD:
                for value in saved_by_policies([task.graph.equations], self.labels.marked):
                    found.setdefault(value, set()).add(task.stage)
        return found

    def _in_flight(self, kind: str, held: Mapping[Value, set[int]]) -> list[Holding]:
        return [
            Holding(
                kind=kind,
                nbytes=self._nbytes_made(value),
                blocks=tuple(sorted(stages)),
            )
            for value, stages in held.items()
            if memory_kind_of(value.aval) is None  # a policy of the user may have put it on the host
        ]

    def _in_one_task(self, activations: Mapping[Value, set[int]]) -> list[Holding]:
        """Return what is in memory of the activations if XLA fuses forwards with the backwards that read them."""
        ahead = [e for t in self.partition.tasks if t.kind is TaskKind.FORWARD for e in t.graph.equations]
        equations = tuple(dict.fromkeys(ahead))  # several tasks may have a free one
        made = {value for equation in equations for value in equation.outputs}
        read = dict.fromkeys(v for e in equations for v in values(e.inputs) if v not in made)
        wanted = tuple(v for v in activations if v in made)
        marked = tuple(v for v in self.labels.marked if v in made)
        flat = inline(Graph(tuple(read), (*wanted, *marked), equations), flatten=True, remat=True)
        specs = specs_after(flat, [self._spec_read(v) for v in read], self.shards_of.axes)
        held_for = stored(replace(flat, outputs=flat.outputs[len(wanted) :]))
        found = dict[Value, set[int]]()
        for value, atom in zip(wanted, flat.outputs, strict=False):
            for held in held_for[atom] if isinstance(atom, Value) and memory_kind_of(value.aval) is None else ():
                found.setdefault(held, set()).update(activations[value])
        return [
            Holding(
                kind="fused", nbytes=self.shards_of.nbytes(v, specs.get(v, PartitionSpec())), blocks=tuple(sorted(s))
            )
            for v, s in found.items()
            if v not in read
        ]

    @cached_property
    def with_effects(self) -> frozenset[int]:
        """The blocks whose results need an operation with side effects, which may not run twice."""
        ahead = [t for t in self.partition.tasks if t.kind is TaskKind.FORWARD]
        made = {t.stage: makers_of(t.graph.equations, values(t.graph.outputs), ()) for t in ahead}
        return frozenset(block for block, equations in made.items() if any(e.effects for e in equations))

    @cached_property
    def passing(self) -> tuple[float, ...]:
        """For each block, the bytes that its forward makes for forwards of other blocks, not for its own backward."""
        tasks, read = self.partition.tasks, dict[tuple[int, bool], set[Value]]()
        for task in tasks:
            read.setdefault((task.stage, task.kind is TaskKind.FORWARD), set()).update(task.graph.inputs)
        found = [0.0] * (len(self.body.marks) + 1)
        for task in tasks:
            if task.kind is TaskKind.FORWARD:
                ahead = set[Value]().union(
                    *(of for (stage, is_ahead), of in read.items() if is_ahead and stage > task.stage)
                )
                leaving = ahead.intersection(values(task.graph.outputs)) - read.get((task.stage, False), set())
                found[task.stage] = sum(map(self._nbytes_made, leaving))
        return tuple(found)

    def _nbytes_made(self, value: Value) -> float:
        """Return the bytes of each device's part of a value that tasks make."""
        return self.shards_of.nbytes(value, self._specs_made.get(value, PartitionSpec()))

    @cached_property
    def _specs_made(self) -> dict[Value, PartitionSpec]:
        """The partition of each value that tasks make, where it is not whole: a prediction."""
        specs = dict(self.state_specs())
        for task in self.partition.tasks:
            read = [specs.get(v) or self._spec_read(v) for v in task.graph.inputs]
            specs.update(specs_after(task.graph, read, self.shards_of.axes))
        return specs

    def _spec_read(self, value: Value) -> PartitionSpec:
        """Return the partition in which tasks read a constant or carry leaf: whole, where it is gathered."""
        return self.loop.gathered[value].spec if value in self.loop.gathered else self.spec_of(value)
