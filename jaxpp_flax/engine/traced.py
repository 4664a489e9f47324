"""A traced step, and the passes that turn it into a program: those before the choices of a planner, and the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, overload

from jax.sharding import PartitionSpec

from jaxpp_flax.engine.analyses.batch_dimensions import ShardCounts
from jaxpp_flax.engine.arrays.ambient_mesh import context_mesh
from jaxpp_flax.engine.arrays.memory_kinds import check_devices
from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.engine.passes import PLACING, PREPARING, WRITING
from jaxpp_flax.engine.passes.loop.loop import Loop, each_loop
from jaxpp_flax.engine.passes.place import StepOnRanks
from jaxpp_flax.engine.passes.runner import Choices, Observer, Residuals, Settings
from jaxpp_flax.engine.pipeline import PlacedPipeline
from jaxpp_flax.engine.program.program import HOST_MEMORY
from jaxpp_flax.engine.runtime.task_compiler import TaskCompiler
from jaxpp_flax.engine.signature import Signature
from jaxpp_flax.engine.tracing.ir import Atom, Graph, Value
from jaxpp_flax.engine.tracing.markers import Mark
from jaxpp_flax.schedules.schedule import Schedule

__all__ = [
    "CutPolicy",
    "Marks",
    "ScheduleOf",
    "Traced",
    "cut_at_every_mark",
    "passes_context",
    "prepare",
    "with_choices",
]

ScheduleOf = Callable[[Schedule], Schedule]
Arguments = Mapping[Value, tuple[int, PartitionSpec]]  # the place of each argument, counted from the end, and its spec


@dataclass(frozen=True, eq=False)
class Marks(Sequence[Mark]):
    """The marks of a loop's body in program order, with what is known of the loop before one of them cuts.

    A policy may choose by these facts; the engine computes nothing with them.

    Args:
      loop: the loop, opened.
      arguments: for each constant and carry leaf that is an argument of the step: its position from the end, and its
        spec.
      shards_of: the number of shards over an entry of a PartitionSpec.
    """

    loop: Loop
    arguments: Arguments = field(default_factory=dict[Value, tuple[int, PartitionSpec]])
    shards_of: ShardCounts = field(default_factory=lambda: ShardCounts({}))

    @overload
    def __getitem__(self, index: int) -> Mark: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Mark]: ...
    def __getitem__(self, index: Any) -> Any:
        return self.loop.body.marks[index]

    def __len__(self) -> int:
        return len(self.loop.body.marks)


CutPolicy = Callable[[Sequence[Mark], int], Sequence[int]]
"""Takes the marks in program order and the number of stages; returns the marks that cut: one fewer than stages."""


def cut_at_every_mark(marks: Sequence[Mark], num_stages: int) -> Sequence[int]:
    """Cut at every mark; a final mark after the last stage adds no cut.

    Raises:
      ValueError: if there are fewer or more marks than the stages need.
    """
    if len(marks) in (num_stages - 1, num_stages):
        return range(num_stages - 1)
    # Only the line: with the surrounding functions, a few marks fill the screen.
    listing = "; ".join(f"{m.name or 'unnamed'} at {m.where.partition(' (')[0]}" for m in marks[:5]) or "none"
    more = f" and {len(marks) - 5} more" if len(marks) > 5 else ""
    need = f"{num_stages - 1} mark{'' if num_stages == 2 else 's'} (or {num_stages} with a final one)"
    remedy = "Add marks" if len(marks) < num_stages - 1 else "Choose which of them cut (`assignment=`/`cut_policy=`)"
    raise ValueError(
        f"a pipeline of {num_stages} stages needs {need}, but the loop's body holds {len(marks)}: {listing}{more}. "
        f"{remedy}, or change the number of stages."
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class Traced:
    """A traced step after the passes that no choice of schedules, cuts and residuals changes; a planner tries many.

    `out_specs` are the requested partitions of the results.
    """

    step: Graph
    settings: Settings
    observe: Sequence[Observer]
    signature: Signature
    constants: tuple[Any, ...]
    out_specs: Sequence[PartitionSpec | None]
    compiler: TaskCompiler[MpmdMesh]
    placed_type: type[PlacedPipeline] = PlacedPipeline

    def place(
        self, policy: CutPolicy, residuals: Residuals = None, schedule_of: ScheduleOf | None = None
    ) -> PlacedPipeline:
        """Place the step on ranks; `schedule_of` gives a loop another schedule than its own, for as many ranks.

        Raises:
          ValueError: if a loop's marks or residuals do not fit its schedule.
        """
        settings, placed = self.on_ranks(policy, residuals, schedule_of)
        return self.written(placed, settings, self.signature)

    def on_ranks(
        self, policy: CutPolicy, residuals: Residuals = None, schedule_of: ScheduleOf | None = None
    ) -> tuple[Choices, StepOnRanks]:
        """Place the step as `place` does; return the settings, and the step before its program is written."""
        mesh, step = self.compiler.mesh, self.step
        if schedule_of is not None:
            step = each_loop(step, Loop, lambda loop: replace(loop, schedule=schedule_of(loop.schedule)))
        settings = with_choices(self.settings, step, policy, residuals)
        with passes_context(mesh):
            placed = PLACING.run(step, settings, self.observe)
        chosen = settings.residual_plan
        if chosen is not None and any(stage.offload for stage in chosen.stages):
            check_devices(HOST_MEMORY, mesh.jax_mesh.devices.flat, "a ResidualPlan that offloads")
        return settings, placed

    def written(self, placed: StepOnRanks, settings: Choices, signature: Signature) -> PlacedPipeline:
        """Write the program of a step on ranks, for calls of a signature."""
        with passes_context(self.compiler.mesh):
            program = WRITING.run(placed, settings, self.observe)
        # A result for all processes is whole on each device, as each of them reads it.
        specs = [
            spec if spec is not None or not for_all else PartitionSpec()
            for spec, for_all in zip(self.out_specs, placed.for_all, strict=True)
        ]
        return self.placed_type(
            program=program,
            signature=signature,
            constants=self.constants,
            inputs=placed.inputs,
            outputs=placed.outputs,
            result_specs=specs,
            compiler=self.compiler,
            loops=placed.loops,
            idle_ranks=settings.idle_ranks,
        )


def passes_context(mesh: MpmdMesh) -> AbstractContextManager[Any]:
    """Return the context in which passes trace operations of their own: no mesh of the caller's may change them."""
    return context_mesh(mesh.abstract_submesh if mesh.is_explicit else None)


def prepare(graph: Graph, settings: Settings, observe: Sequence[Observer]) -> Graph:
    """Run the passes before the choices on the graph of a traced step.

    Raises:
      ValueError: if the step holds no loop, a loop's schedule does not fit, or a marker cannot cut.
    """
    return PREPARING.run(graph, settings, observe)


def with_choices(settings: Settings, step: Graph, policy: CutPolicy, residuals: Residuals = None) -> Choices:
    """Return the settings of the other passes: a step's cuts, and what becomes of its residuals."""
    arguments = _arguments(step, settings.specs)

    def choose_cuts(loop: Loop) -> Sequence[int]:
        return policy(_marks(loop, arguments, settings.shards), loop.schedule.num_stages)

    return Choices(**vars(settings), choose_cuts=choose_cuts, residuals=residuals)


def _arguments(graph: Graph, specs: Sequence[PartitionSpec]) -> Arguments:
    """Return the arguments of a step, and the values that are one of them in another dtype: those of a precision."""
    arguments = {value: (i - len(specs), spec) for i, (value, spec) in enumerate(zip(graph.inputs, specs, strict=True))}
    for equation in graph.equations:
        source = equation.inputs[0] if equation.name == "convert_element_type" else None
        if isinstance(source, Value) and source in arguments:
            arguments[equation.outputs[0]] = arguments[source]
    return arguments


def _marks(loop: Loop, arguments: Arguments, shards: ShardCounts) -> Marks:
    """Return a loop's marks for a policy."""
    outer: dict[Value, Atom] = dict(zip(loop.body.constants, loop.constants, strict=True))
    outer.update({value: gather.parameter for value, gather in loop.gathered.items()})
    outer.update(zip(loop.body.carry, loop.carry_init, strict=True))
    facts = {v: arguments[a] for v, a in outer.items() if isinstance(a, Value) and a in arguments}
    return Marks(loop, facts, shards)
