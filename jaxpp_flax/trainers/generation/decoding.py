"""A model in decoding form: a function of the next tokens and a cache of the earlier ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["DecodingModel"]


@dataclass(frozen=True, kw_only=True, eq=False)
class DecodingModel:
    """A model that continues sequences. `decode_nnx` and `decode_linen` make it.

    Args:
      call: returns the logits of tokens (batch, tokens, vocabulary), and the cache with these tokens added, from
        `(parameters, rest of the state, cache, tokens)`.
      make_cache: makes the cache of no tokens; it reads no parameter.
      cache: the shapes of that cache.

    Example:
      >>> import jax
      >>> DecodingModel(call=print, make_cache=dict, cache={"key": jax.ShapeDtypeStruct((2, 8, 1, 4), "float32")}).cache
      {'key': ShapeDtypeStruct(shape=(2, 8, 1, 4), dtype=float32)}
    """

    call: Callable[[Any, Any, Any, Any], tuple[Any, Any]]
    make_cache: Callable[[], Any]
    cache: Any
