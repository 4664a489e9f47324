"""Summaries of a compiled step: a row for each stage, and the memory of each rank."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import NamedSharding

from jaxpp_flax.engine.analyses.work import count_flops
from jaxpp_flax.engine.analyses.workspace import workspace
from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.engine.passes.loop.loop import CutLoop, Partition
from jaxpp_flax.engine.passes.loop.partition import residuals_of
from jaxpp_flax.engine.program.live_memory import LiveMemory
from jaxpp_flax.engine.program.program import Run
from jaxpp_flax.engine.program.specs import shard_bytes
from jaxpp_flax.engine.runtime.executables import Executables
from jaxpp_flax.engine.tracing.ir import Value, memory_kind_of
from jaxpp_flax.engine.tracing.markers import segment_names
from jaxpp_flax.schedules.task import RUN_FORWARD

__all__ = [
    "MemoryAnalysis",
    "StageSummary",
    "analyse_memory",
    "costs_of",
    "inside_of",
    "sum_costs",
    "summarise_stages",
    "walk_memory",
]


@dataclass(frozen=True, kw_only=True)
class StageSummary:
    """One stage of a loop.

    `flops` counts one microbatch, forward and backward, over the rank's devices: see `count_flops`.
    `sent_bytes` counts the activations that the stage sends forward, for one microbatch. `activation_bytes` counts the
    forward's results that the backward reads (none if the two are one task). `weight_bytes` counts the results that the
    weight gradient reads (see `residuals_of`). Both also count one microbatch, over the rank's devices.
    """

    stage: int
    rank: int
    blocks: tuple[str, ...]
    parameter_count: int
    parameter_bytes: int
    flops: float
    sent_bytes: int
    activation_bytes: int
    weight_bytes: int
    devices: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class MemoryAnalysis:
    """Bytes on each device of one rank, found by walking the program.

    `peak_bytes` is the most that one step holds above the arguments between tasks. `running_bytes` also has the
    workspace of the task that runs, as it is estimated without its executable (see `workspace`); `temp_bytes` is the
    largest workspace that XLA says. `host_peak_bytes` is the most that one step holds of host memory above the
    arguments, for each device: what a plan of residuals or a policy of `jax.checkpoint` offloads.

    What goes to a rank of another process counts until the receiver sends something back, at most for 4 transfers: in a
    loop of forwards the sender runs that far ahead.
    """

    rank: int
    argument_bytes: int
    peak_bytes: int
    temp_bytes: int
    host_peak_bytes: int = 0
    running_bytes: int = 0

    @property
    def held_bytes(self) -> int:
        """The most that the rank's devices hold, with an estimate of XLA's workspace."""
        return self.argument_bytes + max(self.peak_bytes, self.running_bytes)


def summarise_stages(loop: CutLoop, mesh: MpmdMesh) -> tuple[StageSummary, ...]:
    """Return a row for each stage of a loop; of several shapes of microbatches, for the largest."""
    part, blocks = loop.partition.of_one_shape(), _blocks(loop)
    activations, kept = residuals_of(part)
    rows: list[StageSummary] = []
    for stage in range(part.num_stages):
        parameters = _parameters(part, stage)
        tasks = [t for t in part.tasks if t.stage == stage]
        rank = loop.schedule.rank_of(stage)
        rows.append(
            StageSummary(
                stage=stage,
                rank=rank,
                blocks=blocks[stage],
                parameter_count=sum(v.aval.size for v in parameters),
                parameter_bytes=sum(v.nbytes for v in parameters),
                flops=sum(count_flops(task.graph.equations) for task in tasks),
                sent_bytes=_sent_bytes(loop, part, stage),
                activation_bytes=_bytes_in(stage, activations),
                weight_bytes=_bytes_in(stage, kept),
                devices=mesh.rank_devices(rank),
            )
        )
    return tuple(rows)


def _blocks(loop: CutLoop) -> list[tuple[str, ...]]:
    """Return the names of each stage's blocks."""
    marks = loop.body.marks
    names, starts = segment_names(marks), [0, *(cut + 1 for cut in loop.cuts)]
    ends = [*starts[1:], len(marks)]
    return [names[start:end] or names[-1:] for start, end in zip(starts, ends, strict=True)]  # the last mark may cut


def _parameters(part: Partition, stage: int) -> list[Value]:
    """Return the loop operands that a stage reads whole; the others are data."""
    operands = set(part.operands)
    tasks = [task for task in part.tasks if task.stage == stage]
    read = dict.fromkeys(v for task in tasks for v in task.graph.inputs if v in operands)
    return [v for v in read if v not in part.data and v.aval.ndim > 0]


def costs_of(executable: Any) -> dict[str, float]:
    """Return XLA's costs of one run of an executable, by name; none where the backend has no such model."""
    if executable is None:
        return {}
    try:
        costs = executable.cost_analysis()
    except Exception:  # backends differ in their results and in their errors
        return {}
    if isinstance(costs, list):
        costs = costs[0] if costs else {}
    return {name: float(cost) for name, cost in (costs or {}).items()}


def sum_costs(executables: Executables) -> tuple[dict[str, float], ...]:
    """Return, for each rank, XLA's costs of all runs in one step, added up by name ("flops", "bytes accessed", ...)."""
    program = executables.program
    sums: list[dict[str, float]] = [{} for _ in range(program.num_ranks)]
    costs = [costs_of(executable) for executable in executables.tasks]
    for number, run in enumerate(program.instructions):
        if isinstance(run, Run):
            own = costs_of(executables.variants[number]) if number in executables.variants else costs[run.task]
            for name, cost in own.items():
                sums[run.rank][name] = sums[run.rank].get(name, 0.0) + cost
    return tuple(sums)


def _sent_bytes(loop: CutLoop, part: Partition, stage: int) -> int:
    rank = loop.schedule.rank_of(stage)
    outputs = {v for t in part.tasks if t.stage == stage and t.kind in RUN_FORWARD for v in t.graph.outputs}
    sent: set[tuple[Value, int]] = set()
    for task in part.tasks:
        target = loop.schedule.rank_of(task.stage)
        if task.stage > stage and target != rank:
            sent.update((v, target) for v in task.graph.inputs if v in outputs)
    return sum(v.nbytes for v, _ in sent)


def _bytes_in(stage: int, held: Mapping[Value, Collection[int]]) -> int:
    return sum(value.nbytes for value, stages in held.items() if stage in stages)


def analyse_memory(executables: Executables) -> tuple[MemoryAnalysis, ...]:
    """Walk a program and count what is live on each rank."""
    program = executables.program
    memory, arguments = walk_memory(executables, inside_of(executables))
    temporary = [[0] for _ in arguments]
    for task, executable in zip(program.tasks, executables.tasks, strict=True):
        temporary[task.rank].append(_temp(executable))
    return tuple(
        MemoryAnalysis(
            rank=rank,
            argument_bytes=sum(arguments[rank].values()),
            peak_bytes=int(memory.devices[rank].peak),
            host_peak_bytes=int(memory.hosts[rank].peak),
            temp_bytes=max(temporary[rank]),
            running_bytes=int(memory.running[rank]),
        )
        for rank in range(program.num_ranks)
    )


def walk_memory(
    executables: Executables,
    inside: Sequence[float],
    kinds: Mapping[int, str] | None = None,
    sizes: Mapping[int, int] | None = None,
) -> tuple[LiveMemory, list[dict[str, int]]]:
    """Walk a program; return what is live on each rank, and the bytes of its arguments on each device by kind.

    Args:
      executables: the program, and the partition of its values.
      inside: the bytes that each task makes for itself.
      kinds: the kind of each value.
      sizes: the bytes of values on each device that take other bytes than their elements.
    """
    program, mesh, sizes = executables.program, executables.mesh, sizes or {}
    memory = LiveMemory(program, inside, kinds, mesh.rank_processes)
    arguments = [dict[str, int]() for _ in range(program.num_ranks)]
    for ranks, spec, aval in zip(program.arguments, executables.in_specs, executables.in_avals, strict=True):
        on_device = memory_kind_of(aval) is None
        for rank, value in ranks.items():
            size = sizes.get(value, shard_bytes(aval, NamedSharding(mesh.unstack[rank], spec)))
            if on_device:
                kind = (kinds or {}).get(value, "")
                arguments[rank][kind] = arguments[rank].get(kind, 0) + size
            memory.hold(value, rank, size, on_host=not on_device)
    for instruction in program.instructions:
        memory.step(instruction, [sizes.get(value, executables.nbytes[value]) for value in instruction.writes()])
    return memory, arguments


def inside_of(executables: Executables) -> list[float]:
    """Return the workspace of each task, as it is estimated before it is compiled."""
    program, mesh, nbytes = executables.program, executables.mesh, dict[int, float]()
    platform = mesh.rank_devices(0)[0].platform
    for run in program.instructions:
        if isinstance(run, Run) and run.task not in nbytes:
            read = [executables.held[value].spec for value in run.inputs]
            nbytes[run.task] = workspace(program.tasks[run.task].graph, read, mesh.unstack[run.rank].shape, platform)
    return [nbytes.get(task, 0.0) for task in range(len(program.tasks))]


def _temp(executable: Any) -> int:
    try:
        return int(executable.memory_analysis().temp_size_in_bytes)
    except Exception:  # not every backend tells
        return 0
