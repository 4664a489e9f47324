"""Turn the graph of a step into its program, in two parts: the passes before the choices, and those after them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import PartitionSpec

from jaxpp_flax.engine.analyses.batch_dimensions import ShardCounts
from jaxpp_flax.engine.blocks import Blocks, CutPolicy, Marks
from jaxpp_flax.engine.passes import PLACING, PREPARING, WRITING
from jaxpp_flax.engine.passes.loop.loop import Loop, LoweredLoop, each_loop
from jaxpp_flax.engine.passes.placed import Placed
from jaxpp_flax.engine.passes.runner import Observer, Residuals, Settings, observers
from jaxpp_flax.engine.program.program import Program
from jaxpp_flax.engine.tracing.ir import Atom, Graph, Value
from jaxpp_flax.schedules.schedule import Schedule

__all__ = ["Built", "Prepared", "ScheduleOf", "prepare"]

ScheduleOf = Callable[[Schedule], Schedule]


@dataclass(frozen=True, eq=False)
class Built:
    """The program, the placed step, and the settings of the passes."""

    program: Program
    placed: Placed
    settings: Settings

    @property
    def loops(self) -> tuple[LoweredLoop, ...]:
        """The loops of the step in program order."""
        return self.placed.loops


@dataclass(frozen=True, eq=False)
class Prepared:
    """A step after the passes that no choice of schedules, cuts and residuals changes; a planner tries many."""

    step: Graph
    settings: Settings
    observe: Sequence[Observer]
    arguments: Mapping[Value, tuple[int, PartitionSpec]]  # of the step: the place of each, and its spec

    def build(self, policy: CutPolicy, residuals: Residuals = None, schedule_of: ScheduleOf | None = None) -> Built:
        """Run the other passes; `schedule_of` gives a loop another schedule than its own, for as many ranks.

        Raises:
          ValueError: if a loop's marks or residuals do not fit its schedule.
        """
        shards, arguments = self.settings.shards, _with_converted(self.step, self.arguments)

        def choose_cuts(loop: Loop) -> Sequence[int]:
            return policy(Marks(_blocks(loop, arguments, shards)), loop.schedule.num_stages)

        settings, step = replace(self.settings, choose_cuts=choose_cuts, residuals=residuals), self.step
        if schedule_of is not None:
            step = each_loop(step, Loop, lambda loop: replace(loop, schedule=schedule_of(loop.schedule)))
        placed = PLACING.run(step, settings, self.observe)
        return Built(WRITING.run(placed, settings, self.observe), placed, settings)


def prepare(
    graph: Graph,
    num_ranks: int,
    donated: Sequence[bool],
    specs: Sequence[PartitionSpec],
    axis_sizes: Mapping[str, int],
    **others: Any,
) -> Prepared:
    """Run the first passes on a traced step; `axis_sizes` are those of a submesh. See `Settings` for the others.

    Raises:
      ValueError: if the step holds no loop, a loop's schedule does not fit, or a marker cannot cut.
    """
    position = {value: i - len(graph.inputs) for i, value in enumerate(graph.inputs)}
    arguments = {value: (position[value], spec) for value, spec in zip(graph.inputs, specs, strict=True)}
    settings = Settings(
        num_ranks=num_ranks, donated=tuple(donated), specs=tuple(specs), shards=ShardCounts(axis_sizes), **others
    )
    observe = observers()
    return Prepared(PREPARING.run(graph, settings, observe), settings, observe, arguments)


def _with_converted(
    graph: Graph, arguments: Mapping[Value, tuple[int, PartitionSpec]]
) -> Mapping[Value, tuple[int, PartitionSpec]]:
    """Return the arguments of a step, and the values that are one of them in another dtype: those of a precision."""
    found = dict(arguments)
    for equation in graph.equations:
        source = equation.inputs[0] if equation.name == "convert_element_type" else None
        if isinstance(source, Value) and source in found:
            found[equation.outputs[0]] = found[source]
    return found


def _blocks(loop: Loop, arguments: Mapping[Value, tuple[int, PartitionSpec]], shards: ShardCounts) -> Blocks:
    """Make a loop's blocks for a policy; `arguments` gives the place of each argument of the step and its spec."""
    outer: dict[Value, Atom] = dict(zip(loop.body.constants, loop.constants, strict=True))
    outer.update({value: gather.parameter for value, gather in loop.gathered.items()})
    outer.update(zip(loop.body.carry, loop.carry_init, strict=True))
    known = {v: arguments[a] for v, a in outer.items() if isinstance(a, Value) and a in arguments}
    return Blocks(loop, known, shards)
