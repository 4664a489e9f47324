"""Refuse calls that change what a model is made of: a step writes values, and all else would be lost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import jax
import numpy as np
from flax import core, nnx

from jaxpp_flax.messages import listed
from jaxpp_flax.trainers.errors import ModelError
from jaxpp_flax.trainers.model.frozen import path_text
from jaxpp_flax.trainers.model.linen_model import LinenCall
from jaxpp_flax.trainers.state.in_place import Contents, is_state, same

__all__ = ["Changes", "changes_of", "check_structure", "check_types"]

_OWN = "_pytree__"  # how the names of Flax's own attributes of a module begin


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What a call has changed beside values: attributes that are no arrays, and variables that it has made.

    Args:
      message: names the first of them, and says what to do.
      graphdef: the module after the call, without values; None for Linen.
      made: the variables that the call has made, by their paths in NNX.
    """

    message: str
    graphdef: Any = None
    made: Mapping[Any, Any] = field(default_factory=dict)


def changes_of(after: Any, before: Any, what: str, contents: Contents | None = None) -> Changes | None:
    """Return what a call has changed beside values; None for nothing.

    Values that a call sows (`nnx.Intermediate`) are no part of the model: they are dropped. The modes of `train()` and
    `eval()` do not count: a call sets them before it reads them.

    Args:
      after: the model after the call, as an adapter binds it.
      before: the same model, not called.
      what: what was called, for the message.
      contents: what the attributes of the model held before the call.

    Raises:
      ModelError: for a variable that the call has removed, or made another type of.
    """
    if isinstance(after, LinenCall):
        message = _made(_paths_of_collections(after.variables), _paths_of_collections(before.variables), what)
        return None if message is None else Changes(message=message)
    if _only_values_differ(after, before) and not _changed_in_place(contents, what):
        return None  # as a rule: the copies of the modules below take longer than all else
    after, before = (_without_sown(module) for module in (after, before))
    new, old = (_leaves(module) for module in (after, before))
    message = _made(new, old, what)
    for path, kind in old.items():
        if new[path] is not kind:
            raise ModelError(
                f"{what} makes the {kind.__name__} {path} a {new[path].__name__}. A step writes values, and keeps the "
                "types of the variables. Make the variable with this type in `__init__`."
            )
    graphdef, state = nnx.split(after)
    message = message or _other_attribute(after, before, what) or _changed_in_place(contents, what)
    if message is None:
        return None
    made = {path: leaf for path, leaf in nnx.to_flat_state(state) if path_text(path) not in old}
    return Changes(message=message, graphdef=graphdef, made=made)


def _only_values_differ(after: nnx.Module, before: nnx.Module) -> bool:
    """Return whether two modules have the same attributes beside the values of variables; False if it is not known."""

    numbers: tuple[dict[int, int], dict[int, int]] = {}, {}  # which variables are shared

    def alike(one: Any, other: Any) -> bool:
        if isinstance(one, (nnx.Variable, nnx.Module)):
            first, second = (of.setdefault(id(v), len(of)) for of, v in zip(numbers, (one, other), strict=True))
            return type(one) is type(other) and first == second
        return same(one, other) and not any(map(is_state, jax.tree.leaves((one, other), is_leaf=is_state)))

    for one, other in zip_longest(nnx.iter_modules(after), nnx.iter_modules(before)):
        if one is None or other is None or one[0] != other[0]:
            return False
        was, now = (
            {k: v for k, v in vars(m).items() if not k.startswith(_OWN) and not isinstance(v, nnx.Intermediate)}
            for m in (other[1], one[1])
        )
        if was.keys() != now.keys() or not all(alike(now[name], value) for name, value in was.items()):
            return False
    return True


def check_structure(after: Any, before: Any, what: str, contents: Contents | None = None) -> None:
    """Refuse a call that changes more than values; the arguments are those of `changes_of`.

    Raises:
      ModelError: naming the variable or the attribute.
    """
    if (changes := changes_of(after, before, what, contents)) is not None:
        raise ModelError(changes.message)


def check_types(after: Any, before: Any, what: str) -> None:
    """Refuse leaves with another shape or dtype than before, and variables whose value has other leaves.

    Raises:
      ModelError: naming the leaf.
    """
    found, known = (jax.tree_util.tree_leaves_with_path(tree) for tree in (after, before))
    if other := sorted({path_text(path) for path, _ in found} ^ {path_text(path) for path, _ in known}):
        raise ModelError(
            f"{what} changes the tree in a variable: {listed(other, 3, str)} is new or missing. Each step needs the "
            "same tree: keep an array of a fixed shape, or sow the values as nnx.Intermediate."
        )
    for (path, new), (_, old) in zip(found, known, strict=True):
        if (np.shape(new), _dtype(new)) != (old.shape, old.dtype):
            raise ModelError(
                f"{what} writes {_type_text(new)} into {path_text(path).removeprefix('collections/')}, which is "
                f"{_type_text(old)}. Each step needs the same shapes and dtypes: write a value of this type, such as "
                "`x.astype(...)`. If the model sows it, remove what an earlier call has left: `nnx.pop(model, ...)` "
                "before you make the trainer, or variables= without this collection."
            )


def _made(new: Mapping[str, Any], old: Mapping[str, Any], what: str) -> str | None:
    """Return the message for variables that were made; refuse those that were removed."""
    if removed := sorted(old.keys() - new.keys()):
        raise ModelError(
            f"{what} removes {listed(removed, 3, str)} from the model. A step keeps all variables: write another value "
            "into it instead, such as zeros."
        )
    if made := sorted(new.keys() - old.keys()):
        return (
            f"{what} makes {listed(made, 3, str)}, which the model does not have before, and the trainer would lose "
            "its value. Make it before training: an `nnx.Variable` in `__init__` (NNX), a variable that `init` makes "
            "and `variables=` holds (Linen). Or, if the model sows it, pop it in the loss (`nnx.pop`), or sow it as "
            "`nnx.Intermediate`."
        )
    return None


def _other_attribute(after: nnx.Module, before: nnx.Module, what: str) -> str | None:
    """Return the message for another value of an attribute that is no array."""
    for module in (after, before):
        module.eval()  # a mode that the loss sets in each call is no state
    modules = dict(nnx.iter_modules(before))
    for path, module in nnx.iter_modules(after):
        if path not in modules:
            continue  # a module without variables
        was, now = (_attributes(of) for of in (modules[path], module))
        for name in sorted(was.keys() | now.keys()):
            if not same(was.get(name), now.get(name)):
                return _changed("/".join(map(str, (*path, name))), was.get(name), now.get(name), what)
    return None


def _changed_in_place(contents: Contents | None, what: str) -> str | None:
    """Return the message for an attribute that is the same object, with other contents."""
    changed = contents and contents.change()
    return _changed(*changed, what) if changed else None


def _changed(path: str, was: Any, now: Any, what: str) -> str:
    before, after = (text if len(text := repr(value)) <= 200 else f"{text[:200]} ..." for value in (was, now))
    return (
        f"{what} changes the attribute {path} from {before} to {after}. It is no array, so a compiled step would use "
        "the first value for ever. Keep it in an `nnx.Variable`, or set it before the trainer is made."
    )


def _attributes(module: nnx.Module) -> dict[str, Any]:
    """Return the attributes of a module that hold no variables and no other modules."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith(_OWN) and not any(map(is_state, jax.tree.leaves(value, is_leaf=is_state)))
    }


def _without_sown(module: nnx.Module) -> nnx.Module:
    copy = nnx.clone(module)
    nnx.pop(copy, nnx.Intermediate)
    return copy


def _leaves(module: nnx.Module) -> dict[str, type]:
    """Return the type of each variable; that of an array that is an attribute is one for all arrays."""
    leaves = nnx.to_flat_state(nnx.state(module))
    return {path_text(path): type(leaf) if isinstance(leaf, nnx.Variable) else jax.Array for path, leaf in leaves}


def _paths_of_collections(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the leaves by path, without those in tuples: these are sown."""
    found = jax.tree_util.tree_leaves_with_path({name: core.unfreeze(tree) for name, tree in variables.items()})
    return {
        path_text(path): leaf
        for path, leaf in found
        if not any(isinstance(key, jax.tree_util.SequenceKey) for key in path)
    }


def _type_text(leaf: Any) -> str:
    return f"{_dtype(leaf)}{list(np.shape(leaf))}"


def _dtype(leaf: Any) -> Any:
    return leaf.dtype if hasattr(leaf, "dtype") else jax.dtypes.result_type(leaf)
