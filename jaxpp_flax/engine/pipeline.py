"""Turn the graph of a step into its program: build the shared settings of the passes, and run the passes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import jax
from jax.sharding import AbstractMesh, PartitionSpec

from jaxpp_flax.engine.analyses.batch_dimensions import ShardCounts
from jaxpp_flax.engine.arrays.ambient_mesh import context_mesh
from jaxpp_flax.engine.blocks import Blocks, CutPolicy, Marks
from jaxpp_flax.engine.passes import PASSES
from jaxpp_flax.engine.passes.fsdp.rule import FsdpRule
from jaxpp_flax.engine.passes.loop.open_loops import OpenLoop
from jaxpp_flax.engine.passes.placed import Loop, Placed, ResultRanks
from jaxpp_flax.engine.passes.runner import Settings, observers, run_passes
from jaxpp_flax.engine.program.program import Program
from jaxpp_flax.engine.tracing.ir import Atom, Graph, Value
from jaxpp_flax.schedules.residuals import ResidualPlan

__all__ = ["Built", "build"]

# Some structures also have a name of their own.
_STRUCTURES = {"tasks": "partition", "placed": "place"}


@dataclass(frozen=True, eq=False)
class Built:
    """The program and the placed step; and the input of the passes with JAX's settings then, to run them again."""

    program: Program
    placed: Placed
    graph: Graph
    settings: Settings
    mesh: AbstractMesh | None
    x64: bool

    @cached_property
    def loops(self) -> tuple[Loop, ...]:
        """The loops of the step in program order."""
        return tuple(step for step in self.placed.steps if isinstance(step, Loop))

    def as_text(self, name: str) -> str:
        """Return the structure after a pass as text; the passes run again for it, with the same cuts.

        Raises:
          ValueError: if no pass has this name.
        """
        names = [each.name for each in PASSES]
        name = _STRUCTURES.get(name, name)
        if name not in names:
            known = ", ".join(map(repr, names))
            raise ValueError(
                f"no pass is called {name!r}. Use one of {known}; or 'tasks' (after partition), 'placed' (after place) "
                "or 'program' (as it runs)."
            )
        chosen = iter([loop.cuts for loop in reversed(self.loops)])  # the order in which `choose_cuts` asks
        settings = replace(self.settings, choose_cuts=lambda loop: next(chosen))
        with warnings.catch_warnings(), jax.enable_x64(self.x64), context_mesh(self.mesh):
            warnings.simplefilter("ignore")  # the first run has warned
            found = run_passes(PASSES, self.graph, settings)
            return next(structure.as_text() for each, structure in found if each.name == name)


def build(
    graph: Graph,
    num_ranks: int,
    policy: CutPolicy,
    donated: Sequence[bool],
    specs: Sequence[PartitionSpec],
    axis_sizes: Mapping[str, int],
    result_ranks: ResultRanks | None = None,
    idle_ranks: frozenset[int] = frozenset({0}),
    residuals: ResidualPlan | Callable[[], ResidualPlan | None] | None = None,
    fsdp: FsdpRule | None = None,
) -> Built:
    """Run all passes on a traced step; `axis_sizes` are those of a submesh. See `Settings` for the other arguments.

    Raises:
      ValueError: if the step holds no loop, a loop's schedule or marks do not fit, or a marker cannot cut.
    """
    shards = ShardCounts(axis_sizes)
    position = {value: i - len(graph.inputs) for i, value in enumerate(graph.inputs)}
    arguments = {value: (position[value], spec) for value, spec in zip(graph.inputs, specs, strict=True)}

    def choose_cuts(loop: OpenLoop) -> Sequence[int]:
        return policy(Marks(_blocks(loop, arguments, shards)), loop.schedule.num_stages)

    settings = Settings(
        num_ranks=num_ranks,
        choose_cuts=choose_cuts,
        donated=tuple(donated),
        specs=tuple(specs),
        shards=shards,
        result_ranks=result_ranks,
        idle_ranks=idle_ranks,
        residuals=residuals,
        fsdp=fsdp,
    )
    made = {
        each.name: structure
        for each, structure in run_passes(PASSES, graph, settings, observers())
        if each.name in ("place", "liveness")
    }
    mesh = jax.sharding.get_abstract_mesh()
    x64 = bool(jax.config.jax_enable_x64)  # pyright: ignore[reportAttributeAccessIssue]
    settings = replace(settings, residuals=settings.residual_plan)  # a function may give another plan to the next step
    return Built(made["liveness"], made["place"], graph, settings, None if mesh.empty else mesh, x64)


def _blocks(loop: OpenLoop, arguments: Mapping[Value, tuple[int, PartitionSpec]], shards: ShardCounts) -> Blocks:
    """Make a loop's blocks for a policy; `arguments` gives the place of each argument of the step and its spec."""
    outer: dict[Value, Atom] = dict(zip(loop.body.constants, loop.constants, strict=True))
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
