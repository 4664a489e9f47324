"""A model with an explicit cache: two functions of the user, one that makes a cache and one that decodes with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpp_flax.counts import check_count
from jaxpp_flax.trainers.errors import ModelError
from jaxpp_flax.trainers.generation.decoding_form import DecodingForm
from jaxpp_flax.trainers.model.dense_general import checked_without_annotations
from jaxpp_flax.trainers.model.linen_model import LinenCall, LinenModel
from jaxpp_flax.trainers.model.nnx_model import NnxModel
from jaxpp_flax.trainers.state.train_state import TrainState, shapes_of

__all__ = ["ExplicitCache", "NextTokens", "decode_explicitly"]


@partial(jax.tree_util.register_dataclass, data_fields=["tokens", "padding", "slot"], meta_fields=["length"])
@dataclass(frozen=True)
class NextTokens:
    """The tokens of one call of `ExplicitCache.apply`, and their places.

    A cache has `length` slots, and a call writes the next n of them, the same in all sequences. Prompts end in one
    slot: a shorter one begins later, behind padding. `generate` owns slots and positions, so a cache needs no counter;
    one that has its own counts slots.

    Args:
      tokens: int32 (batch, n).
      padding: int32 (batch,): the slots of each sequence before its first token.
      slot: int32 scalar: the slot of the first of these tokens.
      length: the number of slots of the cache.

    Example:
      >>> tokens = jnp.asarray([[5, 6, 7], [0, 0, 8]])
      >>> inputs = NextTokens(tokens, padding=jnp.asarray([0, 2]), slot=jnp.int32(0), length=4)
      >>> inputs.positions.tolist()
      [[0, 1, 2], [0, 0, 0]]
      >>> inputs.is_token.tolist()
      [[True, True, True], [False, False, True]]
      >>> inputs.mask[1].astype(int).tolist()  # padding sees itself, so that no softmax is empty
      [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]]
    """

    tokens: Any
    padding: Any
    slot: Any
    length: int

    @property
    def slots(self) -> jax.Array:
        """The slot of each token, int32 (n,)."""
        return self.slot + jnp.arange(self.tokens.shape[1], dtype=jnp.int32)

    @property
    def positions(self) -> jax.Array:
        """The position of each token in its own sequence, int32 (batch, n); 0 for padding."""
        return jnp.maximum(self.slots - self.padding[:, None], 0)

    @property
    def is_token(self) -> jax.Array:
        """False for padding, bool (batch, n). A recurrent model must keep its state there."""
        return self.slots >= self.padding[:, None]

    @property
    def mask(self) -> jax.Array:
        """True where a token may attend to a slot of the cache, bool (batch, n, length): to itself and before."""
        slots, all_slots = self.slots[:, None], jnp.arange(self.length)
        own = (all_slots <= slots) & (all_slots >= self.padding[:, None, None])
        return own | (all_slots == slots)


@dataclass(frozen=True, kw_only=True)
class ExplicitCache:
    """How `trainer.generate` uses a model whose cache is an argument and a result of its call.

    The model is the trainer's, in `eval()` mode: an NNX module, or the `model` that a Linen loss gets, with `module`
    and `variables`. Make one `ExplicitCache` and keep it: each new one is compiled anew.

    Args:
      init_cache: `(model, batch_size, length) -> cache`, a pytree of arrays for sequences of at most `length` slots.
        The model's arrays are shapes there. Each leaf has a dimension `batch_size`, or holds integers that are the same
        for all sequences, such as a counter of slots. It raises a `ValueError` for a length that it cannot take.
      apply: `(model, inputs, cache) -> (logits, cache)`, with `NextTokens`, logits (batch, n, vocabulary) and a cache
        of the same types. The logits of padding are ignored.
      tokens_per_call: the most tokens that `apply` takes in one call; None takes any number.
      takes_padding: False for an `apply` that ignores `padding`: then prompts of different lengths are prefilled up to
        the end of the shortest one, and go on token by token. With `tokens_per_call=1` there is no padding.

    Example:
      >>> def init_cache(model, batch_size, length):  # a model that sums all of its tokens
      ...     return jnp.zeros(batch_size)
      >>> def apply(model, inputs, cache):
      ...     sums = cache[:, None] + jnp.cumsum(inputs.tokens * inputs.is_token, axis=1)
      ...     return model(sums), sums[:, -1]
      >>> ExplicitCache(init_cache=init_cache, apply=apply).tokens_per_call is None
      True
    """

    init_cache: Callable[[Any, int, int], Any]
    apply: Callable[[Any, NextTokens, Any], tuple[Any, Any]]
    tokens_per_call: int | None = None
    takes_padding: bool = True

    @property
    def pads(self) -> bool:
        """True if shorter prompts begin behind padding."""
        return self.takes_padding and self.tokens_per_call != 1

    def __post_init__(self) -> None:
        for name, value in (("init_cache", self.init_cache), ("apply", self.apply)):
            if not callable(value):
                raise TypeError(f"ExplicitCache({name}={value!r}): it must be a function.")
        if self.tokens_per_call is not None:
            check_count("tokens_per_call", self.tokens_per_call)


def decode_explicitly(
    adapter: NnxModel | LinenModel, state: TrainState, cache: ExplicitCache, length: int
) -> DecodingForm:
    """Bring a model with an explicit cache into decoding form.

    Raises:
      ModelError: if `init_cache` refuses this length, or makes no cache.
    """
    state = shapes_of(state)

    def make_cache(rows: int) -> Any:
        try:
            return cache.init_cache(_model(adapter, state), rows, length)
        except ValueError as error:
            raise ModelError(
                f"ExplicitCache.init_cache refuses sequences of {length} tokens, the longest prompt with its padding "
                f"and max_new_tokens: {error}"
            ) from error

    def call(state: TrainState, values: Any, tokens: Any, places: Any) -> tuple[Any, Any]:
        inputs = NextTokens(tokens, places["padding"], places["slot"], length)
        with checked_without_annotations():
            result = cache.apply(_model(adapter, state), inputs, values)
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(f"apply returned a {type(result).__name__}: it must return (logits, cache).")
        return result

    if not jax.tree.leaves(jax.eval_shape(lambda: make_cache(1))):
        raise ModelError("ExplicitCache.init_cache returns no array: the model would forget earlier tokens.")
    return DecodingForm(make_cache, call, explicit=True)


def _model(adapter: NnxModel | LinenModel, state: TrainState) -> nnx.Module | LinenCall:
    if isinstance(adapter, LinenModel):
        variables = adapter.variables_of(state.params, state.model_state)
        return LinenCall(adapter.module, variables, rngs={}, training=False)
    module = adapter.rebuild(state.params, state.model_state)
    module.eval()
    return module
