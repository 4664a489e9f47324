"""Run all passes on a traced step: names to meshes, inference, stages, schedule, fragments, program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxpp_flax.engine.passes.check_supported import refuse_ordered_effects
from jaxpp_flax.engine.passes.liveness import donate_and_free
from jaxpp_flax.engine.passes.runner import wants_verification
from jaxpp_flax.engine.passes.submesh_constraints import onto_mesh
from jaxpp_flax.engine.program.program import Program
from jaxpp_flax.engine.tracing.ir import Graph
from jaxpp_flax.messages import known_names
from jaxpp_flax.mpmd.config import MpmdConfig, mesh_and_memory
from jaxpp_flax.mpmd.partitioning.fragments import Fragment, fragments_of
from jaxpp_flax.mpmd.partitioning.infer import Placement, infer
from jaxpp_flax.mpmd.partitioning.keys import Halves
from jaxpp_flax.mpmd.partitioning.nodes import Node, Step, nodes_of
from jaxpp_flax.mpmd.partitioning.program import unroll
from jaxpp_flax.mpmd.partitioning.stages import Order, Stages, order_of, split_backward, stages_of

__all__ = ["Built", "build"]


@dataclass(frozen=True)
class Built:
    """The program, with the step, placement and fragments from which it was made."""

    program: Program
    step: Step
    placement: Placement
    fragments: tuple[Fragment, ...]


def build(
    graph: Graph,
    num_constants: int,
    config: MpmdConfig,
    argument_ranks: Sequence[int | None],
    result_ranks: Sequence[int | None],
    donated: Sequence[bool],
    *,
    keep_unused: bool,
) -> Built:
    """Turn a traced step, whose first `num_constants` inputs are captured arrays, into a program for named meshes.

    Raises:
      ValueError: if a name is not assigned, nested names are assigned to different meshes or stages, or a `scan`,
        `while` or `cond` holds names of several meshes; if a side effect has `ordered=True`.
      ScheduleError: if the stages do not fit the schedule.
    """
    meshes = config.meshes
    refuse_ordered_effects(graph)
    step = nodes_of(graph)
    fixed = _fixed(step.nodes, config)
    constants = frozenset(step.inputs[:num_constants])
    given = {v: r for v, r in zip(step.inputs[num_constants:], argument_ranks, strict=True) if r is not None}
    first_mesh = 0 if config.partitioning_options.infers_transfers else None
    placement = infer(step, fixed, constants, given, result_ranks, mixed_results=first_mesh)
    stages = stages_of(step.nodes, fixed, config.name_to_stage_assignment, meshes.names)
    _number_calls(step.nodes)
    order = _order(step.nodes, stages, config)
    step, placement, halves = _split(step, placement, stages, order)
    fragments = fragments_of(step, placement, stages, order, halves)
    rewrites = [onto_mesh(meshes.unstack, mesh.abstract_mesh) for mesh in meshes.unstack]
    unrolled = unroll(step, placement, fragments, rewrites, keep_unused=keep_unused)
    program = donate_and_free(unrolled, [False] * num_constants + list(donated))
    if wants_verification():
        unrolled.verify()
        program.verify()
    return Built(program, step, placement, tuple(fragments))


def _split(step: Step, placement: Placement, stages: Stages, order: Order | None) -> tuple[Step, Placement, Halves]:
    """Split the backward work of the stages for which the schedule asks for it."""
    split = order.split_stages if order is not None else frozenset[int]()
    if not split:
        return step, placement, Halves()
    nodes, halves, weights = split_backward(step.nodes, stages.of_name, split)
    placed = {**placement.nodes, **{half: placement.nodes[whole] for half, whole in halves.items()}}
    placement = replace(placement, nodes={node: placed[node] for node in nodes})
    return replace(step, nodes=nodes), placement, Halves(split, weights)


def _fixed(nodes: Sequence[Node], config: MpmdConfig) -> dict[Node, int]:
    """Return the ranks of named nodes, and of loops whose names all share one mesh."""
    fixed: dict[Node, int] = {}
    assigned = {name: config.mesh_of(name) for name in config.name_to_mesh_assignment}
    stages = config.name_to_stage_assignment
    for node in nodes:
        for name in sorted(node.names):
            if name not in assigned:
                raise ValueError(
                    f"{name!r} at {node.where} is assigned to no mesh.{known_names(name, assigned)} Add it to "
                    "name_to_mesh_assignment."
                )
            _refuse_host_memory(name, config.name_to_mesh_assignment[name], node.where)
        if node.origin is not None:
            name = node.origin.name
            for inner in sorted(node.names - {name}):
                if (assigned[inner], stages.get(inner)) != (assigned[name], stages.get(name)):
                    raise ValueError(
                        f"{inner!r} is inside of {name!r} at {node.where}, but assigned elsewhere: "
                        f"{_assignment(inner, config)}, not {_assignment(name, config)}. One computation runs on one "
                        "mesh: assign both alike, or call the inner one outside."
                    )
            fixed[node] = config.meshes.rank(assigned[name])
        elif node.names:
            ranks = {assigned[name] for name in node.names}
            if len(ranks) > 1:
                raise ValueError(
                    f"the names {', '.join(map(repr, sorted(node.names)))} stand inside of one "
                    f"`{node.equations[0].name}` at {node.where}, but on several meshes ({', '.join(sorted(ranks))}): "
                    "it runs as one program on one mesh. Use `mpmd.fori_loop` or `mpmd.enumerated_for`, which are "
                    "unrolled, or assign these names to one mesh."
                )
            fixed[node] = config.meshes.rank(ranks.pop())
    return fixed


def _refuse_host_memory(name: str, mesh: str, where: str) -> None:
    if mesh_and_memory(mesh)[1] not in (None, "device"):
        raise NotImplementedError(
            f"{name!r} at {where} is assigned to {mesh!r}. A name says on which mesh work runs, and it runs on arrays "
            f"in device memory. Assign it to {mesh_and_memory(mesh)[0]!r}, and keep an array on the host by "
            "`jax.device_put(x, jax.memory.Space.Host)`, `in_shardings`, or the assignment of inputs and outputs."
        )


def _assignment(name: str, config: MpmdConfig) -> str:
    stage = config.name_to_stage_assignment.get(name)
    mesh = config.name_to_mesh_assignment[name]
    return f"{mesh!r}" if stage is None else f"{mesh!r} in stage {stage}"


def _number_calls(nodes: Sequence[Node]) -> None:
    """Renumber the program's call counters as microbatches from 0 on."""
    calls = sorted({node.call for node in nodes if node.call is not None})
    number = {call: k for k, call in enumerate(calls)}
    for node in nodes:
        node.call = None if node.call is None else number[node.call]


def _order(nodes: Sequence[Node], stages: Stages, config: MpmdConfig) -> Order | None:
    named = [n for n in nodes if n.call is not None and n.computation is not None]
    if config.schedule is None or not named:
        return None
    microbatches = 1 + max(n.call for n in nodes if n.call is not None)
    return order_of(config.schedule, stages, microbatches, forward_only=not any(n.backward for n in named))
