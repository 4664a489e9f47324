"""A model in decoding form: a function of the next tokens and of a cache of the earlier ones; and its checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax

from jaxpp_flax.engine.tracing.ir import from_jaxpr
from jaxpp_flax.trainers.errors import ModelError
from jaxpp_flax.trainers.model.frozen import path_text
from jaxpp_flax.trainers.state.train_state import TrainState

__all__ = ["DecodingForm", "batch_dimensions", "check_calls"]

MakeCache: TypeAlias = Callable[[int], Any]
"""Makes the cache of no tokens for a number of sequences; it reads no parameter."""
Decode: TypeAlias = Callable[[TrainState, Any, Any, Any], tuple[Any, Any]]
"""From `(state, cache, tokens, places)` to the logits (batch, tokens, vocabulary), and the cache with these tokens."""


@dataclass(frozen=True, eq=False)
class DecodingForm:
    """A model's two functions for generation. An explicit cache reads `places`; an implicit one counts its tokens."""

    make_cache: MakeCache
    call: Decode
    explicit: bool = False


def batch_dimensions(make_cache: MakeCache, rows: int) -> Any:
    """Return the dimension of each cache leaf that counts the sequences, None for a leaf that all share; as a list.

    Raises:
      ModelError: for a leaf without such a dimension, if it holds anything but integers.
    """
    cache, doubled = jax.eval_shape(lambda: (make_cache(rows), make_cache(2 * rows)))
    leaves, others = jax.tree_util.tree_leaves_with_path(cache), jax.tree.leaves(doubled)
    return [_batch_dimension(path_text(path), leaf, other) for (path, leaf), other in zip(leaves, others, strict=True)]


def _batch_dimension(name: str, leaf: Any, doubled: Any) -> int | None:
    # It is the dimension that differs in a cache of twice as many sequences.
    sizes = enumerate(zip(leaf.shape, doubled.shape, strict=True))
    dimension = next((dimension for dimension, (one, two) in sizes if one != two), None)
    if dimension is None and not jax.numpy.issubdtype(leaf.dtype, jax.numpy.integer):
        raise ModelError(
            f"the cache leaf {name}, {_type_text(leaf)}, has no dimension for the sequences, so all would share its "
            "values. Make it with the batch size as a dimension; only integers, such as a counter, may be shared."
        )
    return dimension


def check_calls(form: DecodingForm, state: TrainState, cache: Any, tokens: jax.ShapeDtypeStruct, places: Any) -> int:
    """Trace the model alone for such tokens, and return the size of its vocabulary; nothing is computed.

    All but `form` are shapes, with the types that a stage sees.

    Raises:
      ModelError: if the model does not take so many tokens in one call, returns no logits, or does not write its
        cache, or gives it another type.
    """
    leaves, tree = jax.tree.flatten(cache)

    def call(leaves: Any, state: TrainState, tokens: Any, places: Any) -> Any:
        logits, after = form.call(state, jax.tree.unflatten(tree, leaves), tokens, places)
        return jax.tree.leaves(after), logits, jax.tree.structure(after)

    trees: list[Any] = []

    def without_tree(*of: Any) -> Any:
        *values, after = call(*of)
        trees[:] = [after]
        return values

    try:
        jaxpr, (after, logits) = jax.make_jaxpr(without_tree, return_shape=True)(leaves, state, tokens, places)
    except (ValueError, TypeError) as error:
        raise _refused(form, tokens, error) from error
    wanted = (*tokens.shape, "vocabulary")
    if getattr(logits, "ndim", None) != 3 or logits.shape[:2] != tokens.shape:
        raise ModelError(f"the model returns {_type_text(logits)} in decoding; generate needs logits {wanted}.")
    if form.explicit and trees[0] != tree:
        raise ModelError(
            f"ExplicitCache.apply takes the cache {tree} and returns {trees[0]}. Return a cache of the same structure."
        )
    names = [path_text(path) for path, _ in jax.tree_util.tree_leaves_with_path(cache)]
    graph, consts = from_jaxpr(jaxpr)
    before = graph.inputs[len(consts) :]
    kept: list[str] = []
    for name, old, new, value, result in zip(names, leaves, after, before, graph.outputs, strict=False):
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            remedy = "" if form.explicit else ", or pass cache_dtype="
            raise ModelError(
                f"the cache variable {name} is {_type_text(old)} before a call and {_type_text(new)} after it. "
                f"Make it with the type of what is written{remedy}."
            )
        if value is result:
            kept.append(name)
    # An explicit cache may hold what only its first call would fill, or constants.
    if kept and (not form.explicit or len(kept) == len(leaves)):
        remedy = "Its module must use the cache if its attribute `decode` is True"
        remedy = "ExplicitCache.apply must return the new cache" if form.explicit else remedy
        raise ModelError(
            f"the model does not write its cache variable {kept[0]} when it decodes, so it would forget earlier "
            f"tokens. {remedy}."
        )
    return logits.shape[-1]


def _refused(form: DecodingForm, tokens: jax.ShapeDtypeStruct, error: Exception) -> ModelError:
    if form.explicit:
        rows, count = tokens.shape
        return ModelError(
            f"ExplicitCache.apply fails for tokens ({rows}, {count}): {error} If it takes fewer tokens in one call, "
            "say so by ExplicitCache(tokens_per_call=)."
        )
    if tokens.shape[1] == 1:
        return ModelError(
            f"the model fails for the next token with its cache: {error} If it is the dtype of the cache that "
            "differs, pass cache_dtype=, the dtype of the model's computation."
        )
    return ModelError(
        f"prefill asks the model for {tokens.shape[1]} tokens in one call, which it refuses: {error} "
        "Attention such as nnx.MultiHeadAttention takes one token with a cache: use prefill=1."
    )


def _type_text(value: Any) -> str:
    if not hasattr(value, "shape"):
        return f"a {type(value).__name__}"
    return f"{value.dtype}{list(value.shape)}"
