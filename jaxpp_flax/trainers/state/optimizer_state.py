"""The optimizer's first state: its shapes, its programs, its copies of parameters."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import replace
from typing import Any

import jax

from jaxpp_flax.checkpoint import CheckpointMismatchError
from jaxpp_flax.checkpoint.format.paths import flatten
from jaxpp_flax.checkpoint.reading import RestorePlan
from jaxpp_flax.trainers.errors import ModelError
from jaxpp_flax.trainers.state.leaf_programs import LeafPrograms
from jaxpp_flax.trainers.state.train_state import TrainState, shapes_of

# JAX raises these errors if an optimizer's `init` reads values. Such an `init` is called instead of traced.
_NOT_TRACEABLE = (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError)


def shapes_or_values(init: Callable[[Any], Any], params: Any) -> Any:
    """Return the shapes of `init(params)`; the values, if `init` cannot be traced.

    Raises:
      ModelError: if `init` reads values, and the parameters are shapes.
    """
    try:
        return jax.eval_shape(init, params)
    except _NOT_TRACEABLE as error:
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params)):
            raise ModelError(
                "the optimizer's `init` reads the values of parameters, and this model has none yet: it was given as a "
                f"function or an abstract module ({str(error).splitlines()[0]}). Pass the module itself, or an "
                "optimizer that `jax.eval_shape(tx.init, params)` can trace."
            ) from error
        return init(params)


def trace_init(init: Callable[[Any], Any], params: Any) -> LeafPrograms | None:
    """Trace the making of the optimizer's first state from parameters; None if it reads their values."""
    try:
        return LeafPrograms.trace(init, shapes_of(params))
    except _NOT_TRACEABLE:
        return None


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
    programs, names = trace_init(init, params), [*flatten(params)[0]]
    found = {} if programs is None else programs.copies()
    return {path: None if number is None else names[number] for path, number in found.items()}


def copies_of(
    params: Container[str], state: TrainState, init: Any, valued: Container[str]
) -> tuple[dict[str, str], list[str]]:
    """Return the copies of some parameters in a state: the path in `params` of each, by its path in the state.

    Return also the paths of leaves that the optimizer made of parameters in another way. Leaves that are not `valued`
    are left out: they are made from the new parameters.
    """
    leaves, copies, others = flatten(state)[0], dict[str, str](), list[str]()
    depending = {f"opt_state/{path}".rstrip("/"): of for path, of in copies_in(init, state.params).items()}
    for path, of in depending.items():
        if (of is not None and of not in params) or path not in valued:
            continue
        if of is None or leaves[path].dtype != leaves[f"params/{of}"].dtype:
            others.append(path)
        else:
            copies[path] = of
    average = [] if state.ema is None else [path for path in flatten(state.params)[0] if path in params]
    return copies | {f"ema/{path}": path for path in average if f"ema/{path}" in valued}, others


def with_copies(
    plan: RestorePlan, state: TrainState, init: Any, valued: Container[str]
) -> tuple[RestorePlan, list[str]]:
    """Add the copies of restored parameters to a plan; return the new plan and the paths of these copies.

    Refuse a leaf that was computed from a restored parameter other than by a copy: it would keep its old value.
    """
    restored = {path.removeprefix("params/") for path in plan.chosen if path.startswith("params/")}
    copies, others = copies_of(restored, state, init, valued) if restored else ({}, [])
    if wrong := [path for path in others if path not in plan.chosen]:
        raise CheckpointMismatchError(
            f"{plan.directory} gives the parameters new values, and these leaves would keep what was made of the old "
            "ones. Restore them too, by `only`; or make a new trainer from a model with the checkpoint's weights.",
            [f"{path}: the optimizer made it of parameters, other than by copying them" for path in wrong],
        )
    new = {path: plan.chosen[f"params/{of}"] for path, of in copies.items() if path not in plan.chosen}
    return replace(plan, chosen={**plan.chosen, **new}), [*new]
