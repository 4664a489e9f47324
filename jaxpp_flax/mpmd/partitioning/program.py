"""Turn fragments into the engine's program: runs, and a transfer for each value that another mesh reads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace

from jaxpp_flax.engine.program.builder import ProgramBuilder
from jaxpp_flax.engine.program.program import Program, ProgramTask, Run
from jaxpp_flax.engine.tracing.fingerprint import Fingerprinter
from jaxpp_flax.engine.tracing.ir import Graph, Value, graph_of, values
from jaxpp_flax.mpmd.partitioning.fragments import Fragment
from jaxpp_flax.mpmd.partitioning.infer import Placement
from jaxpp_flax.mpmd.partitioning.nodes import Node, Step

__all__ = ["unroll"]


def unroll(
    step: Step,
    placement: Placement,
    fragments: Sequence[Fragment],
    rewrite: Sequence[Callable[[Graph], Graph]],
    *,
    keep_unused: bool,
) -> Program:
    """Turn fragments into a program.

    The fragments are in an order in which they can run; `rewrite` moves a graph's shardings onto the mesh of a rank.
    With `keep_unused`, an argument that nothing reads lies on its ranks too.
    """
    native = dict(zip(step.inputs, placement.arguments, strict=True))
    native.update({v: ranks for node, ranks in placement.nodes.items() for v in node.outputs})
    builder = ProgramBuilder(len(rewrite))
    readers = _readers(step, placement, fragments)
    for value, ranks in zip(step.inputs, placement.arguments, strict=True):
        builder.argument(value, ranks if keep_unused or value in readers else ())
    fingerprints = Fingerprinter()
    like = _like(step)
    known: dict[Hashable, int] = {}
    for fragment in fragments:
        rank = fragment.key.rank
        whole = _graph(fragment, readers, native)
        graph = rewrite[rank](whole)  # values may be new, with types of the rank's mesh, in the same positions
        _bring(builder, whole.inputs, native, rank)
        key = rank, fragment.label, fingerprints.graph(graph)
        if key not in known:
            known[key] = builder.task(_task(fragment, graph, [like.get(v) for v in values(whole.outputs)]))
        call = -1 if fragment.key.call is None else fragment.key.call
        builder.run_on(known[key], whole.inputs, whole.outputs, call)
        made = [v for v in values(whole.outputs) if min(native[v]) == rank]
        for target in sorted({r for v in made for r, _ in readers[v]} - {rank}):
            wanted = [v for v in made if target not in native[v] and any(r == target for r, _ in readers[v])]
            builder.send(wanted, rank, target)
    for atom, rank in zip(step.outputs, placement.results, strict=True):
        _bring(builder, values([atom]), native, rank)
        builder.result(atom, [rank])
    runs: dict[int, list[Run]] = {}
    for run in builder.instructions:
        if isinstance(run, Run):
            runs.setdefault(run.task, []).append(run)
    builder.tasks = [_finished(task, runs[number]) for number, task in enumerate(builder.tasks)]
    return builder.finish()


def _bring(builder: ProgramBuilder, edges: Sequence[Value], native: Mapping[Value, tuple[int, ...]], rank: int) -> None:
    """Send arguments from other meshes before their first use."""
    for source in sorted({min(native[edge]) for edge in edges}):
        builder.send([edge for edge in edges if min(native[edge]) == source], source, rank)


def _readers(
    step: Step, placement: Placement, fragments: Sequence[Fragment]
) -> Mapping[Value, set[tuple[int, Fragment | None]]]:
    """Return the ranks and fragments that read each value; None stands for the step's results."""
    readers: dict[Value, set[tuple[int, Fragment | None]]] = {}
    for fragment in fragments:
        for node in fragment.nodes:
            for value in node.inputs:
                readers.setdefault(value, set()).add((fragment.key.rank, fragment))
    for atom, rank in zip(step.outputs, placement.results, strict=True):
        if isinstance(atom, Value):
            readers.setdefault(atom, set()).add((rank, None))
    return readers


def _task(fragment: Fragment, graph: Graph, like: Sequence[int | None]) -> ProgramTask:
    """Make a fragment's task; accumulators get the shardings of the arguments in `like`."""
    key = fragment.key
    task = ProgramTask(fragment.label, key.rank, graph, stage=key.stage, kind=key.kind)
    return task if graph.inputs else replace(task, batch_dims=(None,) * len(like), like=tuple(like))


def _finished(task: ProgramTask, runs: Sequence[Run]) -> ProgramTask:
    """Add the pins to a task: outputs that the next run reads keep their shardings."""
    pins: list[tuple[int, int]] = []
    if len(runs) > 1:
        for output, made in enumerate(runs[0].outputs):
            pins += [
                (output, source)
                for source, read in enumerate(runs[1].inputs)
                if read == made and all(a.outputs[output] == b.inputs[source] for a, b in itertools.pairwise(runs))
            ]
    return replace(task, pins=tuple(pins))


def _like(step: Step) -> dict[Value, int]:
    """Find, for constants that start a sum, the argument of the same type that the sum meets after the loop."""
    arguments = {v: i for i, v in enumerate(step.inputs)}
    readers: dict[Value, list[Node]] = {}
    for node in step.nodes:
        for value in node.inputs:
            readers.setdefault(value, []).append(node)

    def search(value: Value) -> int | None:
        seen: set[Value] = set()
        level = [value]
        while level:
            following: list[Value] = []
            for v in level:
                for node in readers.get(v, ()):
                    if node.origin is not None:
                        continue
                    alike = [o for o in (*node.inputs, *node.outputs) if _same_type(o, value)]
                    met = [arguments[o] for o in alike if o in arguments]
                    if met and node.call is None:
                        return met[0]
                    following += [o for o in alike if o not in seen and o in node.outputs]
            seen.update(following)
            level = following
        return None

    constants = [v for n in step.nodes if not n.inputs for v in n.outputs if v.aval.ndim]
    return {v: found for v in constants if (found := search(v)) is not None}


def _same_type(a: Value, b: Value) -> bool:
    return a.aval.shape == b.aval.shape and a.aval.dtype == b.aval.dtype


def _graph(
    fragment: Fragment,
    readers: Mapping[Value, set[tuple[int, Fragment | None]]],
    native: Mapping[Value, tuple[int, ...]],
) -> Graph:
    """Make the graph of a fragment; its outputs are the values that others read.

    Inputs are in the order of their first read, so that equal fragments have equal graphs.
    """
    rank = fragment.key.rank

    def leaves(value: Value) -> bool:
        ranks = native[value]
        return any(
            (r == rank and reader is not fragment) or (r not in ranks and rank == min(ranks))
            for r, reader in readers.get(value, ())
        )

    equations = [equation for node in fragment.nodes for equation in node.equations]
    return graph_of(equations, {v for node in fragment.nodes for v in node.outputs if leaves(v)})
