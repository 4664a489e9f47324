"""The optimizer's first state: its shapes, its programs, its copies of parameters."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import jax

from jaxpp_flax.checkpoint.format.paths import flatten
from jaxpp_flax.trainers.errors import ModelError
from jaxpp_flax.trainers.state.first_values import LeafPrograms
from jaxpp_flax.trainers.state.train_state import TrainState, shapes_of


def shapes_of_init(init: Callable[[Any], Any], params: Any) -> Any:
    """Return the shapes of `init(params)`.

    Raises:
      ModelError: if `init` reads values: a model larger than a device has them nowhere in one place.
    """
    try:
        return jax.eval_shape(init, params)
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
        raise ModelError(
            f"the optimizer's `init` reads the values of parameters ({str(error).splitlines()[0]}), but it is traced: "
            "each leaf of its state is made on its own devices. Use only jax.numpy in `init`; "
            "`jax.eval_shape(tx.init, params)` must work."
        ) from error


def copies_in(init: Any, params: Any) -> dict[str, str | None]:
    """Return the leaves of an optimizer's first state that depend on the parameters' values, by path.

    A plain copy of a parameter has the parameter's path; any other function of parameters has None. A leaf that only
    has a parameter's shape, such as a moment, is left out.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> copies_in(optax.adam(0.1).init, {"w": jnp.ones(2)})
      {}
      >>> copies_in(lambda params: {"z": params, "size": abs(params["w"]).sum()}, {"w": jnp.ones(2)})
      {'size': None, 'z/w': 'w'}
    """
    found, names = LeafPrograms.trace(init, shapes_of(params)).copies(), [*flatten(params)[0]]
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
