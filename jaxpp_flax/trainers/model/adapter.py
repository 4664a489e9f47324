"""What the trainer needs of a model, whichever of Flax's two interfaces it was written in."""

from __future__ import annotations

from typing import Any, Protocol

import jax

__all__ = ["ModelAdapter", "fold", "parameter_count"]


class ModelAdapter(Protocol):
    """A model as pure functions over two trees: the trained parameters, and the rest of its state.

    It holds no arrays, so that those which the user built can be freed.
    """

    def bind(self, params: Any, rest: Any, *, step: Any, microbatch: Any, training: bool) -> Any:
        """The model as a loss function sees it; its random numbers depend on step and microbatch alone."""
        ...

    def rngs(self, rest: Any, *, step: Any, microbatch: Any) -> Any:
        """Random numbers for a function that asks for `rngs`, in the form of the interface's own argument `rngs=`."""
        ...

    def batch_statistics(self, rest: Any) -> list[bool]:
        """For each leaf of `rest`, whether it is a running statistic of the batch, as BatchNorm keeps them."""
        ...

    def rest_of(self, bound: Any, before: Any) -> Any:
        """The rest after `bound` was called: same structure as `before`; random keys are those of `before`."""
        ...

    def rebuild(self, params: Any, rest: Any) -> Any:
        """An ordinary model for the user."""
        ...


def fold(key: jax.Array, *numbers: Any) -> jax.Array:
    """`key` with numbers folded in; an array of keys is folded key by key."""
    folded = jax.random.fold_in
    for _ in range(key.ndim):
        folded = jax.vmap(folded, in_axes=(0, None))
    for number in numbers:
        key = folded(key, number)
    return key


def parameter_count(params: Any) -> int:
    """Number of trained values."""
    return sum(int(leaf.size) for leaf in jax.tree.leaves(params))
