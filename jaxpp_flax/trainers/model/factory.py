"""A model that is not there yet: a factory of the user, traced instead of run, or an abstract module."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import linen as nn
from flax import nnx
from flax.errors import TraceContextError

from jaxpp_flax.trainers.errors import ModelError
from jaxpp_flax.trainers.state.first_values import LeafPrograms
from jaxpp_flax.trainers.state.train_state import model_part

__all__ = ["call_factory", "trace_factory"]

_REMEDY = (
    "A factory makes a model from its argument, and changes nothing else: `lambda rngs: GPT(config, rngs=rngs)`. Make "
    "streams of random numbers and other objects of Flax inside it, or take them from `rngs`."
)


OTHER_LIBRARIES = (
    "A model of another library, or a function of parameters and inputs, trains in a step of your own: "
    "`jaxpp_flax.api.treduce`, with `mark_stage_end(x)` between its layers, as in examples/own_step.py."
)
_TAKEN = (
    "A trainer takes an nnx.Module, a Linen module with variables=, or a function that makes an nnx.Module, such as "
    f"`lambda rngs: GPT(config, rngs=rngs)`. {OTHER_LIBRARIES}"
)


def call_factory(factory: Callable[..., Any], argument: str, value: Callable[[], Any]) -> Any:
    """Call a factory: with `value()` as its only argument, or as the one called `argument`; or without arguments.

    Raises:
      TypeError: if the factory needs other arguments.

    Example:
      >>> call_factory(lambda rngs: rngs, "rngs", lambda: 1), call_factory(lambda: 2, "rngs", lambda: 1)
      (1, 2)
    """
    try:
        taken = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # not written in Python
        return factory()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [p for p in taken.values() if p.default is p.empty and p.kind not in variadic]
    others = [p.name for p in required if p.name != argument]
    if argument in taken and not others and taken[argument].kind is not inspect.Parameter.POSITIONAL_ONLY:
        return factory(**{argument: value()})
    if len(required) == 1 and required[0].kind is not inspect.Parameter.KEYWORD_ONLY:
        return factory(value())
    if not required:
        return factory()
    raise TypeError(
        f"the factory {name_of(factory)} needs the arguments {others}, but it is called with {argument} alone, or with "
        f"nothing. Bind the others: `functools.partial`, or `lambda {argument}: ...`."
        f"{f' {OTHER_LIBRARIES}' if argument == 'rngs' else ''}"
    )


def name_of(factory: Callable[..., Any]) -> str:
    """Return the name of a factory for messages."""
    return repr(getattr(factory, "__name__", type(factory).__name__))


def trace_factory(
    factory: Callable[..., Any], make: Callable[[], Any], take_apart: Callable[[Any], tuple[Any, Any, Any]]
) -> tuple[Any, LeafPrograms]:
    """Trace the construction of a model: return the adapter, and the programs that make the `model_part`.

    Args:
      factory: the user's function, for messages.
      make: calls the factory.
      take_apart: checks the result of `make`, and returns the adapter, the parameters and the rest.

    Raises:
      ModelError: if the factory reads values of arrays, or changes an object of Flax that was made outside of it.
    """
    adapters: list[Any] = []

    def parts() -> dict[str, Any]:
        # Flax would place an annotated variable on the devices of a mesh, which the trace has not.
        with nnx.use_eager_sharding(False):
            module = make()
        adapter, params, rest = take_apart(module)
        adapters.append(adapter)
        return model_part(params, rest)

    try:
        made = LeafPrograms.trace(parts)
    except TraceContextError as error:
        raise ModelError(
            f"the factory {name_of(factory)} changes an object that was made outside of it: {error} {_REMEDY}"
        ) from error
    except jax.errors.JAXTypeError as error:
        reason = str(error).splitlines()[0]
        raise ModelError(
            f"the factory {name_of(factory)} reads the value of an array, but it is traced, and its arrays are made "
            f"later, each on its own devices ({reason}). Compute such numbers with NumPy; or make the model before, "
            "and pass the module."
        ) from error
    if effects := {effect for equation in made.graph.equations for effect in equation.effects}:
        raise ModelError(
            f"the factory {name_of(factory)} has side effects in its trace: {', '.join(sorted(map(str, effects)))}, "
            f"such as `jax.debug.print` or a callback. Remove them. {_REMEDY}"
        )
    return adapters[-1], made


def check_module(module: Any, factory: Callable[..., Any]) -> nnx.Module:
    """Return the result of a model's factory, if it is an `nnx.Module`; refuse all others."""
    if isinstance(module, nnx.Module):
        return module
    advice = "Return it." if module is None else _TAKEN
    if isinstance(module, nn.Module):
        advice = "Pass a Linen module itself, with variables=lambda key: module.init(key, x)."
    got = type(module).__name__
    raise TypeError(f"the factory {name_of(factory)} must return an nnx.Module, got {got}. {advice}")


def make_module(factory: Callable[..., Any], seed: int) -> Any:
    """Call the factory of a model; tell what a trainer takes if it fails and may be no factory.

    Raises:
      TypeError: if a function or object fails that has other parameters than `rngs`, as a model of another library.
    """
    try:
        return call_factory(factory, "rngs", lambda: nnx.Rngs(seed))
    except (jax.errors.JAXTypeError, TraceContextError):
        raise
    except Exception as error:
        if _names_streams(factory):
            raise
        failed = f"{name_of(factory)} was called as a factory, and failed with {type(error).__name__}: {error}"
        if isinstance(error, (AttributeError, TypeError)) and OTHER_LIBRARIES not in str(error):
            raise TypeError(f"{failed}. {_TAKEN}") from error
        error.add_note(f"{failed.partition(':')[0]}. {_TAKEN}")
        raise


def _names_streams(factory: Callable[..., Any]) -> bool:
    """Return True for a function of `rngs`, or of nothing: its errors are the author's own."""
    try:
        taken = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return False
    return "rngs" in taken or not taken


def wraps_another_model(function: Any) -> bool:
    """Return True for a callable tree of arrays, as models of other libraries are, and for functions made of one.

    Example:
      >>> tree = jax.tree_util.Partial(lambda w, x: w * x, 2.0)
      >>> wraps_another_model(tree), wraps_another_model(type(tree))
      (False, False)
      >>> import dataclasses
      >>> @jax.tree_util.register_dataclass
      ... @dataclasses.dataclass
      ... class Scale:
      ...     weight: float
      ...     def __call__(self, x):
      ...         return self.weight * x
      >>> wraps_another_model(Scale(2.0)), wraps_another_model(Scale(2.0).__call__)
      (True, True)
    """
    function = inspect.unwrap(function)
    owner = getattr(function, "__self__", function)
    is_function = inspect.isroutine(owner) or inspect.isclass(owner) or isinstance(owner, functools.partial)
    return not is_function and not jax.tree_util.all_leaves([owner])


def check_variables(variables: Any, factory: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the result of a factory of Linen variables, if it has parameters; refuse all others."""
    if isinstance(variables, Mapping) and "params" in variables:
        return variables
    found = sorted(variables) if isinstance(variables, Mapping) else type(variables).__name__
    raise ModelError(
        f"the function {name_of(factory)} of variables= must return the collections of `module.init`, with 'params'; "
        f"got {found}. Write `variables=lambda key: module.init(key, x)`."
    )
