"""The interface between the trainer and a model, for both Flax interfaces: NNX and Linen."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

M = TypeVar("M", bound=nnx.Module)

PERTURBATIONS = "perturbations"
"""The collection of Linen's `perturb`: zeros of the shape of one batch, which a call without them does not need."""


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


# Values that a model sows or perturbs: they belong to one call, and are no state of a training.


def without_sown_variables(module: M) -> M:
    """Return an NNX module without the values of `nnx.Intermediate` and `nnx.Perturbation`; `module` does not change.

    They have the shapes of the batch of an earlier call, and each call makes them again. Tuples stay, without their
    values: so one sees whether a loss removes them.
    """
    graphdef, state = nnx.split(module)
    variables = nnx.to_flat_state(state)
    if not any(isinstance(of, nnx.Intermediate) for _, of in variables):
        return module

    def emptied(of: Any) -> Any:
        return of.replace(()) if isinstance(of, nnx.Intermediate) and isinstance(of.get_value(), tuple) else of

    other = nnx.merge(graphdef, nnx.from_flat_state([(path, emptied(of)) for path, of in variables]))
    nnx.pop(other, lambda _, of: isinstance(of, nnx.Intermediate) and not isinstance(of.get_value(), tuple))
    return other


def has_grown(before: Any, after: Any) -> bool:
    """Return True if a call has sown into a tuple of values: it appends to it.

    Example:
      >>> has_grown((1,), (1, 2)), has_grown((1, 2), (3, 4))
      (True, False)
    """
    return isinstance(before, tuple) and isinstance(after, tuple) and len(after) > len(before)


def without_sown(before: Any, after: Any) -> Any:
    """Return a collection of Linen after a call, without what the call has sown.

    Example:
      >>> without_sown({"balance": (1,), "mean": 1}, {"balance": (1, 2), "mean": 2, "others": {"balance": (3,)}})
      {'balance': (1,), 'mean': 2}
    """
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        kept = {name: value for name, value in after.items() if name in before or not _is_sown(value)}
        return {name: without_sown(before.get(name), value) for name, value in kept.items()}
    return before if has_grown(before, after) else after


def _is_sown(value: Any) -> bool:
    """Return True for a tuple, or a tree of them."""
    return all(map(_is_sown, value.values())) if isinstance(value, Mapping) else isinstance(value, tuple)
