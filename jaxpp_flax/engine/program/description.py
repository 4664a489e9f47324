"""A program as lines that are equal in every process: no addresses, no names of variables, no values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jaxpp_flax.engine.program.program import Program
from jaxpp_flax.engine.tracing.equation_parameters import telling
from jaxpp_flax.engine.tracing.ir import Atom, Constant, Graph, Value, from_jaxpr, memory_kind_of
from jaxpp_flax.processes import value_hash

__all__ = ["describe_graph", "describe_program"]

_ADDRESS = re.compile(r" at 0x[0-9a-f]+|\bid=\d+|0x[0-9a-f]{6,}")


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
            f"leading {task.leading}, like {task.like}"
        )
        lines += [f"task {task.name}: {line}" for line in describe_graph(task.graph)]
    lines += [f"instruction {number}: {line}" for number, line in enumerate(program.as_text().splitlines())]
    return lines


def describe_graph(graph: Graph) -> Iterator[str]:
    """Yield a graph as lines: its inputs, its equations with all parameters, its outputs."""
    names: dict[Value, str] = {}

    def name(atom: Atom) -> str:
        if isinstance(atom, Constant):
            return _text(atom.value)
        return names.setdefault(atom, f"%{len(names)}")

    yield "inputs " + ", ".join(f"{name(v)}:{_aval(v.aval)}" for v in graph.inputs)
    for equation in graph.equations:
        results = ", ".join(f"{name(v)}:{_aval(v.aval)}" for v in equation.outputs)
        operands = ", ".join(name(a) for a in equation.inputs)
        params = _params(equation.primitive, equation.params)
        yield f"{results} = {equation.name}[{params}]({operands}) at {_place(equation.where)}"
    yield "outputs " + ", ".join(name(atom) for atom in graph.outputs)


def _place(where: str) -> str:
    # The same file may be in another folder on another host.
    return where.rpartition("/")[2]


def _aval(aval: Any) -> str:
    weak = "~" if getattr(aval, "weak_type", False) else ""
    spec = getattr(getattr(aval, "sharding", None), "spec", None)
    memory = memory_kind_of(aval) or ""
    return f"{weak}{getattr(aval, 'dtype', aval)}{list(getattr(aval, 'shape', ()))}{spec or ''}{memory}"


def _params(primitive: Any, params: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={_text(value)}" for key, value in telling(primitive, params))


def _text(value: Any) -> str:
    """Return a parameter as text that is equal in every process."""
    if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
        graph, constants = from_jaxpr(value)
        return "{" + "; ".join([*map(_text, constants), *describe_graph(graph)]) + "}"
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
