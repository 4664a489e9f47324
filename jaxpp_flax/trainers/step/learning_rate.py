"""Find the learning rate of a step: in the optimizer's state, in its schedules and factors, or as the user gave it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

__all__ = ["LearningRate", "find_learning_rate"]

LearningRate = Callable[[Any, Any, Any], Any]
"""A function of the step number, the optimizer's state before the update, and its state after the update."""

_NAME = "learning_rate"
_NOT_FOUND = (
    'Logging(metrics=...) asks for "learning_rate", and this optimizer has {found}. Pass it: Logging(learning_rate='
    "schedule), a number or a function of the step; or keep it in the optimizer's state: "
    "optax.inject_hyperparams(optax.adamw)(learning_rate=schedule)."
)


def find_learning_rate(tx: Any, opt_state: Any, given: float | Callable[[Any], Any] | None = None) -> LearningRate:
    """Return the function that reads a step's learning rate inside the step.

    The first of these that exists: `given`; the hyperparameter `learning_rate` of `optax.inject_hyperparams`; the
    factors at the end of an `optax.chain`, as `optax.adamw(rate)` and other optimizers of Optax have them, multiplied.

    Args:
      tx: an Optax optimizer.
      opt_state: its state, arrays or shapes.
      given: a number, or a function of the number of steps done.

    Raises:
      ValueError: if the optimizer has no learning rate that can be found, or several.

    Example:
      >>> tx = optax.sgd(optax.linear_schedule(0.5, 0.0, 10))
      >>> state = tx.init({"w": jnp.ones(2)})
      >>> float(find_learning_rate(tx, state)(0, state, state))
      0.5
    """
    if given is not None:
        return lambda step, before, after: given(step) if callable(given) else given
    places = _hyperparameters(opt_state)
    if len(places) == 1:
        return lambda step, before, after: _hyperparameters(after)[0]
    if len(places) > 1:
        raise ValueError(_NOT_FOUND.format(found=f"{len(places)} hyperparameters of this name"))
    factors = _last_factors(getattr(tx, "update", None))
    scheduled = sum(callable(factor) for factor in factors)
    if not factors or scheduled > len(_schedule_states(opt_state)):
        raise ValueError(_NOT_FOUND.format(found="none that can be found in its state or its schedules"))

    def rate(step: Any, before: Any, after: Any) -> Any:
        # The states stand in the order of the chain, and the factors are at its end.
        states = _schedule_states(before)
        counts = iter([state.count for state in states[len(states) - scheduled :]])
        product: Any = 1.0
        for factor in factors:
            product = product * (factor(next(counts)) if callable(factor) else factor)
        return jnp.abs(product)  # Optax adds the updates, so it multiplies by minus the rate

    return rate


def _hyperparameters(opt_state: Any) -> list[Any]:
    """Return the values of `learning_rate` in states of `optax.inject_hyperparams`."""
    holders = jax.tree.leaves(opt_state, is_leaf=_has_hyperparameters)
    return [of.hyperparams[_NAME] for of in holders if _has_hyperparameters(of) and _NAME in of.hyperparams]


def _has_hyperparameters(node: Any) -> bool:
    return isinstance(getattr(node, "hyperparams", None), dict)


def _schedule_states(opt_state: Any) -> list[Any]:
    def is_state(node: Any) -> bool:
        return isinstance(node, optax.ScaleByScheduleState)

    return [node for node in jax.tree.leaves(opt_state, is_leaf=is_state) if is_state(node)]


def _last_factors(update: Any) -> list[Any]:
    """Return the numbers and schedules by which the last parts of a chain multiply the updates."""
    found: list[Any] = []
    for part in reversed(list(_parts(update))):
        name, variables = _maker(part), _variables(part)
        if name == "scale_by_schedule" and "step_size_fn" in variables:
            found.insert(0, variables["step_size_fn"])
        elif name == "scale" and "step_size" in variables:
            found.insert(0, variables["step_size"])
        elif name != "identity":
            break
    return found


def _parts(update: Any) -> Iterator[Any]:
    """Return the update functions of the transformations in a chain, chains inside it included."""
    name, variables = _maker(update), _variables(update)
    if name == "chain" and "update_fns" in variables:
        for part in variables["update_fns"]:
            yield from _parts(part)
    elif name == "with_extra_args_support" and hasattr(variables.get("tx"), "update"):
        yield from _parts(variables["tx"].update)
    else:
        yield update


def _maker(function: Any) -> str:
    """Return the name of Optax's function that made an update function; "" for functions of others."""
    is_optax = str(getattr(function, "__module__", "")).partition(".")[0] == "optax"
    return getattr(function, "__qualname__", "").partition(".")[0] if is_optax else ""


def _variables(function: Any) -> dict[str, Any]:
    """Return the variables that a function has from the function around it."""
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    return {} if code is None else {n: c.cell_contents for n, c in zip(code.co_freevars, cells or (), strict=True)}
