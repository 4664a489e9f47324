"""Find the leaves of a train state that are copies of parameters, and restore them together with the parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax

from jaxpp_flax.checkpoint import CheckpointMismatchError
from jaxpp_flax.checkpoint.format.leaves import Wanted
from jaxpp_flax.checkpoint.format.paths import flatten
from jaxpp_flax.checkpoint.reading import RestorePlan
from jaxpp_flax.engine.tracing.inline import inline
from jaxpp_flax.engine.tracing.ir import Graph, Value, from_jaxpr, values
from jaxpp_flax.trainers.state.optimizer_state import NOT_TRACEABLE
from jaxpp_flax.trainers.state.train_state import TrainState

# These operations return their operand unchanged.
_COPIES = {"copy", "copy_p", "optimization_barrier"}


def copies_in(init: Any, params: Any) -> dict[str, str | None]:
    """Return the leaves of an optimizer's first state that depend on the parameters' values, by path.

    A plain copy of a parameter has the parameter's path; any other function of parameters has None. A leaf that only
    has a parameter's shape, such as a moment, is left out. An optimizer that cannot be traced gives no leaves.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> copies_in(optax.adam(0.1).init, {"w": jnp.ones(2)})
      {}
      >>> copies_in(lambda params: {"z": params, "size": abs(params["w"]).sum()}, {"w": jnp.ones(2)})
      {'size': None, 'z/w': 'w'}
    """
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    try:
        jaxpr, state = jax.make_jaxpr(init, return_shape=True)(shapes)
    except NOT_TRACEABLE:
        return {}
    graph, consts = from_jaxpr(jaxpr)
    graph = inline(graph, flatten=True)
    names = dict(zip(graph.inputs[len(consts) :], flatten(params)[0], strict=True))
    source = _sources(graph, names)
    paths = flatten(state)[0]
    return {
        path: source[atom]
        for path, atom in zip(paths, graph.outputs, strict=True)
        if isinstance(atom, Value) and atom in source
    }


def _sources(graph: Graph, names: dict[Value, str]) -> dict[Value, str | None]:
    """Return, for each value that depends on an input, the input that the value is a copy of, or None."""
    source: dict[Value, str | None] = dict(names)
    for equation in graph.equations:
        read = [atom for atom in values(equation.inputs) if atom in source]
        if not read:
            continue
        copies = equation.name in _COPIES and len(equation.inputs) == len(equation.outputs)
        for atom, output in zip(equation.inputs, equation.outputs, strict=False):
            source[output] = source.get(atom) if copies and isinstance(atom, Value) else None
        source |= dict.fromkeys([v for v in equation.outputs if v not in source], None)
    return source


def with_copies(plan: RestorePlan, state: TrainState, init: Any) -> tuple[RestorePlan, list[str]]:
    """Add the copies of restored parameters to a plan; return the new plan and the paths of these copies.

    Raises:
      CheckpointMismatchError: if a leaf was computed from a restored parameter other than by a copy, and would keep its
        old value.
    """
    made = {f"opt_state/{path}": of for path, of in copies_in(init, state.params).items()}
    made |= {f"ema/{path}": path for path in (flatten(state.params)[0] if state.ema is not None else ())}
    chosen, wants, faults = dict(plan.chosen), dict(plan.wants), []
    restored = {path.removeprefix("params/") for path in chosen if path.startswith("params/")}
    for path, of in made.items():
        if path in plan.chosen or not restored or (of is not None and of not in restored):
            continue
        if of is None or plan.leaves[path].dtype != plan.leaves[f"params/{of}"].dtype:
            faults.append(f"{path}: the optimizer made it of parameters, other than by copying them")
            continue
        chosen[path], wants[path] = plan.chosen[f"params/{of}"], Wanted.of(plan.leaves[path])
    if faults:
        raise CheckpointMismatchError(
            f"{plan.directory} gives the parameters new values, and these leaves would keep what was made of the old "
            "ones. Restore them too, by `only`; or make a new trainer from a model with the checkpoint's weights.",
            faults,
        )
    return replace(plan, chosen=chosen, wants=wants), [path for path in chosen if path not in plan.chosen]
