"""Find the learning rate of a step: as the user gave it, or in the state of `optax.inject_hyperparams`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

__all__ = ["NO_LEARNING_RATE", "LearningRate", "find_learning_rate"]

LearningRate = Callable[[Any, Any], Any]
"""A function of the number of steps done before, and of the optimizer's state after the update."""

NO_LEARNING_RATE = (
    'the metric "learning_rate" is left out: the optimizer does not show one rate in its state. Pass the rate that you '
    "gave the optimizer, a number or a schedule, as Logging(learning_rate=) too; or keep it in the optimizer's state: "
    "optax.inject_hyperparams(optax.adamw)(learning_rate=schedule)"
)
"""The line for a trainer whose learning rate is asked for and not known."""

_NAME = "learning_rate"


def find_learning_rate(opt_state: Any, given: float | Callable[[Any], Any] | None = None) -> LearningRate | None:
    """Return the function that reads a step's learning rate inside the step; None if the rate is not known.

    The first of these that exists: `given`; the only hyperparameter `learning_rate` of `optax.inject_hyperparams`.
    Nothing else is searched: a factor in an optimizer's chain may be the rate, or any other number.

    Args:
      opt_state: the optimizer's state, arrays or shapes.
      given: a number, or a function of the number of steps done.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> state = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5).init({"w": jnp.ones(2)})
      >>> float(find_learning_rate(state)(0, state))
      0.5
      >>> find_learning_rate(optax.sgd(0.5).init({"w": jnp.ones(2)})) is None
      True
    """
    if given is not None:
        return lambda step, after: given(step) if callable(given) else given
    if len(_hyperparameters(opt_state)) != 1:
        return None
    return lambda step, after: _hyperparameters(after)[0]


def _hyperparameters(opt_state: Any) -> list[Any]:
    """Return the values of `learning_rate` in states of `optax.inject_hyperparams`."""
    holders = jax.tree.leaves(opt_state, is_leaf=_has_hyperparameters)
    return [of.hyperparams[_NAME] for of in holders if _has_hyperparameters(of) and _NAME in of.hyperparams]


def _has_hyperparameters(node: Any) -> bool:
    return isinstance(getattr(node, "hyperparams", None), dict)
