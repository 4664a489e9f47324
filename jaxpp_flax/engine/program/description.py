"""A program as lines that are equal in every process: no addresses, no names of variables, no values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jaxpp_flax.engine.arrays.mesh import RankMeshes
from jaxpp_flax.engine.program.program import Program
from jaxpp_flax.engine.tracing.graph_text import GraphText
from jaxpp_flax.engine.tracing.ir import Graph, memory_kind_of
from jaxpp_flax.processes import value_hash

__all__ = ["describe_graph", "describe_program", "describe_ranks"]

_ADDRESS = re.compile(r" at 0x[0-9a-f]+|\bid=\d+|0x[0-9a-f]{6,}")


def describe_ranks(mesh: RankMeshes) -> list[str]:
    """Return the mesh of each rank as lines: if processes disagree on the owner of a rank, they wait forever."""
    ids = [[device.id for device in submesh.devices.flat] for submesh in mesh.unstack]
    return [
        f"rank {rank} has the mesh {dict(submesh.shape)} of the devices {ids[rank]}"
        for rank, submesh in enumerate(mesh.unstack)
    ]


def describe_program(
    program: Program, argument_specs: Sequence[PartitionSpec], result_specs: Sequence[PartitionSpec | None]
) -> list[str]:
    """Return the program as lines: arguments, results, the equations of each task, and all instructions."""
    lines: list[str] = []
    for position, (ranks, spec) in enumerate(zip(program.arguments, argument_specs, strict=True)):
        lines.append(f"argument {position} is on the ranks {sorted(ranks.items())} with spec {spec}")
    for position, (result, spec) in enumerate(zip(program.results, result_specs, strict=True)):
        where = sorted(result.items()) if isinstance(result, dict) else f"the constant {result.value}"
        lines.append(f"result {position} is on the ranks {where} with spec {spec}")
    for task in program.tasks:
        lines.append(
            f"task {task.name} of rank {task.rank} donates {sorted(task.donate)}, pins {task.pins}, "
            f"out_specs {task.out_specs}"
        )
        lines += [f"task {task.name}: {line}" for line in describe_graph(task.graph)]
    lines += [f"instruction {number}: {line}" for number, line in enumerate(program.as_text().splitlines())]
    return lines


def describe_graph(graph: Graph) -> Iterator[str]:
    """Yield a graph as lines: its inputs, its equations with all parameters, its outputs."""
    places = ["", *(f" at {_place(equation.where)}" for equation in graph.equations), ""]
    return (line + place for line, place in zip(_Description().lines(graph), places, strict=True))


def _place(where: str) -> str:
    # The same file may be in another folder on another host.
    return where.rpartition("/")[2]


class _Description(GraphText):
    """Writes graphs as every process does; inner graphs without places, as processes may have traced them elsewhere."""

    def type(self, aval: Any) -> str:
        spec = getattr(getattr(aval, "sharding", None), "spec", None)
        weak = "~" if getattr(aval, "weak_type", False) else ""
        shape = list(getattr(aval, "shape", ()))
        return f"{weak}{getattr(aval, 'dtype', aval)}{shape}{spec or ''}{memory_kind_of(aval) or ''}"

    def leaf(self, value: Any) -> str:
        if isinstance(value, (np.ndarray, jax.Array)):
            # No hash if this process has only a part of the array.
            return f"{value.dtype}{list(value.shape)}#{value_hash(value)}"
        if value is None or isinstance(value, (bool, int, float, complex, str, np.generic, np.dtype)):
            return str(value)
        if callable(value) and hasattr(value, "__qualname__"):
            return str(value.__qualname__)
        return _ADDRESS.sub("", str(value))
