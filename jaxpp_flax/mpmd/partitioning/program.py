"""Turn fragments into the engine's program: runs, and a transfer for each value that another mesh reads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from jaxpp_flax.engine.program.program import Instruction, Program, ProgramTask, Run, Transfer
from jaxpp_flax.engine.tracing.fingerprint import Fingerprinter
from jaxpp_flax.engine.tracing.ir import Graph, Value, values
from jaxpp_flax.mpmd.partitioning.fragments import Fragment
from jaxpp_flax.mpmd.partitioning.infer import Placement
from jaxpp_flax.mpmd.partitioning.nodes import Node, Step

__all__ = ["Unrolled", "unroll"]


@dataclass(frozen=True)
class Unrolled:
    """The program, and the fragments of its runs in order."""

    program: Program
    fragments: tuple[Fragment, ...]


@dataclass
class _Unroller:
    step: Step
    placement: Placement
    native: dict[Value, tuple[int, ...]] = field(default_factory=dict)
    slots: dict[tuple[Value, int], int] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)
    tasks: list[ProgramTask] = field(default_factory=list)
    known: dict[Hashable, int] = field(default_factory=dict)
    runs: dict[int, list[Run]] = field(default_factory=dict)
    count: int = 0

    def new(self, value: Value, rank: int) -> int:
        self.slots[value, rank] = self.count
        self.count += 1
        return self.count - 1

    def send(self, values: Sequence[Value], source: int, target: int) -> None:
        missing = [v for v in values if (v, target) not in self.slots]
        if missing:
            sent = tuple(self.slots[v, source] for v in missing)
            received = tuple(self.new(v, target) for v in missing)
            self.instructions.append(Transfer(source, target, sent, received))

    def fetch(self, values: Sequence[Value], rank: int) -> None:
        """Send arguments from other meshes before their first use."""
        by_source: dict[int, list[Value]] = {}
        for value in values:
            if (value, rank) not in self.slots:
                by_source.setdefault(min(self.native[value]), []).append(value)
        for source, missing in by_source.items():
            self.send(missing, source, rank)


def unroll(
    step: Step, placement: Placement, fragments: Sequence[Fragment], rewrite: Sequence[Callable[[Graph], Graph]]
) -> Unrolled:
    """Turn fragments into a program with a slot for every value (see the engine's `liveness` for reuse).

    Args:
      step: the step as nodes.
      placement: the ranks of the nodes.
      fragments: in an order in which they can run.
      rewrite: for each rank, a function that moves a graph's shardings onto its mesh.
    """
    unroller = _Unroller(step, placement)
    unroller.native.update(zip(step.inputs, placement.arguments, strict=True))
    unroller.native.update({v: ranks for node, ranks in placement.nodes.items() for v in node.outputs})
    arguments = tuple(
        {rank: unroller.new(value, rank) for rank in ranks}
        for value, ranks in zip(step.inputs, placement.arguments, strict=True)
    )
    readers = _readers(step, placement, fragments)
    fingerprints = Fingerprinter()
    like = _like(step)
    for fragment in fragments:
        rank = fragment.key.rank
        whole = _graph(fragment, readers, unroller.native)
        graph = rewrite[rank](whole)  # values may be new, with types of the rank's mesh, in the same positions
        unroller.fetch(whole.inputs, rank)
        inputs = tuple(unroller.slots[v, rank] for v in whole.inputs)
        outputs = tuple(unroller.new(v, rank) for v in values(whole.outputs))
        key = rank, fragment.label, fingerprints.graph(graph)
        if key not in unroller.known:
            unroller.known[key] = len(unroller.tasks)
            unroller.tasks.append(_task(fragment, graph, [like.get(v) for v in values(whole.outputs)]))
        call = -1 if fragment.key.call is None else fragment.key.call
        run = Run(unroller.known[key], call, rank, inputs, outputs)
        unroller.instructions.append(run)
        unroller.runs.setdefault(run.task, []).append(run)
        made = [v for v in values(whole.outputs) if min(unroller.native[v]) == rank]
        for target in sorted({r for v in made for r, _ in readers[v]}):
            if target != rank:
                wanted = [
                    v for v in made if target not in unroller.native[v] and any(r == target for r, _ in readers[v])
                ]
                unroller.send(wanted, rank, target)
    results: list[dict[int, int] | object] = []
    for atom, rank in zip(step.outputs, placement.results, strict=True):
        if not isinstance(atom, Value):
            results.append(atom)
            continue
        unroller.fetch([atom], rank)
        results.append({rank: unroller.slots[atom, rank]})
    tasks = [_finished(task, unroller.runs[number]) for number, task in enumerate(unroller.tasks)]
    program = Program(
        tuple(unroller.instructions),
        tuple(tasks),
        arguments,
        tuple(results),
        {},
        unroller.count,
        len(rewrite),
    )
    return Unrolled(program, tuple(fragments))


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
    return task if graph.inputs else replace(task, leading=(None,) * len(like), like=tuple(like))


def _finished(task: ProgramTask, runs: Sequence[Run]) -> ProgramTask:
    """Add the pins to a task: outputs that the next run reads keep their shardings."""
    pins: list[tuple[int, int]] = []
    if len(runs) > 1:
        for output, made in enumerate(runs[0].outputs):
            positions = [i for i, read in enumerate(runs[1].inputs) if read == made]
            pins += [(output, i) for i in positions if _goes_round(runs, output, i)]
    return replace(task, pins=tuple(pins))


def _goes_round(runs: Sequence[Run], output: int, source: int) -> bool:
    return all(a.outputs[output] == b.inputs[source] for a, b in itertools.pairwise(runs))


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

    inside = {v for node in fragment.nodes for v in node.outputs}
    inputs = dict.fromkeys(v for node in fragment.nodes for v in node.inputs if v not in inside)
    outputs = tuple(v for node in fragment.nodes for v in node.outputs if leaves(v))
    return Graph(tuple(inputs), outputs, tuple(e for node in fragment.nodes for e in node.equations))
