"""A model with an implicit cache, by Flax's own convention: variables that its modules make and write."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import jax
import jax.numpy as jnp
from flax import core, nnx

from jaxpp_flax.messages import listed
from jaxpp_flax.trainers.errors import ModelError
from jaxpp_flax.trainers.generation.decoding_form import DecodingForm
from jaxpp_flax.trainers.model.calling import call_model, inference_arguments
from jaxpp_flax.trainers.model.dense_general import checked_without_annotations
from jaxpp_flax.trainers.model.linen_model import STREAMS, LinenModel
from jaxpp_flax.trainers.model.nnx_model import NnxModel
from jaxpp_flax.trainers.model.sharding import unboxed
from jaxpp_flax.trainers.state.train_state import TrainState, is_abstract, shapes_of

__all__ = ["decode_linen", "decode_nnx"]


_NO_SWITCH = "none"  # of a module without an attribute `decode`


def decode_nnx(adapter: NnxModel, state: TrainState, length: int, dtype: Any = None) -> DecodingForm:
    """Bring an NNX model into decoding form.

    The module is in `eval()` mode, and the attribute `decode` is True wherever it was a boolean or None. Each module
    with a method `init_cache(input_shape, dtype=...)` makes its `nnx.Cache` variables there, for inputs of the shape
    (batch, length, features). `dtype` None leaves the dtype to the modules: that of their computation.

    Raises:
      ModelError: if no module makes a cache, or a module refuses this length.
    """
    state = shapes_of(state)

    def prepared(state: TrainState, rows: int) -> Any:
        module = adapter.rebuild(state.params, state.model_state)
        module.eval()
        _switch_to_decoding(module)
        _init_caches(module, (rows, length), dtype)
        return module

    def call(state: TrainState, cache: Any, tokens: Any, _: Any) -> tuple[Any, Any]:
        module = prepared(state, tokens.shape[0])
        nnx.update(module, cache)
        return call_model(module, tokens), nnx.state(module, nnx.Cache)

    jax.eval_shape(lambda: _check_cache(prepared(state, 1)))
    return DecodingForm(lambda rows: nnx.state(prepared(state, rows), nnx.Cache), call)


def _switch_to_decoding(module: Any) -> None:
    """Set the switch `decode` of each module that has one; a method, a module or a property of this name stays."""
    parts: list[tuple[Any, Any]] = list(nnx.iter_modules(module))
    for _, part in parts:
        is_property = isinstance(getattr(type(part), "decode", None), property)
        if not is_property and _is_switch(getattr(part, "decode", _NO_SWITCH)):
            part.decode = True


def _is_switch(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def _init_caches(module: Any, shape: tuple[int, int], dtype: Any) -> None:
    parts: list[tuple[Any, Any]] = list(nnx.iter_modules(module))
    for path, part in parts:
        if not callable(getattr(part, "init_cache", None)):
            continue
        own = getattr(part, "dtype", None) if dtype is None else dtype
        try:
            part.init_cache((*shape, getattr(part, "in_features", 1)), **({} if own is None else {"dtype": own}))
        except ValueError as error:
            name = "/".join(map(str, path)) or type(part).__name__
            raise ModelError(
                f"{name}.init_cache refuses sequences of {shape[1]} tokens, the longest prompt with max_new_tokens: "
                f"{error}"
            ) from error


def _check_cache(module: Any) -> None:
    name, leaves = type(module).__name__, nnx.to_flat_state(nnx.state(module, nnx.Cache))
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
    # The state is given by its shapes: only what `init_cache` makes has values.
    old = ["/".join(map(str, path)) for path, variable in leaves if is_abstract(variable)]
    if old:
        raise ModelError(
            f"the model {name} makes cache variables in its constructor ({listed(old, 3, str)}), which would belong to "
            "one batch and one length. Make them in a method `init_cache(input_shape, dtype=...)` of their module."
        )


def decode_linen(adapter: LinenModel, length: int, dtype: Any = None) -> DecodingForm:
    """Bring a Linen model into decoding form.

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
    elif "decode" in {field.name for field in dataclasses.fields(module)} and _is_switch(module.decode):  # type: ignore[attr-defined]
        module = module.clone(decode=True)  # type: ignore[call-arg]
    else:
        raise ModelError(
            f"the Linen model {name} has neither a field `decode` nor an argument `decode` of its `__call__` that is a "
            "boolean. Add one, hand it on to its attention (`nn.MultiHeadDotProductAttention(decode=...)`), and keep "
            "the position of learned positions in a variable of the collection 'cache'. See docs/guides/generation.md."
        )

    def make_cache(rows: int) -> Any:
        keys = {stream: jax.random.key(0) for stream in STREAMS}
        made = module.init(keys, jnp.zeros((rows, length), jnp.int32), **arguments)
        return unboxed(core.unfreeze(made.get("cache", {})))  # type: ignore[union-attr]

    def call(state: TrainState, cache: Any, tokens: Any, _: Any) -> tuple[Any, Any]:
        variables = {**adapter.variables_of(state.params, state.model_state), "cache": cache}
        with checked_without_annotations():
            logits, written = module.apply(variables, tokens, mutable=["cache"], **arguments)
        return logits, core.unfreeze(written["cache"])  # type: ignore[index]

    if not jax.tree.leaves(jax.eval_shape(lambda: make_cache(1))):
        raise ModelError(
            f"the Linen model {name} makes no collection 'cache' with decode=True. Its modules that look at other "
            "positions need one, as nn.MultiHeadDotProductAttention(decode=True) has. See docs/guides/generation.md."
        )
    return DecodingForm(make_cache, call)
