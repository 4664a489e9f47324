"""Shardings from a model's metadata: what its annotations mean on the axes of a stage's submesh."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import core, nnx
from jax.sharding import PartitionSpec

from jaxpp_flax.engine.mesh import MpmdMesh
from jaxpp_flax.trainers.errors import MeshError
from jaxpp_flax.trainers.frozen import path_text
from jaxpp_flax.trainers.state import TrainState

__all__ = ["axis_names", "state_specs", "unboxed"]

# The names of each dimension of a leaf, as the model's author wrote them; None: no annotation.
Names = tuple[Any, ...] | None

_METADATA = ("out_sharding", "sharding_names", "sharding")  # of NNX variables, in newer and older versions of Flax


def _is_annotated(node: Any) -> bool:
    return isinstance(node, (nnx.Variable, core.meta.AxisMetadata))


def axis_names(tree: Any) -> list[Names]:
    """The annotations of a tree's leaves: of NNX variables or Linen boxes."""
    found: list[Names] = []
    for node in jax.tree.leaves(tree, is_leaf=_is_annotated):
        found += [_names_of(node)] * len(jax.tree.leaves(node))
    return found


def _names_of(node: Any) -> Names:
    if isinstance(node, nnx.Variable):
        metadata = node.get_metadata()
        names = next((metadata[name] for name in _METADATA if metadata.get(name)), None)
    else:
        names = getattr(node, "names", None)
    spec = getattr(names, "spec", names)
    return None if spec is None else tuple(spec)


def unboxed(tree: Any) -> Any:
    """Linen's variables without the boxes that hold annotations: the paths are those of a model without them."""
    is_box = lambda node: isinstance(node, core.meta.AxisMetadata)  # noqa: E731
    return jax.tree.map(lambda node: jax.tree.leaves(node)[0] if is_box(node) else node, tree, is_leaf=is_box)


def state_specs(
    state: TrainState, names: tuple[Sequence[Names], Sequence[Names]], mesh: MpmdMesh | None, rules: Any
) -> TrainState | None:
    """How each leaf of a state lies on a rank: like `state`, with a spec, or None for leaves without annotation.

    What the optimizer keeps for a parameter (found by its path) lies as the parameter does, or, where it has some of
    its dimensions alone, as Adafactor's factored statistics do, as these dimensions lie.

    Args:
      names: the annotations of parameters and of the model's other state.
      rules: what names stand for, as in Flax: pairs (name, mesh axis, or several, or None).

    Returns:
      None where nothing is annotated, or there is no mesh.

    Raises:
      MeshError: if a name is neither an axis beside the stages' nor in the rules, or an axis does not divide a
        dimension.
      TypeError: if the rules are no pairs.
    """
    pairs = _pairs(rules)
    if mesh is None or not any(n is not None for half in names for n in half):
        return None
    sizes = {axis: size for axis, size in mesh.jax_mesh.shape.items() if axis != mesh.mpmd_axis_name}

    def specs_of(tree: Any, annotations: Sequence[Names]) -> list[PartitionSpec | None]:
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return [
            None if n is None else _spec(path_text(path), leaf.shape, n, sizes, pairs)
            for (path, leaf), n in zip(leaves, annotations, strict=True)
        ]

    params = specs_of(state.params, names[0])
    with_path = jax.tree_util.tree_leaves_with_path(state.params)
    known = {path: (leaf.shape, spec) for (path, leaf), spec in zip(with_path, params, strict=True)}

    def like_parameters(tree: Any) -> Any:
        leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
        seen: Counter[Any] = Counter()

        def spec_of(path: Any, shape: tuple[int, ...]) -> PartitionSpec | None:
            tail = next((path[i:] for i in range(len(path)) if path[i:] in known), ())
            whole, spec = known.get(tail, ((), None))
            if spec is None:
                return None
            seen[tail, shape] += 1
            return _spec_of_part(shape, whole, spec, seen[tail, shape] - 1)

        return jax.tree.unflatten(structure, [spec_of(path, getattr(leaf, "shape", ())) for path, leaf in leaves])

    return TrainState(
        step=None,
        params=jax.tree.unflatten(jax.tree.structure(state.params), params),
        opt_state=like_parameters(state.opt_state),
        model_state=jax.tree.unflatten(jax.tree.structure(state.model_state), specs_of(state.model_state, names[1])),
        ema=like_parameters(state.ema),
        loss_scale=None if state.loss_scale is None else dict.fromkeys(state.loss_scale),
    )


def _spec_of_part(shape: tuple[int, ...], whole: tuple[int, ...], spec: PartitionSpec, number: int) -> PartitionSpec:
    """How a value lies that has some of a parameter's dimensions; on every device, where it has none of them.

    Args:
      number: how many values of this shape come before it. Where several choices of dimensions fit, as in a square
        matrix, optimizers keep one value for each, in order.

    Example:
      >>> _spec_of_part((4,), (4, 6), PartitionSpec("fsdp", "tensor"), 0) == PartitionSpec("fsdp")
      True
      >>> _spec_of_part((4,), (4, 4), PartitionSpec(None, "tensor"), 1) == PartitionSpec("tensor")
      True
      >>> _spec_of_part((1,), (4, 6), PartitionSpec("fsdp"), 0) == PartitionSpec()
      True
    """
    entries = (*spec, *(None,) * (len(whole) - len(spec)))
    choices = [c for c in itertools.combinations(range(len(whole)), len(shape)) if tuple(whole[i] for i in c) == shape]
    return _trimmed([entries[i] for i in choices[min(number, len(choices) - 1)]] if choices else [])


def _trimmed(entries: list[Any]) -> PartitionSpec:
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def _pairs(rules: Any) -> list[tuple[Any, Any]]:
    pairs = list(rules.items() if isinstance(rules, Mapping) else rules or ())
    for pair in pairs:
        if not isinstance(pair, Sequence) or len(pair) != 2:
            raise TypeError(f"sharding_rules holds {pair!r}; each rule is a pair (name, mesh axis or None).")
    return [(name, axes) for name, axes in pairs]


def _spec(
    path: str, shape: tuple[int, ...], names: tuple[Any, ...], sizes: Mapping[str, int], pairs: Sequence[Any]
) -> PartitionSpec:
    if len(names) > len(shape):
        raise MeshError(f"the parameter {path} of shape {shape} is annotated with {len(names)} names: {names}.")
    taken: set[str] = set()
    entries: list[Any] = []
    for dimension, name in zip(shape, names, strict=False):
        axes = [
            axis
            for part in (name if isinstance(name, tuple) else (name,))
            for axis in _axes(part, path, taken, sizes, pairs)
        ]
        for axis in axes:
            if axis not in sizes:
                raise MeshError(
                    f"the parameter {path} is annotated with {names}, and {axis!r} is no axis of a stage: these are "
                    f"{dict(sizes)}. Add it to the mesh (mesh_axes={{{axis!r}: 2}}), or say what the name stands for: "
                    f"sharding_rules=[({axis!r}, None)] leaves the dimension whole."
                )
        parts = math.prod(sizes[axis] for axis in axes)
        if dimension % parts:
            raise MeshError(
                f"the parameter {path} of shape {shape} cannot be cut into {parts} equal parts along {name!r}: "
                f"{dimension} is no multiple of {parts}. Change the width, the mesh, or the rule for {name!r}."
            )
        taken.update(axes)
        entries.append(None if not axes else axes[0] if len(axes) == 1 else tuple(axes))
    return _trimmed(entries)


def _axes(name: Any, path: str, taken: set[str], sizes: Mapping[str, int], pairs: Sequence[Any]) -> tuple[str, ...]:
    """The mesh axes that a name stands for: by the first rule whose axes are still free, or else its own."""
    if name is None:
        return ()
    meanings = [axes for rule, axes in pairs if rule == name]
    for axes in meanings:
        chosen = () if axes is None else axes if isinstance(axes, tuple) else (axes,)
        if taken.isdisjoint(chosen):
            return chosen
    if not meanings and name in taken:
        raise MeshError(f"the parameter {path} is annotated with {name!r} in two dimensions. Keep one of them.")
    return () if meanings else (name,)
