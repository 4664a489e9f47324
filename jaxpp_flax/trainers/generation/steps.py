"""The step of a generation: one call of the model for one group of sequences, and the choice of the next token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp_flax.engine.tracing.hints import place_with
from jaxpp_flax.engine.tracing.ir import from_jaxpr
from jaxpp_flax.engine.tracing.treduce import Last, treduce_i
from jaxpp_flax.schedules import Schedule
from jaxpp_flax.trainers.errors import ModelError
from jaxpp_flax.trainers.generation.decoding import DecodingModel
from jaxpp_flax.trainers.generation.prompts import Group
from jaxpp_flax.trainers.generation.sampling import Sampling
from jaxpp_flax.trainers.model.frozen import path_text
from jaxpp_flax.trainers.state.train_state import TrainState, shapes_of

__all__ = ["DecodingStep", "first_progress", "fixed_values"]

_PAD = 0  # in place of tokens after the end of a sequence; such tokens are never returned


@dataclass(frozen=True, kw_only=True, eq=False)
class DecodingStep:
    """A pure function of `(state, carried, tokens, fixed)`, which also runs under plain `jax.jit`.

    Args of the function:
      state: a `TrainState`; its parameters and the rest of the model are read.
      carried: the pair of the cache, on the devices of its stages, and the progress, on those of the last stage.
      tokens: (batch, tokens) int32, read by the first stage.
      fixed: the result of `fixed_values`, read by the last stage.

    The function returns the new `carried`; the next tokens (batch, 1), on the devices that read `tokens`; and a scalar:
    whether all sequences of the group have ended.

    Args:
      model: the model in decoding form.
      sampling: chooses the next token.
      schedule: of the stages, forward only; None for one stage.
    """

    model: DecodingModel
    sampling: Sampling
    schedule: Schedule | None

    def __call__(self, state: TrainState, carried: Any, tokens: Any, fixed: Any) -> tuple[Any, Any, Any]:
        def body(carried: Any, _: Any) -> Any:
            cache, progress = carried
            logits, cache = self.model.call(state.params, state.model_state, cache, tokens)
            progress, chosen = self._advance(progress, fixed, logits[:, -1], tokens.shape[1])
            return (cache, progress), (chosen[:, None], progress["ended"].all())

        carried, (chosen, ended) = treduce_i(body, 1, self.schedule, Last, init=carried)
        return carried, place_with(chosen, tokens), ended

    @property
    def key(self) -> tuple[Any, ...]:
        """What is compiled into the step beside the types of its arguments."""
        return self.sampling.compiled

    def _advance(self, progress: Any, fixed: Any, logits: Any, taken: int) -> tuple[Any, Any]:
        """Add one token to each sequence: that of its prompt, or the one that is chosen."""
        position = progress["position"] + taken
        ended, known = progress["ended"], progress["tokens"]
        new = self.sampling.choose(logits, fixed["sampling"], fixed["sequences"], position)
        in_prompt = position < fixed["lengths"]
        of_prompt = jax.lax.dynamic_index_in_dim(known, position, axis=1, keepdims=False)
        chosen = jnp.where(in_prompt, of_prompt, jnp.where(ended, _PAD, new))
        is_end = position + 1 >= fixed["limits"]
        for token in self.sampling.end_tokens:
            is_end |= ~in_prompt & (chosen == token)
        known = jax.lax.dynamic_update_index_in_dim(known, chosen, position, axis=1)
        return {"tokens": known, "ended": ended | is_end, "position": position}, chosen

    def check(self, state: TrainState, cache: Any, tokens: Any) -> int:
        """Trace the model alone, and return the size of its vocabulary; nothing is computed.

        Raises:
          ModelError: if the model does not take so many tokens in one call, returns no logits, or does not write its
            cache, or gives it another type.
        """
        leaves, tree = jax.tree.flatten(shapes_of(cache))

        def call(leaves: Any, state: TrainState, tokens: Any) -> Any:
            logits, after = self.model.call(state.params, state.model_state, jax.tree.unflatten(tree, leaves), tokens)
            return jax.tree.leaves(after), logits

        try:
            jaxpr, (after, logits) = jax.make_jaxpr(call, return_shape=True)(leaves, shapes_of(state), tokens)
        except (ValueError, TypeError) as error:
            if tokens.shape[1] == 1:
                raise ModelError(
                    f"the model fails for the next token with its cache: {error} If it is the dtype of the cache that "
                    "differs, pass cache_dtype=, the dtype of the model's computation."
                ) from error
            raise ModelError(
                f"prefill asks the model for {tokens.shape[1]} tokens in one call, which it refuses: {error} "
                "Attention such as nnx.MultiHeadAttention takes one token with a cache: use prefill=1."
            ) from error
        wanted = (*tokens.shape, "vocabulary")
        if getattr(logits, "ndim", None) != 3 or logits.shape[:2] != tokens.shape:
            raise ModelError(f"the model returns {_type_text(logits)} in decoding; generate needs logits {wanted}.")
        names = [path_text(path) for path, _ in jax.tree_util.tree_leaves_with_path(cache)]
        graph, consts = from_jaxpr(jaxpr)
        before = graph.inputs[len(consts) :]
        for name, old, new, value, result in zip(names, leaves, after, before, graph.outputs, strict=False):
            if (old.shape, old.dtype) != (new.shape, new.dtype):
                raise ModelError(
                    f"the cache variable {name} is {_type_text(old)} before a call and {_type_text(new)} after it. "
                    "Make it with the type of what is written, or pass cache_dtype=."
                )
            if value is result:
                raise ModelError(
                    f"the model does not write its cache variable {name} when it decodes, so it would forget earlier "
                    "tokens. Its module must use the cache if its attribute `decode` is True."
                )
        return logits.shape[-1]


def _type_text(value: Any) -> str:
    if not hasattr(value, "shape"):
        return f"a {type(value).__name__}"
    return f"{value.dtype}{list(value.shape)}"


def first_progress(group: Group) -> dict[str, Any]:
    """Return the progress of a group before its first call, of NumPy arrays."""
    return {"tokens": group.tokens, "ended": group.sequences < 0, "position": np.int32(0)}


def fixed_values(group: Group, sampling: Sampling) -> dict[str, Any]:
    """Return what a group's steps read and do not change, of NumPy arrays."""
    return {
        "lengths": group.lengths,
        "limits": group.limits,
        "sequences": group.sequences,
        "sampling": sampling.numbers(),
    }
