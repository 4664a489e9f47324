"""Turn fragments into the engine's program: runs, and a transfer for each value that another mesh reads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import replace

from jax.sharding import PartitionSpec

from jaxpp_flax.engine.passes.updated_arguments import arguments_of_sums
from jaxpp_flax.engine.program.numbering import TaskStep, numbered, with_transfers
from jaxpp_flax.engine.program.program import Program, ProgramTask
from jaxpp_flax.engine.tracing.graph_text import Fingerprinter
from jaxpp_flax.engine.tracing.ir import Graph, Value, graph_of, values
from jaxpp_flax.engine.tracing.regions import shielded
from jaxpp_flax.mpmd.partitioning.fragments import Fragment
from jaxpp_flax.mpmd.partitioning.infer import PlacedNodes

__all__ = ["program_of_fragments"]


def program_of_fragments(
    placed: PlacedNodes,
    fragments: Sequence[Fragment],
    rewrite: Sequence[Callable[[Graph], Graph]],
    specs: Sequence[PartitionSpec],
    *,
    keep_unused: bool,
) -> Program:
    """Turn fragments into a program.

    The fragments are in an order in which they can run; `rewrite` moves a graph's shardings onto the mesh of a rank.
    `specs` are the partitions of the arguments.
    With `keep_unused`, an argument that nothing reads lies on its ranks too.
    """
    readers = _readers(placed, fragments)
    updated = _updated(placed)
    fingerprints = Fingerprinter()
    number_of: dict[Hashable, int] = {}
    tasks, runs = list[ProgramTask](), list[TaskStep]()
    for fragment in fragments:
        rank = fragment.key.rank
        outputs_read = [v for node in fragment.nodes for v in node.outputs if readers.get(v, set()) - {fragment}]
        whole = shielded(
            graph_of([e for node in fragment.nodes for e in node.equations], set(outputs_read)), always=True
        )
        graph = rewrite[rank](whole)  # values may be new, with types of the rank's mesh, in the same positions
        outputs = values(whole.outputs)
        key = rank, fragment.label, fingerprints.graph(graph)
        if key not in number_of:
            number_of[key] = len(tasks)
            tasks.append(_task(fragment, graph, [updated.get(v) for v in outputs], specs))
        call = -1 if fragment.key.call is None else fragment.key.call
        runs.append(TaskStep(number_of[key], whole.inputs, outputs, call))
    runs_of: dict[int, list[TaskStep]] = {}
    for run in runs:
        runs_of.setdefault(run.task, []).append(run)
    tasks = [replace(task, pins=_pins(runs_of[number])) for number, task in enumerate(tasks)]
    homes = {value: ranks[0] for value, ranks in zip(placed.inputs, placed.arguments, strict=True) if ranks}
    results = list(zip(placed.outputs, placed.results, strict=True))
    steps = with_transfers(runs, tasks, homes, results)
    arguments = {
        value: ranks if keep_unused or value in readers else ()
        for value, ranks in zip(placed.inputs, placed.arguments, strict=True)
    }
    return numbered(len(rewrite), tasks, steps, arguments, [(atom, [rank]) for atom, rank in results])


def _readers(placed: PlacedNodes, fragments: Sequence[Fragment]) -> Mapping[Value, Set[Fragment | None]]:
    """Return the fragments that read each value; None stands for a result."""
    readers: dict[Value, set[Fragment | None]] = {value: {None} for value in values(placed.outputs)}
    for fragment in fragments:
        for node in fragment.nodes:
            for value in node.inputs:
                readers.setdefault(value, set()).add(fragment)
    return readers


def _updated(placed: PlacedNodes) -> Mapping[Value, int]:
    """Return, for constants that start a sum, the arguments whose shardings they get: those that the sums update."""
    starts = [v for node in placed.nodes if not node.inputs for v in node.outputs if v.aval.ndim]
    unnamed = [equation for node in placed.nodes if node.origin is None for equation in node.equations]
    named = {value for node in placed.nodes if node.origin is not None for value in node.inputs}
    return arguments_of_sums(Graph(placed.inputs, placed.outputs, tuple(unnamed)), starts, named)


def _task(
    fragment: Fragment, graph: Graph, updated: Sequence[int | None], specs: Sequence[PartitionSpec]
) -> ProgramTask:
    """Make a fragment's task; what sums start with is partitioned as the arguments that they update."""
    key = fragment.key
    task = ProgramTask(fragment.label, key.rank, graph, stage=key.stage, kind=key.kind)
    if graph.inputs or all(k is None for k in updated):  # nothing starts a sum: results are partitioned as asked for
        return task
    return replace(task, out_specs=tuple(PartitionSpec() if k is None else specs[k] for k in updated))


def _pins(runs: Sequence[TaskStep]) -> tuple[tuple[int, int], ...]:
    """Return the pins of a task: outputs that the next run reads keep their shardings."""
    if len(runs) < 2:
        return ()
    return tuple(
        (output, source)
        for output, value in enumerate(runs[0].outputs)
        for source, read in enumerate(runs[1].inputs)
        if read == value and all(a.outputs[output] == b.inputs[source] for a, b in itertools.pairwise(runs))
    )
