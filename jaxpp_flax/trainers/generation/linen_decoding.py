"""Linen models in decoding form: the collection `cache` has what modules keep of earlier tokens."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import jax
import jax.numpy as jnp
from flax import core

from jaxpp_flax.trainers.errors import ModelError
from jaxpp_flax.trainers.generation.decoding import DecodingModel
from jaxpp_flax.trainers.model.calling import inference_arguments
from jaxpp_flax.trainers.model.dense_general import checked_without_annotations
from jaxpp_flax.trainers.model.linen_model import STREAMS, LinenModel
from jaxpp_flax.trainers.model.sharding import unboxed

__all__ = ["decode_linen"]


def decode_linen(adapter: LinenModel, *, batch_size: int, length: int, dtype: Any = None) -> DecodingModel:
    """Bring a Linen model into decoding form, by Flax's own convention.

    The module's field `decode` becomes True, or its `__call__` gets `decode=True`. Its `init` with tokens
    (batch, length) makes the collection `cache`, which each call writes.

    Raises:
      ModelError: if the module has no `decode`, or makes no cache.
      ValueError: if a dtype is given: Linen modules choose that of their caches.
    """
    module, name = adapter.module, type(adapter.module).__name__
    if dtype is not None:
        raise ValueError(f"cache_dtype={dtype!r}: the Linen module {name} makes its cache in its own dtype.")
    arguments: dict[str, Any] = {**inference_arguments(module)}
    if "decode" in inspect.signature(type(module).__call__).parameters:
        arguments["decode"] = True
    elif "decode" in {field.name for field in dataclasses.fields(module)}:
        module = module.clone(decode=True)  # type: ignore[call-arg]
    else:
        raise ModelError(
            f"the Linen model {name} has neither a field `decode` nor an argument `decode` of its `__call__`. Add one, "
            "hand it on to its attention (`nn.MultiHeadDotProductAttention(decode=...)`), and keep the next position "
            "of learned positions in a variable of the collection 'cache'. See docs/guides/generation.md."
        )

    def make_cache() -> Any:
        keys = {stream: jax.random.key(0) for stream in STREAMS}
        made = module.init(keys, jnp.zeros((batch_size, length), jnp.int32), **arguments)
        return unboxed(core.unfreeze(made.get("cache", {})))  # type: ignore[union-attr]

    def call(params: Any, rest: Any, cache: Any, tokens: Any) -> tuple[Any, Any]:
        variables = {**adapter.variables_of(params, rest), "cache": cache}
        with checked_without_annotations():
            logits, written = module.apply(variables, tokens, mutable=["cache"], **arguments)
        return logits, core.unfreeze(written["cache"])  # type: ignore[index]

    cache = jax.eval_shape(make_cache)
    if not jax.tree.leaves(cache):
        raise ModelError(
            f"the Linen model {name} makes no collection 'cache' with decode=True. Its modules that look at other "
            "positions need one, as nn.MultiHeadDotProductAttention(decode=True) has. See docs/guides/generation.md."
        )
    return DecodingModel(call=call, make_cache=make_cache, cache=cache)
