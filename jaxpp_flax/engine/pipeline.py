"""Turn the graph of a step into its program: build the shared settings of the passes, and run the passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import PartitionSpec

from jaxpp_flax.engine.analyses.batch_dimensions import ShardCounts
from jaxpp_flax.engine.blocks import Blocks, CutPolicy, Marks
from jaxpp_flax.engine.passes import PASSES
from jaxpp_flax.engine.passes.loop.loop import Loop
from jaxpp_flax.engine.passes.placed import Placed
from jaxpp_flax.engine.passes.runner import Settings, observers, run_passes
from jaxpp_flax.engine.program.program import Program
from jaxpp_flax.engine.tracing.ir import Atom, Graph, Value

__all__ = ["Built", "build"]


@dataclass(frozen=True, eq=False)
class Built:
    """The program, the placed step, and the settings of the passes."""

    program: Program
    placed: Placed
    settings: Settings

    @property
    def loops(self) -> tuple[Loop, ...]:
        """The loops of the step in program order."""
        return tuple(self.placed.loop_of.values())


def build(
    graph: Graph,
    num_ranks: int,
    policy: CutPolicy,
    donated: Sequence[bool],
    specs: Sequence[PartitionSpec],
    axis_sizes: Mapping[str, int],
    **others: Any,
) -> Built:
    """Run all passes on a traced step; `axis_sizes` are those of a submesh. See `Settings` for the other arguments.

    Raises:
      ValueError: if the step holds no loop, a loop's schedule or marks do not fit, or a marker cannot cut.
    """
    shards = ShardCounts(axis_sizes)
    position = {value: i - len(graph.inputs) for i, value in enumerate(graph.inputs)}
    arguments = {value: (position[value], spec) for value, spec in zip(graph.inputs, specs, strict=True)}

    def choose_cuts(loop: Loop) -> Sequence[int]:
        return policy(Marks(_blocks(loop, arguments, shards)), loop.schedule.num_stages)

    settings = Settings(
        num_ranks=num_ranks,
        choose_cuts=choose_cuts,
        donated=tuple(donated),
        specs=tuple(specs),
        shards=shards,
        **others,
    )
    found = run_passes(PASSES, graph, settings, observers())
    made = {each.name: structure for each, structure in found if each.name in ("place", "liveness")}
    return Built(made["liveness"], made["place"], settings)


def _blocks(loop: Loop, arguments: Mapping[Value, tuple[int, PartitionSpec]], shards: ShardCounts) -> Blocks:
    """Make a loop's blocks for a policy; `arguments` gives the place of each argument of the step and its spec."""
    outer: dict[Value, Atom] = dict(zip(loop.body.constants, loop.constants, strict=True))
    outer.update({value: gather.parameter for value, gather in loop.gathered.items()})
    outer.update(zip(loop.body.carry, loop.carry_init, strict=True))
    return Blocks(
        loop.body,
        loop.schedule.splits_backward,
        arguments={v: arguments[a] for v, a in outer.items() if isinstance(a, Value) and a in arguments},
        batch_dims=loop.batch_dims,
        shards_of=shards,
        batch_shards=loop.batch_shards,
        gathered=loop.gathered,
    )
