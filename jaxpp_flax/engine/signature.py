"""The arguments of a compiled function: their types, their paths in messages, and the static ones among them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray

__all__ = [
    "ArgumentLeaf",
    "Signature",
    "Statics",
    "arguments_of",
    "both_ways",
    "not_an_array",
    "paths_of",
    "type_of",
    "without_statics",
]

Positions: TypeAlias = int | Sequence[int] | None
Names: TypeAlias = str | Iterable[str] | None


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Static:
    """A static argument in the tree of a call: a node without leaves. As for `jax.jit`, 2 and 2.0 are different."""

    kind: type
    value: Any


def both_ways(fun: Callable[..., Any], argnums: Positions, argnames: Names) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return positions and names of the same parameters; as in `jax.jit`, the signature gives the missing ones.

    JAX 0.10 does not so for a negative position.
    """
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
class Statics:
    """The static parameters of a function, by position and by name."""

    fun: Callable[..., Any]
    positions: tuple[int, ...] = ()
    names: tuple[str, ...] = ()

    def flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], Any]:
        """Flatten a call; the tree of `(args, kwargs)` holds the values of the static arguments.

        Raises:
          TypeError: if a static argument cannot be hashed.
        """
        if self.positions or self.names:
            count = len(args)
            static = {n % count for n in self.positions if count and -count <= n < count}
            args = [_static(self.fun, i, value) if i in static else value for i, value in enumerate(args)]
            kwargs = {k: _static(self.fun, k, value) if k in self.names else value for k, value in kwargs.items()}
        return jax.tree_util.tree_flatten((tuple(args), kwargs))


def _static(fun: Callable[..., Any], where: int | str, value: Any) -> _Static:
    """Return a static argument, by position or name, as a node of the tree."""
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
    return _Static(type(value), value)


def arguments_of(tree: Any, leaves: Iterable[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a call with these leaves, and with the static arguments of its tree."""
    args, kwargs = jax.tree_util.tree_unflatten(tree, leaves)

    def value_of(argument: Any) -> Any:
        return argument.value if isinstance(argument, _Static) else argument

    return list(map(value_of, args)), {name: value_of(argument) for name, argument in kwargs.items()}


def without_statics(tree: Any) -> Any:
    """Return the tree of a call without its static arguments, as JAX has it (`in_tree`)."""
    args, kwargs = jax.tree_util.tree_unflatten(tree, range(tree.num_leaves))
    kept = tuple(argument for argument in args if not isinstance(argument, _Static))
    named = {name: argument for name, argument in kwargs.items() if not isinstance(argument, _Static)}
    return jax.tree_util.tree_structure((kept, named))


@dataclass(frozen=True)
class ArgumentLeaf:
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
    leaves: tuple[ArgumentLeaf, ...]
    out_tree: Any
    donated: tuple[bool, ...]
    function: str = ""

    @classmethod
    def of(
        cls,
        tree: Any,
        types: Iterable[jax.ShapeDtypeStruct],
        specs: Iterable[PartitionSpec],
        out_tree: Any,
        donated: tuple[bool, ...],
        *,
        function: str = "",
    ) -> Signature:
        """Make the signature of calls with this tree, without static arguments, from the types and specs of leaves."""
        leaves = tuple(
            ArgumentLeaf(path, tuple(struct.shape), struct.dtype, struct.weak_type, spec)
            for path, struct, spec in zip(paths_of(tree), types, specs, strict=True)
        )
        return cls(tree, leaves, out_tree, donated, function)

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
            raise self._refusal("of another structure", self._first_difference(paths_of(tree)))
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

    def deleted_error(self, leaves: Sequence[Any]) -> RuntimeError | None:
        """Return an error that names a deleted argument and the remedy; None if none is deleted."""
        for leaf, expected in zip(leaves, self.leaves, strict=True):
            if isinstance(leaf, (jax.Array, MpmdArray)) and leaf.is_deleted():
                which = f"of {self.function}" if self.function else f"({expected})"
                return RuntimeError(
                    f"argument{expected.path} {which} has been deleted: an earlier call to which it was donated "
                    "reuses its memory (`donate_argnums`, a train step's state), or `.delete()` was called. Pass what "
                    "that call returned in its place, or hand a copy to it: `jax.tree.map(jnp.copy, state)`."
                )
        return None


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


def not_an_array(tree: Any, leaves: Iterable[Any], remedy: str) -> TypeError:
    """Return the error for a call with a leaf whose type is unknown to JAX."""
    for path, leaf in zip(paths_of(tree), leaves, strict=True):
        try:
            type_of(leaf)
        except TypeError:
            return TypeError(
                f"argument{path} is a {type(leaf).__name__}, which is no array. Pass arrays or numbers, or {remedy}."
            )
    return TypeError("an argument is no array.")


def paths_of(tree: Any) -> tuple[str, ...]:
    """Return the name of each leaf of a call, as messages write it after "argument"."""
    whole = jax.tree_util.tree_unflatten(tree, range(tree.num_leaves))
    return tuple(jax.tree_util.keystr(path[1:]) for path, _ in jax.tree_util.tree_leaves_with_path(whole))
