"""Named computations for Flax: module classes with named calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from flax import linen as nn
from flax import nnx

from jaxpp_flax.mpmd.ops import check_name, name_scope

__all__ = ["named_computation"]

M = TypeVar("M")


def named_computation(
    module_class: type[M], *, name: str, transpose_count: int = 0, static_argnames: str | Sequence[str] = ()
) -> type[M]:
    """Make a class whose `__call__` is a named computation of this name; see `mpmd.named_computation`.

    Args:
      module_class: a class of Linen or NNX modules. The name does not change the paths of parameters.
      name: the name in assignments.
      transpose_count: as in `mpmd.named_computation`.
      static_argnames: keyword arguments of `__call__` that are not arrays, such as `deterministic`.

    Raises:
      TypeError: if `module_class` is not a class of Flax modules.
      ValueError: if the name is reserved.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import linen as nn
      >>> from jaxpp_flax import mpmd
      >>> class MLP(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x):
      ...         for i in range(2):
      ...             x = mpmd.flax.named_computation(nn.Dense, name=f"layer_{i}")(4)(x)
      ...         return x
      >>> sorted(MLP().init(jax.random.key(0), jnp.ones((1, 4)))["params"])
      ['Dense_0', 'Dense_1']
    """
    check_name(name)
    if not isinstance(module_class, type) or not issubclass(module_class, (nn.Module, nnx.Module)):
        raise TypeError(
            f"mpmd.flax.named_computation takes a class of Flax modules, got {module_class!r}. Wrap a function, or a "
            "module's call, with `mpmd.named_computation`."
        )
    names = (static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames)
    if issubclass(module_class, nnx.Module):
        return _named_class(module_class, nnx.jit(_call_of(module_class), static_argnames=names), name, transpose_count)
    lifted: Any = nn.jit(module_class, static_argnames=names)
    return _named_class(lifted, lifted.__call__, name, transpose_count, module_class)


def _call_of(module_class: Any) -> Any:
    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        return module_class.__call__(module, *args, **kwargs)

    return call


def _named_class(base: Any, call: Any, name: str, transpose_count: int, like: Any = None) -> Any:
    """Make a subclass of the same name: Linen names submodules, and so parameters, after their class."""

    def named(self: Any, *args: Any, **kwargs: Any) -> Any:
        with name_scope("computation", name, transpose_count):
            return call(self, *args, **kwargs)

    like = base if like is None else like
    body = {
        "__call__": named,
        "__module__": like.__module__,
        "__qualname__": like.__qualname__,
        "__doc__": like.__doc__,
    }
    return type(base)(like.__name__, (base,), body)
