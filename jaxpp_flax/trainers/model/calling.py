"""Calls of the user's functions with the model, a microbatch, and other arguments that a function asks for by name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from flax.errors import FlaxError

from jaxpp_flax._compat_texts.errors import unbound_axis
from jaxpp_flax.trainers.errors import LossError, ModelError
from jaxpp_flax.trainers.model.adapter import ModelAdapter
from jaxpp_flax.trainers.model.dense_general import checked_without_annotations
from jaxpp_flax.trainers.model.linen_model import LinenCall
from jaxpp_flax.trainers.state.in_place import Contents

# A first argument with one of these names is meant for parameters.
_NAMES_OF_PARAMETERS = ("params", "parameters", "param", "variables", "weights", "theta")
# The arguments that tell a model's `__call__` that it does not train, by the names in Flax's models.
_INFERENCE = {"training": False, "train": False, "is_training": False, "deterministic": True}


def call_function(
    function: Callable[..., Any],
    model: ModelAdapter,
    params: Any,
    rest: Any,
    batch: Any,
    *,
    step: Any,
    microbatch: Any,
    training: bool,
    restores: bool = True,
) -> tuple[Any, Any]:
    """Call `function(bound model, batch)`, with `training=` and `rngs=` if the function takes them.

    Random keys depend on the numbers `step` and `microbatch`. Return the result of the function, and the bound model
    after the call. A function that fails because it treats the model as parameters is told so by a `LossError`, and one
    that uses the axis name of a `pmap` or `vmap` by a `ModelError`. The bound model shares lists, dictionaries and
    objects with the user's model: what the call changes in them is put back, unless `restores` is False.
    """
    bound = model.bind(params, rest, step=step, microbatch=microbatch, training=training)
    asked = asked_for(function)
    extra: dict[str, Any] = {}
    if "training" in asked:
        extra["training"] = training
    if "rngs" in asked:
        extra["rngs"] = model.rngs(rest, step=step, microbatch=microbatch)
    contents = Contents(bound) if restores else None
    try:
        with checked_without_annotations():
            return function(bound, batch, **extra), bound
    except (AttributeError, TypeError, FlaxError) as error:
        if taken := _taken_for_parameters(function, bound, error):
            raise LossError(taken) from error
        raise
    except NameError as error:
        if axis := unbound_axis(error):
            raise ModelError(_unbound_axis(axis, function)) from error
        raise
    finally:
        if contents is not None:
            contents.restore()


def _unbound_axis(axis: str, function: Callable[..., Any]) -> str:
    """Return the message for a function that uses an axis name which nothing binds."""
    return (
        f"the function {getattr(function, '__name__', 'given')!r} uses the axis name {axis!r}, as a layer with "
        f"BatchNorm(axis_name={axis!r}) or jax.lax.pmean(x, {axis!r}) does. In another loop `pmap`, `vmap` or "
        "`shard_map` bound this name; here nothing does, since a loss sees a whole microbatch, whose examples all "
        "devices of a stage share. Remove axis_name= and such calls: loss and gradients are those of the whole batch "
        "without them, and a BatchNorm normalizes by the statistics of each microbatch."
    )


def _taken_for_parameters(function: Callable[..., Any], model: Any, error: Exception) -> str | None:
    """Return the message for a function that failed because it treats the model as parameters; None for others."""
    first, kind = next(iter(_parameters(function)), ""), type(model).__name__
    if first not in _NAMES_OF_PARAMETERS and f"'{kind}' object is not" not in str(error):
        return None
    name = getattr(function, "__name__", "given")
    reason = str(error).splitlines()[0][:200] if str(error) else ""
    return (
        f"the function {name!r} failed ({type(error).__name__}: {reason}), and takes its first argument {first!r} for "
        f"parameters; it is called with the model ({kind}) that holds them. Write `def loss_fn(model, batch)` and "
        "call `model(batch[...])`: there is no `apply` or `merge` to call. A Linen model has `model.params` and "
        "`model.variables` beside."
    )


def asked_for(function: Callable[..., Any]) -> frozenset[str]:
    """Return those of `training` and `rngs` that are parameters of `function`, after the model and the batch.

    Arguments that `functools.partial` has already bound do not count.

    Example:
      >>> sorted(asked_for(lambda model, batch, *, training, rngs: 0))
      ['rngs', 'training']
      >>> sorted(asked_for(functools.partial(lambda model, batch, training: 0, training=True)))
      []
      >>> sorted(asked_for(lambda *both, training: 0))
      ['training']
    """
    taken = _parameters(function)
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    filled = {*[name for name, of in taken.items() if of.kind in by_position][:2]}  # the model and the batch
    if isinstance(function, functools.partial):
        filled |= function.keywords.keys()
    return frozenset({"training", "rngs"} & taken.keys() - filled)


def check_functions(**functions: Any) -> None:
    """Refuse values that are not functions of (model, batch, `training`, `rngs`); all but `loss_fn` may be None."""
    advice = (
        "Give it two arguments; bind others beforehand (`functools.partial`), or put them into the batch: a scalar "
        "there is a constant of the step."
    )
    for name, function in functions.items():
        if function is not None or name == "loss_fn":
            check_function(name, function, "(model, batch)", advice)


def check_function(name: str, function: Any, arguments: str, advice: str) -> None:
    """Refuse a value that is no function of two arguments, and of those that it asks for by name."""
    if not callable(function):
        raise TypeError(f"{name} must be a function of {arguments}, got {type(function).__name__}.")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function that is not written in Python
        return
    try:
        signature.bind(None, None, **dict.fromkeys(asked_for(function)))
    except TypeError as error:
        raise TypeError(
            f"{name} is called as {name}{arguments}, but the given function takes {signature}. {advice}"
        ) from error


def call_model(model: Any, batch: Any) -> Any:
    """Return the model's outputs for `batch`, without training: the default function of `predict`.

    A boolean argument of the model's `__call__` that turns training off (`training`, `train`, `is_training`,
    `deterministic`) is passed. An argument with default None is not passed: the module's own attribute decides.

    Example:
      >>> from flax import nnx
      >>> class Model(nnx.Module):
      ...     def __call__(self, x, training=True):
      ...         return "training" if training else x
      >>> call_model(Model(), 3)
      3
    """
    return model(batch, **inference_arguments(model.module if isinstance(model, LinenCall) else model))


def inference_arguments(module: Any) -> dict[str, bool]:
    """Return the boolean arguments of a module's `__call__` that turn training off, with their values."""
    taken = _parameters(module)
    boolean = {n: of for n, of in taken.items() if of.default is of.empty or isinstance(of.default, bool)}
    return {name: value for name, value in _INFERENCE.items() if name in boolean}


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the named parameters; none if Python cannot read the signature."""
    try:
        found = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {name: of for name, of in found.items() if of.kind not in variadic}
