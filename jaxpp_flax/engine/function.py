"""A function that is traced, placed on ranks and compiled once for each signature: what the fronts have in common."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar, cast

import jax

from jaxpp_flax.engine.arrays.ambient_mesh import context_mesh, trace_settings
from jaxpp_flax.engine.placed import Placed
from jaxpp_flax.engine.runtime.debug_switches import looking_away
from jaxpp_flax.engine.signature import not_an_array, type_of, without_statics

__all__ = ["FunctionOnRanks", "Types", "structs_of", "trace"]

P = TypeVar("P", bound=Placed[Any])
Types: TypeAlias = tuple[tuple[tuple[int, ...], Any, bool], ...]  # of each leaf: its shape, dtype, and weak type


class FunctionOnRanks(ABC, Generic[P]):
    """Keeps what is placed and compiled: by the tree of a call, the types and shardings of its leaves, and settings.

    A front says how arguments get their ranks (`_layouts`), and makes the program for them (`_place`).
    """

    _instead_of_arrays: ClassVar[str] = "close over it"  # what a caller does with an argument that is no array

    def __init__(self, fun: Callable[..., Any]) -> None:
        functools.update_wrapper(cast(Any, self), fun)
        self._placed: dict[Hashable, P] = {}

    @abstractmethod
    def _layouts(self, tree: Any, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Return where the leaves of a call shall lie: hashable, and one for each leaf."""

    @abstractmethod
    def _place(self, tree: Any, types: Types, layouts: tuple[Any, ...]) -> P:
        """Trace the function for arguments of these types and layouts, and place its work on ranks."""

    def _find(self, leaves: Sequence[Any], tree: Any) -> P:
        """Return the program for such arguments. Calls whose arguments end up in the same layouts share one."""
        types, settings = self._types(leaves, tree), trace_settings()
        key = tree, types, tuple([getattr(leaf, "sharding", None) for leaf in leaves]), settings
        found = self._placed.get(key)
        if found is None:
            layouts = self._layouts(tree, leaves)
            asked = tree, types, layouts, settings
            if asked not in self._placed:
                with context_mesh(None):  # no mesh around the call may change what is compiled
                    self._placed[asked] = self._place(tree, types, layouts)
            found = self._placed[key] = self._placed[asked]
        return found

    def _types(self, leaves: Sequence[Any], tree: Any) -> Types:
        try:
            return tuple(map(type_of, leaves))
        except TypeError as error:
            raise not_an_array(without_statics(tree), leaves, self._instead_of_arrays) from error


def trace(jitted: Any, args: Iterable[Any], kwargs: Mapping[str, Any] | None = None) -> tuple[Any, tuple[bool, ...]]:
    """Trace a function under `jax.jit`; return the trace, and for each leaf of the arguments whether it is donated."""
    # With `jax.debug_nans`, `jax.jit` forgets what is donated; here the switch may change between two calls.
    with looking_away():
        traced = jitted.trace(*args, **(kwargs or {}))
    return traced, tuple(argument.donated for argument in jax.tree.leaves(traced.args_info))


def structs_of(types: Types) -> list[jax.ShapeDtypeStruct]:
    """Return the types of arguments as JAX has them."""
    return [jax.ShapeDtypeStruct(shape, dtype, weak_type=weak_type) for shape, dtype, weak_type in types]
