"""Give each result of a step an array of its own: a step that takes one result donated must not end another one."""

from __future__ import annotations

from dataclasses import replace

import jax

from jaxpp_flax.engine.tracing.ir import Atom, Equation, Graph, Value, emit, memory_kind_of

__all__ = ["separate_results"]


def separate_results(graph: Graph) -> Graph:
    """Return the same function; it copies a value that is returned a second time.

    Arguments that are returned unchanged stay the caller's, as under `jax.jit`. Values in host memory stay shared.
    """
    seen: set[Atom] = set(graph.inputs)
    copies, outputs = list[Equation](), list[Atom]()
    for atom in graph.outputs:
        if isinstance(atom, Value) and atom in seen and atom not in graph.inputs and memory_kind_of(atom.aval) is None:
            made, (atom,) = emit(jax.lax.copy_p.bind, [atom])
            copies += made
        seen.add(atom)
        outputs.append(atom)
    if not copies:
        return graph
    return replace(graph, outputs=tuple(outputs), equations=(*graph.equations, *copies))
