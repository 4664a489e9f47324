"""The interface between the trainer and a model, for both Flax interfaces: NNX and Linen."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np


class ModelAdapter(Protocol):
    """A model as pure functions over two trees: the trained parameters, and the rest of its state.

    The adapter holds no arrays, so that the user's arrays can be freed.
    """

    @property
    def compute(self) -> Any:
        """The type in which the model computes; None: its own types."""
        ...

    def computing_in(self, compute: Any) -> ModelAdapter:
        """Return the adapter of the same model that computes in this type; None: in its own types."""
        ...

    def narrowed(self, params: Any, rest: Any) -> tuple[Any, Any]:
        """Return both with all parameters, frozen ones too, in the type of the computation."""
        ...

    def bind(self, params: Any, rest: Any, *, step: Any, microbatch: Any, training: bool) -> Any:
        """Return the model for a loss function; its random numbers depend only on step and microbatch."""
        ...

    def rngs(self, rest: Any, *, step: Any, microbatch: Any) -> Any:
        """Return random numbers for a function with `rngs`, in the form of the `rngs=` of NNX or Linen."""
        ...

    def batch_statistics(self, rest: Any) -> list[bool]:
        """Return, for each leaf of `rest`, True if it is a running statistic of the batch, as in BatchNorm."""
        ...

    def frozen_in(self, rest: Any) -> Collection[str]:
        """Return the paths in `rest` of parameters that are not trained."""
        ...

    def frozen_parameters(self, rest: Any) -> list[bool]:
        """Return, for each leaf of `rest`, True if it is a parameter that is not trained."""
        ...

    def overwritten_by_gradients(self, rest: Any) -> list[bool]:
        """Return, for each leaf of `rest`, True if its gradient is its next value, as for the scales of Flax's fp8."""
        ...

    def params_of(self, bound: Any, before: Any) -> Any:
        """Return the trained parameters after the call of `bound`: same structure as `before`."""
        ...

    def rest_of(self, bound: Any, before: Any) -> Any:
        """Return the rest after the call of `bound`: same structure and same random keys as `before`."""
        ...

    def rebuild(self, params: Any, rest: Any) -> Any:
        """Make an ordinary model for the user."""
        ...


def fold(key: jax.Array, *numbers: Any) -> jax.Array:
    """Fold numbers into `key`; an array of keys is folded key by key."""
    folded = jax.random.fold_in
    for _ in range(key.ndim):
        folded = jax.vmap(folded, in_axes=(0, None))
    for number in numbers:
        key = folded(key, number)
    return key


def numbers_as_arrays(tree: Any) -> Any:
    """Return the tree with an array for each Python number: it goes to devices and into checkpoints as others do.

    The arrays are float32 or int32 (float64 or int64 with `jax_enable_x64`), in every trace and after a restore alike.

    Example:
      >>> numbers_as_arrays({"depth": 3, "scale": 0.5})
      {'depth': Array(3, dtype=int32), 'scale': Array(0.5, dtype=float32)}
    """

    def one(leaf: Any) -> Any:
        return jnp.asarray(np.asarray(leaf)) if isinstance(leaf, (int, float, complex)) else leaf

    return jax.tree.map(one, tree)
