"""The optimizer's first state: its shapes, and what of it is made from the values of parameters."""

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


def made_of(params: Container[str], state: TrainState, init: Any) -> list[str]:
    """Return the paths in a state of what is made from the values of some parameters: average and optimizer's state.

    A leaf that only has a parameter's shape, such as a moment, is not among them.

    Example:
      >>> import jax.numpy as jnp
      >>> init = lambda params: {"z": params, "size": abs(params["w"]).sum(), "mu": jnp.zeros(2)}
      >>> params = {"v": jnp.ones(2), "w": jnp.ones(2)}
      >>> made_of(["w"], TrainState(step=0, params=params, opt_state=(), model_state={}, ema=params), init)
      ['ema/w', 'opt_state/size', 'opt_state/z/w']
    """
    names = [*flatten(state.params)[0]]
    average = [] if state.ema is None else [f"ema/{path}" for path in names if path in params]
    reads = LeafPrograms.trace(init, shapes_of(state.params)).reads()
    return average + [
        f"opt_state/{path}".rstrip("/")
        for path, numbers in reads.items()
        if any(names[number] in params for number in numbers)
    ]
