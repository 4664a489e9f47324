"""Measure the time of each block of a loop body: its forward and its backward are compiled alone and timed."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.engine.blocks import Marks, Work
from jaxpp_flax.engine.program.program import ProgramTask
from jaxpp_flax.engine.runtime.held_values import spec_of
from jaxpp_flax.engine.runtime.task_compiler import TaskCompiler
from jaxpp_flax.engine.tracing.ir import Value, memory_kind_of
from jaxpp_flax.schedules.task import TaskKind

__all__ = ["time_blocks"]

_ROUNDS = 5
_READINGS = 3  # the readings of each task in each round
_LEAST_SECONDS = 2e-3  # the shortest reading: shorter tasks run several times in one reading
_MOST_CALLS = 50
_BACKWARD = (TaskKind.BACKWARD, TaskKind.BACKWARD_INPUT, TaskKind.BACKWARD_WEIGHT)
_VALUE = 0.01  # the value of every float: it leads to no infinities, and to no tiny numbers, which take longer


@dataclass(frozen=True)
class _Timed:
    """A task's executable and its inputs."""

    run: Any
    inputs: tuple[tuple[Any, NamedSharding], ...]
    turns: tuple[tuple[int, int], ...]  # (output, input): the output of an accumulator is the next input, in place


def time_blocks(marks: Marks, mesh: MpmdMesh, rank: int = 0) -> tuple[Work, ...]:
    """Measure the seconds of each block for one microbatch; the last block is the work after the last mark.

    Forward and backward are compiled separately, and equal blocks only once. Each round runs all tasks, so that noise
    of the machine affects all of them, and the median over the rounds is used. Tasks run one at a time on constant
    values, with the memory of one task at a time.

    Args:
      marks: the marks of the loop body.
      mesh: the mesh of the ranks.
      rank: the rank on whose devices the blocks run.

    Raises:
      ValueError: if the body cannot be cut at some mark.
    """
    timed = _compile(marks, mesh, rank)
    readings: dict[int, list[float]] = {}
    for _ in range(_ROUNDS):
        for key, task in {id(task.run): task for tasks in timed.values() for task in tasks}.items():
            readings.setdefault(key, []).append(_read(task))

    def seconds(block: int, *kinds: TaskKind) -> float:
        return sum(statistics.median(readings[id(t.run)]) for kind in kinds for t in timed.get((block, kind), ()))

    return tuple(Work(seconds(block, TaskKind.FORWARD), seconds(block, *_BACKWARD)) for block in range(len(marks) + 1))


def _compile(marks: Marks, mesh: MpmdMesh, rank: int) -> dict[tuple[int, TaskKind], list[_Timed]]:
    """Compile each task of the body, cut at every mark, and find the shardings of values meanwhile."""
    blocks, part, submesh = marks.blocks, marks.blocks.partition, mesh.unstack[rank]
    compiler = TaskCompiler(mesh)
    specs: dict[Value, PartitionSpec] = dict(blocks.state_specs())
    states = {a.result: a.state for a in part.accumulators} | {c.result: c.state for c in part.carries}
    found: dict[tuple[int, TaskKind], list[_Timed]] = {}
    for task in part.tasks:
        values = task.graph.inputs
        place = {value: i for i, value in enumerate(values)}
        in_specs = [specs[v] if v in specs else blocks.spec_read(v) for v in values]
        turns = tuple(
            (i, place[states[v]])
            for i, v in enumerate(task.graph.outputs)
            if isinstance(v, Value) and v in states and states[v] in place
        )
        out_specs: list[PartitionSpec | None] = [None] * len(task.graph.outputs)
        for output, position in turns:
            out_specs[output] = in_specs[position]
        donate = frozenset(position for _, position in turns)
        alone = ProgramTask(task.name, rank, task.graph, task.stage, task.kind, donate=donate)
        run = compiler.compile(alone, in_specs, out_specs)
        for atom, sharding in zip(task.graph.outputs, run.output_shardings, strict=True):
            if isinstance(atom, Value):
                specs[atom] = spec_of(sharding) or PartitionSpec()
        inputs = tuple(
            (v.aval, NamedSharding(submesh, s, memory_kind=memory_kind_of(v.aval)))
            for v, s in zip(values, in_specs, strict=True)
        )
        found.setdefault((task.stage, task.kind), []).append(_Timed(run, inputs, turns))
    return found


def _read(task: _Timed) -> float:
    """Measure the seconds of one call, as a mean over several calls if one call is too short.

    Return the least of a few readings, since other work on the machine only makes readings longer.
    """
    operands = [_filled(aval, sharding) for aval, sharding in task.inputs]
    jax.block_until_ready(operands)

    def call() -> Sequence[Any]:
        results = task.run(*operands)
        for output, position in task.turns:
            operands[position] = results[output]
        return results

    def seconds(calls: int) -> float:
        results: Sequence[Any] = ()
        start = time.perf_counter()
        for _ in range(calls):
            results = call()
        jax.block_until_ready(results)
        return (time.perf_counter() - start) / calls

    jax.block_until_ready(call())
    calls = min(max(math.ceil(_LEAST_SECONDS / max(seconds(1), 1e-9)), 1), _MOST_CALLS)
    return min(seconds(calls) for _ in range(_READINGS))


def _filled(aval: Any, sharding: NamedSharding) -> jax.Array:
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        keys = jax.random.split(jax.random.key(0, impl=jax.random.key_impl(jnp.zeros((), aval.dtype))), aval.shape)
        return jax.device_put(keys, sharding)
    value = _VALUE if jnp.issubdtype(aval.dtype, jnp.inexact) else 0
    return jnp.full(aval.shape, value, aval.dtype, device=sharding)
