"""The user's function that changes variables once a step, inside the compiled step: `Training(after_update=)`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import core

from jaxpp_flax.engine.tracing.hints import place_with
from jaxpp_flax.messages import listed
from jaxpp_flax.trainers.errors import ModelError
from jaxpp_flax.trainers.model.adapter import ModelAdapter
from jaxpp_flax.trainers.model.frozen import path_text
from jaxpp_flax.trainers.model.linen_model import LinenModel
from jaxpp_flax.trainers.state.in_place import Contents
from jaxpp_flax.trainers.writes.structure import check_structure, check_types

__all__ = ["AfterUpdate", "call_after_update", "check_after_update"]

AfterUpdate = Callable[[Any, dict[str, jax.Array]], Any]
"""`fn(model, metrics) -> None` for NNX, `fn(variables, metrics) -> variables` for Linen."""

_WHAT = "the function after_update"


def check_after_update(function: Any) -> None:
    """Raise a `TypeError` for a value that is no function of two arguments."""
    if not callable(function):
        raise TypeError(
            f"after_update must be a function of (model, metrics), got {type(function).__name__}: {function!r}."
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function that is not written in Python
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise TypeError(
            f"after_update is called as after_update(model, metrics), but the given function takes {signature}. Give "
            "it two arguments; bind others beforehand (`functools.partial`)."
        ) from error


def call_after_update(
    function: AfterUpdate,
    model: ModelAdapter,
    params: Any,
    rest: Any,
    metrics: Mapping[str, Any],
    *,
    step: Any,
    num_microbatches: int,
) -> tuple[Any, Any]:
    """Return the parameters and the rest of the model's state as `function` leaves them.

    Random streams of an NNX model give keys of this step that no microbatch has, and begin again in the next step.

    Raises:
      TypeError: for a result that is not what the model's kind needs.
      ModelError: if the function makes or removes variables, or changes a shape or dtype.
    """
    if isinstance(model, LinenModel):
        new_params, new_rest = _call_on_variables(function, model, params, rest, metrics)
    else:
        own = model.computing_in(None)  # with the stored weights, not with copies in a narrower type

        def bind() -> Any:
            return own.bind(params, rest, step=step, microbatch=num_microbatches, training=True)

        module = bind()
        contents = Contents(module)
        try:
            if (result := function(module, dict(metrics))) is not None:
                raise TypeError(
                    f"after_update returned a {type(result).__name__}. For an nnx.Module, change the variables in "
                    "place (`model.bias[...] += x`) and return nothing."
                )
            check_structure(module, bind(), _WHAT, contents)
        finally:
            contents.restore()
        new_params, new_rest = own.params_of(module, params), own.rest_of(module, rest)
    check_types(new_params, params, _WHAT)
    check_types(new_rest, rest, _WHAT)
    return _beside(new_params, params), _beside(new_rest, rest)


def _beside(after: Any, before: Any) -> Any:
    """Return the leaves after the call; a new value is computed where the old one lies, and stays there."""

    def one(new: Any, old: Any) -> Any:
        return old if new is old else place_with(jnp.asarray(new), old)

    return jax.tree.map(one, after, before)


def _call_on_variables(
    function: AfterUpdate, model: LinenModel, params: Any, rest: Any, metrics: Mapping[str, Any]
) -> tuple[Any, Any]:
    before = model.variables_of(params, rest)
    returned = function(jax.tree.map(lambda leaf: leaf, before), dict(metrics))  # a copy that may be changed
    if not isinstance(returned, Mapping):
        raise TypeError(
            f"after_update returned {'None' if returned is None else f'a {type(returned).__name__}'}. For a Linen "
            "model, return all variables: `return {**variables, 'router': new}`."
        )
    after = core.unfreeze(dict(returned))  # type: ignore[arg-type]
    if jax.tree.structure(after) != jax.tree.structure(before):
        new, old = ({path_text(path) for path, _ in jax.tree_util.tree_leaves_with_path(of)} for of in (after, before))
        differences = {"without": sorted(old - new), "with": sorted(new - old)}
        found = ", ".join(f"{word} {listed(paths, 3, str)}" for word, paths in differences.items() if paths)
        raise ModelError(
            f"{_WHAT} returned other variables than it was given: {found or 'in another structure'}. Return each "
            "variable, with a new value or the old one: `return {**variables, 'router': new}`."
        )
    bound = model.bind(params, rest, step=0, microbatch=0, training=True)
    bound.variables = after
    return model.params_of(bound, params), model.rest_of(bound, rest)
