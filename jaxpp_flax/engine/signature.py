"""A call of a compiled function, split once: its leaves, their types, and its static arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray

__all__ = ["Call", "Leaf", "Parameters", "Signature", "not_an_array", "type_of"]

Positions: TypeAlias = int | Sequence[int] | None
Names: TypeAlias = str | Iterable[str] | None


class Call(NamedTuple):
    """The arguments of one call: leaves in the order of `tree`, and the static arguments by position and by name.

    `tree` is the structure of `(args, kwargs)` without the static arguments.
    """

    leaves: list[Any]
    tree: Any
    positional: tuple[tuple[int, Any], ...] = ()
    named: tuple[tuple[str, Any], ...] = ()

    @property
    def statics(self) -> Hashable:
        """The static arguments, as a part of a compilation's key: as for `jax.jit`, 2 and 2.0 are different."""
        return tuple((where, type(value), value) for where, value in (*self.positional, *self.named))

    def paths(self) -> tuple[str, ...]:
        """Return the name of each leaf, as messages write it after "argument"."""
        return _paths(self.tree, self.leaves)

    def with_leaves(self, leaves: Iterable[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return all arguments, static ones too, with other leaves."""
        traced, kwargs = jax.tree_util.tree_unflatten(self.tree, leaves)
        static, rest = dict(self.positional), iter(traced)
        args = [static[i] if i in static else next(rest) for i in range(len(traced) + len(static))]
        return args, {**kwargs, **dict(self.named)}


@dataclass(frozen=True)
class Parameters:
    """The static and the donated parameters of a function, each by position and by name."""

    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()
    donate_argnums: tuple[int, ...] = ()
    donate_argnames: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, fun: Callable[..., Any], static_argnums: Positions, static_argnames: Names,
        donate_argnums: Positions, donate_argnames: Names,
    ) -> Parameters:  # fmt: skip
        """Read the parameters as `jax.jit` does: the function's signature gives missing positions or names."""
        return cls(*_both_ways(fun, static_argnums, static_argnames), *_both_ways(fun, donate_argnums, donate_argnames))

    def split(self, fun: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """Split a call of `fun` into leaves and static arguments.

        Raises:
          TypeError: if a static argument cannot be hashed.
        """
        if not self.static_argnums and not self.static_argnames:
            return Call(*jax.tree_util.tree_flatten((tuple(args), kwargs)))
        static, names = _positions(self.static_argnums, len(args)), self.static_argnames
        positional = tuple((i, args[i]) for i in sorted(static))
        named = tuple((name, kwargs[name]) for name in sorted(kwargs) if name in names)
        for where, value in (*positional, *named):
            _check_hashable(fun, where, value)
        traced = tuple(argument for i, argument in enumerate(args) if i not in static)
        rest = {name: argument for name, argument in kwargs.items() if name not in names}
        return Call(*jax.tree_util.tree_flatten((traced, rest)), positional, named)

    def donated(self, call: Call) -> tuple[bool, ...]:
        """Return, for each leaf of a call, whether its argument is donated."""
        args, kwargs = call.with_leaves(call.leaves)
        donated = _positions(self.donate_argnums, len(args))
        static = {position for position, _ in call.positional} | {name for name, _ in call.named}
        given = [(i, argument, i in donated) for i, argument in enumerate(args)]
        given += [(name, kwargs[name], name in self.donate_argnames) for name in sorted(kwargs)]
        return tuple(flag for where, tree, flag in given if where not in static for _ in jax.tree.leaves(tree))


def _check_hashable(fun: Callable[..., Any], where: int | str, value: Any) -> None:
    """Refuse a static argument, by position or name, that cannot be hashed."""
    try:
        hash(value)
    except TypeError as error:
        names = list(inspect.signature(fun).parameters)
        name = where if isinstance(where, str) else names[where] if where < len(names) else f"number {where}"
        raise TypeError(
            f"the static argument {name!r} is a {type(value).__name__}, which cannot be hashed, so the step "
            "compiled for it could not be found again. Pass a hashable value (a tuple, a frozen dataclass), or "
            "an array that is not static."
        ) from error


def _positions(numbers: Iterable[int], count: int) -> set[int]:
    return {n % count for n in numbers if count and -count <= n < count}


def _both_ways(fun: Callable[..., Any], argnums: Positions, argnames: Names) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return positions and names of the same parameters; as in `jax.jit`, the signature gives the missing ones."""
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums or ())
    names = (argnames,) if isinstance(argnames, str) else tuple(argnames or ())
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):  # some callables have no signature
        return numbers, names
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        numbers = tuple(n + len(positional) if n < 0 else n for n in numbers)
    if numbers and not names:
        names = tuple(positional[n] for n in numbers if 0 <= n < len(positional))
    elif names and not numbers:
        numbers = tuple(positional.index(name) for name in names if name in positional)
    return numbers, names


@dataclass(frozen=True)
class Leaf:
    """The type of one leaf of the arguments."""

    path: str
    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool
    spec: PartitionSpec

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Signature:
    """The argument and result types of a compiled function.

    Messages name the function by `function`, if given.
    """

    tree: Any
    leaves: tuple[Leaf, ...]
    out_tree: Any
    donated: tuple[bool, ...]
    function: str = ""

    @classmethod
    def of(
        cls,
        call: Call,
        types: Iterable[jax.ShapeDtypeStruct],
        specs: Iterable[PartitionSpec],
        out_tree: Any,
        donated: tuple[bool, ...],
        *,
        function: str = "",
    ) -> Signature:
        """Make the signature of a call from the types and the specs of its leaves."""
        leaves = tuple(
            Leaf(path, tuple(struct.shape), struct.dtype, struct.weak_type, spec)
            for path, struct, spec in zip(call.paths(), types, specs, strict=True)
        )
        return cls(call.tree, leaves, out_tree, donated, function)

    def specs(self, num_constants: int) -> list[PartitionSpec]:
        """Return the specs of a program's inputs: of captured constants, which are whole, and of the leaves."""
        return [PartitionSpec()] * num_constants + [leaf.spec for leaf in self.leaves]

    def leaves_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the leaves of a call.

        Raises:
          TypeError: if the call has other arguments, naming the difference.
        """
        leaves, tree = jax.tree_util.tree_flatten((tuple(args), kwargs))
        if tree != self.tree:
            raise self._refusal("of another structure", self._first_difference(_paths(tree, leaves)))
        wrong: list[str] = []
        for leaf, expected in zip(leaves, self.leaves, strict=True):
            try:
                shape, dtype, _ = type_of(leaf)
            except TypeError:  # no array
                wrong.append(f"argument{expected.path}: got a {type(leaf).__name__}, made for {expected}")
                continue
            if (shape, dtype) != (expected.shape, expected.dtype):
                wrong.append(f"argument{expected.path}: got {dtype}{list(shape)}, made for {expected}")
        if wrong:
            more = f"; and {len(wrong) - 10} more" if len(wrong) > 10 else ""
            raise self._refusal("of other types", "; ".join(wrong[:10]) + more)
        return leaves

    def _refusal(self, which: str, differs: str) -> TypeError:
        return TypeError(
            f"{self.function or 'a compiled step'} was called with arguments {which} than it was made for: "
            f"{differs}. Make it again for these, or call the function itself, which compiles once per signature."
        )

    def _first_difference(self, paths: Sequence[str]) -> str:
        got, expected = set(paths), {leaf.path for leaf in self.leaves}
        missing, extra = sorted(expected - got), sorted(got - expected)
        parts = [f"missing argument{p}" for p in missing[:5]] + [f"unexpected argument{p}" for p in extra[:5]]
        return ", ".join(parts) or "the containers differ"

    def name_deleted(self, leaves: Sequence[Any], error: RuntimeError) -> RuntimeError:
        """Return an error that names a deleted argument and the remedy; `error` itself if none is deleted."""
        for leaf, expected in zip(leaves, self.leaves, strict=True):
            if isinstance(leaf, (jax.Array, MpmdArray)) and leaf.is_deleted():
                which = f"of {self.function}" if self.function else f"({expected})"
                return RuntimeError(
                    f"argument{expected.path} {which} has been deleted: an earlier call to which it was donated "
                    "reuses its memory (`donate_argnums`, a train step's state), or `.delete()` was called. Pass what "
                    "that call returned in its place, or hand a copy to it: `jax.tree.map(jnp.copy, state)`."
                )
        return error


def type_of(leaf: Any) -> tuple[tuple[int, ...], Any, bool]:
    """Return shape, dtype, and whether the type is weak; for other values, JAX gives them.

    Raises:
      TypeError: if `leaf` is not an array.
    """
    if isinstance(leaf, MpmdArray):
        aval = leaf.aval
        return aval.shape, aval.dtype, bool(getattr(aval, "weak_type", False))
    if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
        return tuple(leaf.shape), leaf.dtype, bool(getattr(leaf, "weak_type", False))
    if isinstance(leaf, (np.ndarray, np.generic)):
        return tuple(leaf.shape), jax.dtypes.canonicalize_dtype(leaf.dtype), False
    aval = jax.typeof(leaf)
    return tuple(aval.shape), aval.dtype, bool(aval.weak_type)


def not_an_array(call: Call, remedy: str = "name the argument in `static_argnums`/`static_argnames`") -> TypeError:
    """Return the error for a call with a leaf whose type is unknown to JAX."""
    for path, leaf in zip(call.paths(), call.leaves, strict=True):
        try:
            type_of(leaf)
        except TypeError:
            return TypeError(
                f"argument{path} is a {type(leaf).__name__}, which is no array. Pass arrays or numbers, or {remedy}."
            )
    return TypeError("an argument is no array.")


def _paths(tree: Any, leaves: Sequence[Any]) -> tuple[str, ...]:
    whole = jax.tree_util.tree_unflatten(tree, leaves)
    return tuple(jax.tree_util.keystr(path[1:]) for path, _ in jax.tree_util.tree_leaves_with_path(whole))
