"""Logical paths: the names of a tree's leaves, independent of containers and stages.

`params/blocks/0/attention/kernel` names the same leaf in a dataclass, an `nnx.State`, a Linen dictionary and a
restored checkpoint. An `nnx.Variable` adds nothing to the path of its value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
from flax import nnx

from jaxpp_flax.globs import NameFilter, matches_any

PathFilter: TypeAlias = NameFilter


def flatten(tree: Any) -> tuple[dict[str, Any], Any]:
    """Return leaves by logical path, and the structure; `jax.tree.unflatten(structure, leaves.values())` inverts.

    Example:
      >>> leaves, structure = flatten({"a": [1, {"b": 2}], "c": None})
      >>> leaves
      {'a/0': 1, 'a/1/b': 2}
      >>> jax.tree.unflatten(structure, leaves.values())
      {'a': [1, {'b': 2}], 'c': None}
    """
    leaves: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, nnx.Variable)):
        inner = jax.tree_util.tree_leaves_with_path(leaf) if isinstance(leaf, nnx.Variable) else [((), leaf)]
        for rest, value in inner:
            whole = path if len(inner) == 1 else (*path, *rest)
            name = jax.tree_util.keystr(whole, simple=True, separator="/")
            if name in leaves:
                raise ValueError(
                    f"two leaves of the tree have the path {name!r}, so a checkpoint cannot tell them apart. Rename "
                    "one (keys such as 0 and '0' in one dictionary are written alike)."
                )
            leaves[name] = value
    return leaves, jax.tree.structure(tree)


def nest(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Make nested dictionaries of leaves by path.

    Example:
      >>> nest({"a/b": 1, "a/c/0": 2})
      {'a': {'b': 1, 'c': {'0': 2}}}
    """
    root: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, last = path.split("/")
        node: Any = root
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise ValueError(f"the path {path!r} runs through the leaf {parent!r}. Rename one of the two.")
        if last in node:
            raise ValueError(f"the leaf {path!r} is also a part of longer paths. Rename one of them.")
        node[last] = leaf
    return root


def choose(only: PathFilter | None) -> Callable[[str], bool]:
    """Return the function that selects paths by one glob or several (`jaxpp_flax.globs`); None selects all paths.

    Example:
      >>> wanted = choose("params/*")
      >>> wanted("params/blocks/0/kernel"), wanted("opt_state/0/mu")
      (True, False)
    """
    if only is None:
        return lambda path: True
    return matches_any(only)


def places_of(path: str) -> tuple[str, ...]:
    """Return the paths where a checkpoint may have a leaf of a `TrainState`, the first choice first.

    A parameter has one place on disk, `params/`, whether it is trained or frozen. In memory a frozen one belongs to the
    rest of the model: `model_state/` (NNX), or `model_state/frozen/` (Linen). Older checkpoints have it there.

    Example:
      >>> places_of("params/head/kernel")
      ('params/head/kernel', 'model_state/head/kernel', 'model_state/frozen/head/kernel')
      >>> places_of("model_state/frozen/head/kernel"), places_of("step")
      (('model_state/frozen/head/kernel', 'params/head/kernel'), ('step',))
    """
    holders = ("model_state/frozen/", "model_state/", "params/")
    holder = next((of for of in holders if path.startswith(of)), None)
    if holder is None:
        return (path,)
    own = path.removeprefix(holder)
    others = ("model_state/", "model_state/frozen/") if holder == "params/" else ("params/",)
    return (path, *(f"{other}{own}" for other in others))


def rename_path(path: str, rename: Mapping[str, str] | None) -> str:
    """Replace the longest prefix of `path` that `rename` has; a prefix consists of whole parts of a path.

    Example:
      >>> rename_path("params/encoder/w", {"params": "", "params/encoder": "model/enc"})
      'model/enc/w'
      >>> rename_path("params/w", {"params": ""}), rename_path("w", {"": "params"})
      ('w', 'params/w')
    """
    parts = path.split("/")
    for length in range(len(parts), -1, -1):
        new = (rename or {}).get("/".join(parts[:length]))
        if new is not None:
            return "/".join([*(part for part in new.split("/") if part), *parts[length:]])
    return path
