"""Run all passes on a traced step: names to meshes, inference, stages, schedule, fragments, program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from jax.sharding import PartitionSpec

from jaxpp_flax.engine.passes.liveness import donate_and_free
from jaxpp_flax.engine.passes.loop.open_loops import refuse_ordered_effects
from jaxpp_flax.engine.passes.runner import wants_verification
from jaxpp_flax.engine.passes.submesh_constraints import onto_mesh
from jaxpp_flax.engine.program.program import Program
from jaxpp_flax.engine.tracing.ir import Graph
from jaxpp_flax.messages import known_names
from jaxpp_flax.mpmd.config import MpmdConfig
from jaxpp_flax.mpmd.partitioning.fragments import fragments_of
from jaxpp_flax.mpmd.partitioning.infer import PlacedNodes, infer
from jaxpp_flax.mpmd.partitioning.nodes import Node, nodes_of
from jaxpp_flax.mpmd.partitioning.program import program_of_fragments
from jaxpp_flax.mpmd.partitioning.stages import Order, Stages, order_of, split_nodes, stages_of

__all__ = ["Built", "build"]


@dataclass(frozen=True)
class Built:
    """The program, with the placed step from which it was made, and the specs of its arguments."""

    program: Program
    placed: PlacedNodes
    in_specs: tuple[PartitionSpec, ...]


def build(
    graph: Graph,
    num_constants: int,
    config: MpmdConfig,
    argument_ranks: Sequence[int | None],
    result_ranks: Sequence[int | None],
    donated: Sequence[bool],
    *,
    specs_on: Callable[[Sequence[int]], Sequence[PartitionSpec]],
    keep_unused: bool,
) -> Built:
    """Turn a traced step, whose first `num_constants` inputs are captured arrays, into a program for named meshes.

    `specs_on` returns the partition of each argument but these, from their ranks.

    Raises:
      ValueError: if a name is not assigned, nested names are assigned to different meshes or stages, or a `scan`,
        `while` or `cond` holds names of several meshes; if a side effect has `ordered=True`.
      ScheduleError: if the stages do not fit the schedule.
    """
    meshes = config.meshes
    refuse_ordered_effects(graph)
    step = nodes_of(graph)
    _check_names(step.nodes, config)
    stages = stages_of(step.nodes, config)
    order = _order(step.nodes, stages, config)
    if order is not None and order.split_stages:
        step = replace(step, nodes=split_nodes(step.nodes, stages, order))
    fixed = {node: config.rank_of(min(node.names)) for node in step.nodes if node.names}
    constants = frozenset(step.inputs[:num_constants])
    given = {v: r for v, r in zip(step.inputs[num_constants:], argument_ranks, strict=True) if r is not None}
    placed = infer(step, fixed, constants, given, result_ranks)
    fragments = fragments_of(placed.nodes, stages, order)
    rewrites = [onto_mesh(meshes.unstack, mesh.abstract_mesh) for mesh in meshes.unstack]
    in_specs = tuple(specs_on([ranks[0] for ranks in placed.arguments[num_constants:]]))
    specs = (*[PartitionSpec()] * num_constants, *in_specs)
    unrolled = program_of_fragments(placed, fragments, rewrites, specs, keep_unused=keep_unused)
    # Between processes, the runtime watches a received value to see its arrival.
    several = len(meshes.processes) > 1
    program = donate_and_free(unrolled, [False] * num_constants + list(donated), keep_received=several)
    if wants_verification():
        unrolled.verify()
        program.verify()
    return Built(program, placed, in_specs)


def _check_names(nodes: Sequence[Node], config: MpmdConfig) -> None:
    """Refuse a name without a mesh, and names of several meshes or stages that must run as one program."""
    meshes, stages = config.name_to_mesh_assignment, config.name_to_stage_assignment
    for node in nodes:
        for name in sorted(node.names):
            if name not in meshes:
                raise ValueError(
                    f"{name!r} at {node.where} is assigned to no mesh.{known_names(name, meshes)} Add it to "
                    "name_to_mesh_assignment."
                )
        if node.origin is not None:
            name = node.origin.name
            for inner in sorted(node.names - {name}):
                if (config.rank_of(inner), stages.get(inner)) != (config.rank_of(name), stages.get(name)):
                    raise ValueError(
                        f"{inner!r} is inside of {name!r} at {node.where}, but assigned elsewhere: "
                        f"{_assignment(inner, config)}, not {_assignment(name, config)}. One computation runs on one "
                        "mesh: assign both alike, or call the inner one outside."
                    )
        elif len({config.rank_of(name) for name in node.names}) > 1:
            raise ValueError(
                f"the names {', '.join(map(repr, sorted(node.names)))} stand inside of one "
                f"`{node.equations[0].name}` at {node.where}, but on several meshes "
                f"({', '.join(sorted({meshes[name] for name in node.names}))}): "
                "it runs as one program on one mesh. Use `mpmd.fori_loop` or `mpmd.enumerated_for`, which are "
                "unrolled, or assign these names to one mesh."
            )


def _assignment(name: str, config: MpmdConfig) -> str:
    stage = config.name_to_stage_assignment.get(name)
    mesh = config.name_to_mesh_assignment[name]
    return f"{mesh!r}" if stage is None else f"{mesh!r} in stage {stage}"


def _order(nodes: Sequence[Node], stages: Stages, config: MpmdConfig) -> Order | None:
    named = [n for n in nodes if n.call is not None and n.computation is not None]
    if config.schedule is None or not named:
        return None
    microbatches = 1 + max(n.call for n in nodes if n.call is not None)
    return order_of(config.schedule, stages, microbatches)
