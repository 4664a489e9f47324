"""NNX models in decoding form: modules keep what they need of earlier tokens in `nnx.Cache` variables."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from jaxpp_flax.messages import listed
from jaxpp_flax.trainers.errors import ModelError
from jaxpp_flax.trainers.generation.decoding import DecodingModel
from jaxpp_flax.trainers.model.calling import call_model
from jaxpp_flax.trainers.model.nnx_model import NnxModel
from jaxpp_flax.trainers.state.train_state import is_abstract, shapes_of

__all__ = ["decode_nnx"]


def decode_nnx(
    adapter: NnxModel, params: Any, rest: Any, *, batch_size: int, length: int, dtype: Any = None
) -> DecodingModel:
    """Bring an NNX model into decoding form, by Flax's own convention.

    The module is in `eval()` mode, and the attribute `decode` is True wherever a module has it. Each module with a
    method `init_cache(input_shape, dtype=...)` makes its `nnx.Cache` variables there, for inputs of the shape
    (batch, length, features). `dtype` None leaves the dtype to the modules: that of their computation.

    Raises:
      ModelError: if no module makes a cache, or a module refuses this length.
    """
    params, rest = shapes_of(params), shapes_of(rest)
    found: list[Any] = []

    def make_cache() -> Any:
        module = adapter.rebuild(params, rest)
        module.eval()
        module.set_attributes(decode=True, raise_if_not_found=False)
        _init_caches(module, batch_size, length, dtype)
        graphdef, cache, _ = nnx.split(module, nnx.Cache, ...)
        if not found:
            _check_cache(module, cache)
            found.append(graphdef)
        return cache

    def call(params: Any, rest: Any, cache: Any, tokens: Any) -> tuple[Any, Any]:
        module = nnx.merge(found[0], params, rest, cache, copy=True)
        logits = call_model(module, tokens)
        _, after, _ = nnx.split(module, nnx.Cache, ...)
        return logits, after

    return DecodingModel(call=call, make_cache=make_cache, cache=jax.eval_shape(make_cache))


def _init_caches(module: Any, batch_size: int, length: int, dtype: Any) -> None:
    modules: list[tuple[Any, Any]] = list(nnx.iter_modules(module))
    for path, part in modules:
        if not callable(getattr(part, "init_cache", None)):
            continue
        own = getattr(part, "dtype", None) if dtype is None else dtype
        shape = (batch_size, length, getattr(part, "in_features", 1))
        try:
            part.init_cache(shape, **({} if own is None else {"dtype": own}))
        except ValueError as error:
            name = "/".join(map(str, path)) or type(part).__name__
            raise ModelError(
                f"{name}.init_cache refuses sequences of {length} tokens, the longest prompt with max_new_tokens: "
                f"{error}"
            ) from error


def _check_cache(module: Any, cache: Any) -> None:
    name, leaves = type(module).__name__, nnx.to_flat_state(cache)
    if not leaves:
        mixing = [
            "/".join(map(str, path)) + f" ({type(part).__name__})"
            for path, part in nnx.iter_modules(module)
            if path and "attention" in type(part).__name__.lower()
        ]
        where = f" Its attention: {listed(mixing, 3, str)}." if mixing else ""
        raise ModelError(
            f"the model {name} has no cache to generate with: no module in it has a method "
            f"`init_cache(input_shape, dtype=...)` that makes `nnx.Cache` variables.{where} Each module that looks at "
            "other positions needs one, as nnx.MultiHeadAttention has: keys and values for attention, and the next "
            "position for learned positions. See docs/guides/generation.md."
        )
    old = ["/".join(map(str, path)) for path, variable in leaves if is_abstract(variable)]
    if old:
        raise ModelError(
            f"the model {name} makes cache variables in its constructor ({listed(old, 3, str)}), which would belong to "
            "one batch and one length. Make them in a method `init_cache(input_shape, dtype=...)` of their module."
        )
