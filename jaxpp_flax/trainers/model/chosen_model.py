"""The user's model in parts: its adapter, parameters and annotations, with checks before any work."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from flax.linen.fp8_ops import fm32

from jaxpp_flax.engine.arrays.mesh import named_memory
from jaxpp_flax.trainers.errors import ModelError
from jaxpp_flax.trainers.model.adapter import ModelAdapter
from jaxpp_flax.trainers.model.factory import (
    OTHER_LIBRARIES,
    call_factory,
    check_module,
    check_variables,
    make_module,
    trace_factory,
    wraps_another_model,
)
from jaxpp_flax.trainers.model.frozen import path_text
from jaxpp_flax.trainers.model.linen_model import LinenModel
from jaxpp_flax.trainers.model.nnx_model import NnxModel
from jaxpp_flax.trainers.model.sharding import annotations_of, unboxed
from jaxpp_flax.trainers.state.first_values import LeafPrograms
from jaxpp_flax.trainers.state.train_state import model_part

__all__ = ["ChosenModel", "check_memory", "check_parameters", "choose_model"]


@dataclass(frozen=True, kw_only=True)
class ChosenModel:
    """A model in parts.

    Args:
      adapter: the model as pure functions.
      name: the class of the module.
      params, rest: the trained parameters and the rest of the state: arrays, or shapes of values that do not exist yet.
      notes: the annotations of the leaves of both.
      initializer: makes both; None if they have values, or if nothing is known to make them of.
    """

    adapter: ModelAdapter
    name: str
    params: Any
    rest: Any
    notes: tuple[Any, Any]
    initializer: LeafPrograms | None = None

    @classmethod
    def of(
        cls, adapter: ModelAdapter, name: str, params: Any, rest: Any, initializer: LeafPrograms | None = None
    ) -> ChosenModel:
        """Take Linen's boxes off, and note the annotations."""
        _check_dtypes((params, rest), name)
        notes = annotations_of(params), annotations_of(rest)
        params, rest = (jax.tree.map(_without_sharding, unboxed(tree)) for tree in (params, rest))
        if initializer is not None:
            initializer = replace(initializer, shapes=model_part(params, rest))
        return cls(adapter=adapter, name=name, params=params, rest=rest, notes=notes, initializer=initializer)


def _check_dtypes(model: Any, name: str) -> None:
    """Refuse variables that are stored in `fm32`, in which gradients of Flax's fp8 layers accumulate."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(model):
        if getattr(leaf, "dtype", None) == fm32:
            raise ModelError(
                f"the leaf {path_text(path[1:])} of {name} has dtype {leaf.dtype}, which JAX cannot differentiate. "
                "Store it in float32, and convert it where it is used: `jax.lax.convert_element_type(x, fm32)`."
            )


def _without_sharding(leaf: Any) -> Any:
    """Return a shape without the sharding that `nnx.eval_shape` may have found; the step decides."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf


def choose_model(
    model: Any,
    variables: Mapping[str, Any] | Callable[..., Any] | None,
    wrt: Any,
    frozen: Any,
    seed: int,
) -> ChosenModel:
    """Take a model apart: a module, a factory of a module, or a Linen module with variables or a function of a key."""
    if isinstance(model, nn.Module):
        return _choose_linen(model, variables, frozen, seed)
    is_factory = callable(model) and not isinstance(model, (type, nnx.Module)) and not _what_to_pass(model)
    if variables is not None and (is_factory or isinstance(model, nnx.Module)):
        kind = "a factory" if is_factory else f"{type(model).__name__} is an nnx.Module"
        raise TypeError(f"variables= are for Linen models, but {kind}, which holds its own. Leave them out.")
    if isinstance(model, nnx.Module):
        adapter, params, rest = NnxModel.take_apart(model, wrt, frozen, seed)
        return ChosenModel.of(adapter, type(model).__name__, params, rest)
    if is_factory:
        names: list[str] = []

        def take_apart(module: Any) -> tuple[ModelAdapter, Any, Any]:
            names.append(type(check_module(module, model)).__name__)
            return NnxModel.take_apart(module, wrt, frozen, seed)

        adapter, made = trace_factory(model, lambda: make_module(model, seed), take_apart)
        return ChosenModel.of(adapter, names[-1], made.shapes["params"], made.shapes["model_state"], made)
    kind = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
    raise TypeError(
        f"model must be an instance of nnx.Module or flax.linen.Module, or a function that makes an nnx.Module, got "
        f"{kind}.{_what_to_pass(model)}"
    )


def _choose_linen(
    model: nn.Module,
    variables: Mapping[str, Any] | Callable[..., Any] | None,
    frozen: Any,
    seed: int,
) -> ChosenModel:
    def take_apart(variables: Any) -> tuple[ModelAdapter, Any, Any]:
        return LinenModel.take_apart(model, variables, jax.random.key(seed), frozen)

    if callable(variables):
        make = lambda: call_factory(variables, "key", lambda: jax.random.key(seed))  # noqa: E731
        adapter, made = trace_factory(variables, make, lambda of: take_apart(check_variables(of, variables)))
        params, rest = made.shapes["params"], made.shapes["model_state"]
        return ChosenModel.of(adapter, type(model).__name__, params, rest, made)
    if not isinstance(variables, Mapping):
        raise TypeError(
            f"the Linen module {type(model).__name__} holds no variables of its own: pass "
            f"`variables=model.init(key, x)`, or `variables=lambda key: model.init(key, x)` to make each where it is "
            f"used; got {type(variables).__name__}."
        )
    if "params" not in variables:
        raise ModelError(
            f"variables has the collections {sorted(variables)}, but no 'params'. Pass all that `model.init` "
            "returned, or {'params': params}."
        )
    adapter, params, rest = take_apart(variables)
    return ChosenModel.of(adapter, type(model).__name__, params, rest)


def _what_to_pass(model: Any) -> str:
    """Return advice for an object that holds a model: the parts to pass to the trainer."""
    if isinstance(model, type) and issubclass(model, nnx.Module):
        return f" Pass a function that makes it: `lambda rngs: {model.__name__}(..., rngs=rngs)`."
    if isinstance(model, type) and issubclass(model, nn.Module):
        return f" Pass an instance, `{model.__name__}(...)`, with variables=lambda key: module.init(key, x)."
    owner = getattr(model, "__self__", None)
    if isinstance(owner, (nnx.Module, nn.Module)) and getattr(model, "__name__", "") in ("__call__", "apply", "init"):
        return " Pass the module itself."
    if isinstance(model, nnx.Optimizer):
        module = "its `.model`" if hasattr(model, "model") else "the module that it updates"
        return f" Pass {module} as the model, and its `.tx` as the optimizer."
    if all(hasattr(model, name) for name in ("apply_fn", "params", "tx")):  # flax.training.train_state.TrainState
        return (
            " Pass the Linen module whose `apply` is its `.apply_fn`, with variables={'params': state.params}, and its "
            "`.tx` as the optimizer."
        )
    if isinstance(getattr(model, "module", None), nn.Module) and hasattr(model, "params"):  # Hugging Face's, in Flax
        return " Pass the Linen module that it wraps: `model.module`, with variables={'params': model.params}."
    if any(of.__module__.partition(".")[0] == "torch" for of in inspect.getmro(type(model))):
        return " That is a PyTorch module: use a Flax model, and convert its weights."
    if not callable(model) or isinstance(model, type) or wraps_another_model(model):
        return f" {OTHER_LIBRARIES}"
    return ""


def check_parameters(params: Any, name: str, stored: Any) -> None:
    """Refuse a model without parameters, or with parameters that have no gradient or another type than `stored`.

    `name` is the model's class; a `stored` that is None allows all types.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if not leaves:
        raise ModelError(
            f"the model {name} has no parameters to train. Give it layers with parameters; for NNX, "
            "Training(wrt=) chooses the variables to train (nnx.Param by default)."
        )
    for path, leaf in leaves:
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise ModelError(
                f"the parameter {jax.tree_util.keystr(path)} of {name} has dtype {leaf.dtype}, which "
                "has no gradient. Keep it in a variable of another type (NNX) or collection (Linen)."
            )
        if stored not in (None, leaf.dtype):
            raise ModelError(
                f"the parameter {jax.tree_util.keystr(path)} of {name} has dtype {leaf.dtype}, but precision= stores "
                f"parameters in {stored}. Make the model with param_dtype=jnp.{stored}, or allow this type: "
                f"precision=Precision(..., params={str(leaf.dtype)!r})."
            )


def check_memory(params: Any, rest: Any, name: str) -> None:
    """Refuse a model with leaves in other than device memory; `name` is its class."""
    for path, leaf in jax.tree_util.tree_leaves_with_path((params, rest)):
        if named_memory(getattr(leaf, "sharding", None)) is not None:
            raise ModelError(
                f"the leaf {jax.tree_util.keystr(path[1:])} of {name} lies in {leaf.sharding.memory_kind!r} memory, "
                "but a step computes with it in the devices' own memory. Move the model there first: "
                "`jax.device_put(state, jax.devices()[0])`. Only the optimizer's state may be in host memory: "
                'memory=Memory(optimizer_state="pinned_host").'
            )
