"""A program as lines that are equal in every process: no addresses, no names of variables, no values."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jaxpp_flax.engine.arrays.mesh import RankMeshes
from jaxpp_flax.engine.program.program import Program
from jaxpp_flax.engine.tracing.canonical_form import Operand, Result, canonical_form, is_jaxpr, telling_params
from jaxpp_flax.engine.tracing.ir import Constant, Equation, Graph, from_jaxpr
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
            f"batch_dims {task.batch_dims}, like {task.like}, out_specs {task.out_specs}"
        )
        lines += [f"task {task.name}: {line}" for line in describe_graph(task.graph)]
    lines += [f"instruction {number}: {line}" for number, line in enumerate(program.as_text().splitlines())]
    return lines


def describe_graph(graph: Graph) -> Iterator[str]:
    """Yield a graph as lines: its inputs, its equations with all parameters, its outputs."""
    return _lines(graph, lambda equation: f" at {_place(equation.where)}")


def _lines(graph: Graph, place: Callable[[Equation], str]) -> Iterator[str]:
    form = canonical_form(graph)
    yield "inputs " + ", ".join(map(_result, form.inputs))
    for equation, operands, results in form.equations:
        telling = ", ".join(f"{name}={_text(value)}" for name, value in telling_params(equation))
        made, read = ", ".join(map(_result, results)), ", ".join(map(_operand, operands))
        yield f"{made} = {equation.name}[{telling}]({read}){place(equation)}"
    yield "outputs " + ", ".join(map(_operand, form.outputs))


def _result(result: Result) -> str:
    number, facts = result
    spec = getattr(facts.sharding, "spec", None)
    weak = "~" if facts.weak_type else ""
    return f"%{number}:{weak}{facts.dtype}{list(facts.shape)}{spec or ''}{facts.memory_kind or ''}"


def _operand(operand: Operand) -> str:
    return _text(operand.value) if isinstance(operand, Constant) else f"%{operand}"


def _place(where: str) -> str:
    # The same file may be in another folder on another host.
    return where.rpartition("/")[2]


def _text(value: Any) -> str:
    """Return a parameter as text that is equal in every process."""
    if is_jaxpr(value):
        inner, captured = from_jaxpr(value)
        # JAX caches inner jaxprs: two processes may have traced them at different places.
        return "{" + "; ".join([*map(_text, captured), *_lines(inner, lambda _: "")]) + "}"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(map(_text, value)) + ")"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {_text(v)}" for k, v in sorted(value.items(), key=lambda kv: str(kv[0]))) + "}"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(map(_text, value))) + "}"
    if isinstance(value, (np.ndarray, jax.Array)):
        # No hash if this process has only a part of the array.
        return f"{value.dtype}{list(value.shape)}#{value_hash(value)}"
    if value is None or isinstance(value, (bool, int, float, complex, str, np.generic, np.dtype)):
        return str(value)
    if callable(value) and hasattr(value, "__qualname__"):
        return str(value.__qualname__)
    return _ADDRESS.sub("", str(value))
