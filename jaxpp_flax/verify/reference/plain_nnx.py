"""An NNX model without the trainer: merged from its variables, called, and read again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from jaxpp_flax.verify.reference.keys import keys_of
from jaxpp_flax.verify.reference.narrow_types import narrow, wide

__all__ = ["PlainNnx"]


@dataclass(frozen=True, kw_only=True)
class PlainNnx:
    """An NNX model as its graph; `params` and `rest` are its two `nnx.State`s.

    Args:
      graphdef: of the user's module.
      seed: of the `rngs` of a loss function.
      compute: the type in which the model computes; None: its own types.
    """

    graphdef: Any
    seed: int
    compute: Any

    def computed(self, params: Any, rest: Any) -> tuple[Any, Any]:
        """Return both with all parameters in the type of the computation."""
        return narrow(params, self.compute), jax.tree.map(
            lambda of: narrow(of, self.compute) if isinstance(of, nnx.Param) else of, rest, is_leaf=_is_variable
        )

    def bind(self, params: Any, rest: Any, *, step: Any, microbatch: Any) -> nnx.Module:
        """Return a module of its own; each stream of random numbers begins with the key of a step and microbatch."""

        def one(variable: Any) -> Any:
            is_key = isinstance(variable, nnx.RngKey)
            return variable.replace(keys_of(variable.get_value(), step, microbatch)) if is_key else variable

        keyed = jax.tree.map(one, rest, is_leaf=_is_variable)
        module = nnx.merge(self.graphdef, params, keyed, copy=True)
        return module if self.compute is None else _computing_in(module, self.compute)

    def rngs(self, rest: Any, *, step: Any, microbatch: Any) -> nnx.Rngs:
        """Return the `rngs` of a loss function."""
        del rest
        return nnx.Rngs(keys_of(jax.random.fold_in(jax.random.key(self.seed), 1), step, microbatch))

    def written(self, module: nnx.Module, params: Any, rest: Any) -> tuple[Any, Any]:
        """Return both as they are in a module after its call; streams of random numbers stay as they were."""
        after = dict(nnx.to_flat_state(nnx.state(module)))

        def read(before: Any) -> Any:
            pairs = [
                (path, old if isinstance(old, nnx.RngState) else after.get(path, old)) for path, old in _flat(before)
            ]
            return nnx.from_flat_state(pairs)

        return read(params), read(rest)

    def next_by_gradient(self, rest: Any) -> list[bool]:
        """Return for each leaf whether its "gradient" is its next value, as for the scales of Flax's fp8."""
        return [_is_next_by_gradient(variable) for _, variable in _flat(rest) for _ in jax.tree.leaves(variable)]

    def are_parameters(self, rest: Any) -> list[bool]:
        """Return for each leaf whether it is a parameter that is not trained."""
        return [isinstance(variable, nnx.Param) for _, variable in _flat(rest) for _ in jax.tree.leaves(variable)]

    def after_update(self, hook: Any, params: Any, rest: Any, metrics: Any) -> tuple[Any, Any]:
        """Return both after a function of the module and the metrics has changed the module."""
        module = nnx.merge(self.graphdef, params, rest, copy=True)
        hook(module, metrics)
        return self.written(module, params, rest)


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def _flat(state: Any) -> Iterator[tuple[Any, Any]]:
    yield from nnx.to_flat_state(state)


def _is_next_by_gradient(variable: Any) -> bool:
    try:
        return nnx.variable_name_from_type(type(variable)) == OVERWRITE_WITH_GRADIENT
    except ValueError:  # a type without a name in Linen
        return False


def _computing_in(module: nnx.Module, compute: Any) -> nnx.Module:
    """Let the module take its inputs in a narrower type, and return float32."""
    for _, part in nnx.iter_modules(module):
        if isinstance(part, nnx.Embed) and part.dtype == part.param_dtype:
            part.dtype = None  # it would widen what it looks up: no type was asked for
    kind: Any = type(module)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = narrow((args, kwargs), compute)
        return wide(kind.__call__(self, *args, **kwargs))

    if callable(module):
        module.__class__ = type(kind)(kind.__name__, (kind,), {"__call__": call})
    return module
