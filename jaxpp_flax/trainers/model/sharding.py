"""Shardings from a model's metadata: the meaning of annotations on the axes of a stage's submesh."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
from flax import core, nnx
from flax import linen as nn
from jax.sharding import PartitionSpec

from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.layers.axis_names import axis_names_key
from jaxpp_flax.trainers.errors import MeshError
from jaxpp_flax.trainers.mesh import inner_sizes
from jaxpp_flax.trainers.model.frozen import path_text
from jaxpp_flax.trainers.state.train_state import TrainState, parameter_of

Pairs = tuple[tuple[Any, Any], ...]  # each pair: a name, and a mesh axis, several axes, or None
MeshAxes: TypeAlias = str | Sequence[str] | None
AxisRulesLike: TypeAlias = Mapping[str, MeshAxes] | Sequence[tuple[str, MeshAxes]]
"""The type of `sharding_rules=`: names of axes, and the mesh axes that the names stand for."""


@dataclass(frozen=True)
class Annotation:
    """The annotation that the model's author wrote on a leaf."""

    names: tuple[Any, ...]  # for each dimension: a name, several names, or None
    rules: Pairs = ()  # the meanings of names for this leaf only


@dataclass(frozen=True)
class AxisRules:
    """The meanings of axis names. A name has the first of these meanings: `given`, the leaf's own, `active`, itself.

    Example:
      >>> with nn.logical_axis_rules([("embed", "fsdp"), ("mlp", "tensor")]):
      ...     rules = AxisRules.in_context(as_pairs({"embed": None}))
      >>> rules.pairs()
      (('embed', None), ('mlp', 'tensor'))
      >>> rules.on({"data": 2})
      (('embed', None), ('mlp', None))
    """

    given: Pairs = ()  # the rules of `MeshOptions(sharding_rules=)`
    active: Pairs = ()  # the rules of Flax's `logical_axis_rules`, the context in which the trainer is made

    @classmethod
    def in_context(cls, given: Pairs) -> AxisRules:
        """Combine the trainer's rules and the rules of the context."""
        return cls(given, as_pairs(nn.get_logical_axis_rules()))

    def pairs(self, own: Pairs = ()) -> Pairs:
        """Return all rules for a leaf with its `own` rules, in order."""
        found: Pairs = ()
        for rules in (self.given, own, self.active):
            known = {name for name, _ in found}
            found += tuple(pair for pair in rules if pair[0] not in known)
        return found

    def on(self, sizes: Mapping[str, int]) -> Pairs:
        """Return the rules for constraints inside the model. These are hints: an absent axis cuts nothing."""
        return tuple((name, _present(axes, sizes)) for name, axes in self.pairs())


def _present(axes: Any, sizes: Mapping[str, int]) -> Any:
    if isinstance(axes, (tuple, list)):
        return tuple(axis for axis in axes if axis in sizes) or None
    return axes if axes in sizes else None


def is_box(node: Any) -> bool:
    """Return True for a Linen box, which holds a leaf and its annotation."""
    return isinstance(node, core.meta.AxisMetadata)


def annotations_of(tree: Any) -> list[Annotation | None]:
    """Return the annotation of each leaf of a tree of NNX variables or Linen boxes; None for a leaf without one."""
    found: list[Annotation | None] = []
    for node in jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, nnx.Variable) or is_box(node)):
        found += [_annotation_of(node)] * len(jax.tree.leaves(node))
    return found


def _annotation_of(node: Any) -> Annotation | None:
    if isinstance(node, nnx.Variable):
        metadata = node.get_metadata()
        names = None if (key := axis_names_key(metadata)) is None else metadata[key]
        rules = metadata.get("sharding_rules")
    else:
        names, rules = getattr(node, "names", None), getattr(node, "rules", None)
    spec = getattr(names, "spec", names)
    return None if spec is None else Annotation(tuple(spec), as_pairs(rules))


def unboxed(tree: Any) -> Any:
    """Return Linen's variables without the boxes that hold annotations: paths are as in a model without boxes."""
    return jax.tree.map(lambda node: jax.tree.leaves(node)[0] if is_box(node) else node, tree, is_leaf=is_box)


def state_specs(
    state: TrainState,
    notes: tuple[Sequence[Annotation | None], Sequence[Annotation | None]],
    mesh: MpmdMesh | None,
    rules: AxisRules,
) -> tuple[TrainState | None, Mapping[str, str]]:
    """Return the spec of each leaf of a state on a rank: a tree like `state`, with None for leaves without annotation.

    Return also the names of annotations that are ignored, each with the first leaf that has it.

    An optimizer leaf belongs to the parameter with the same path, and has the parameter's spec. An optimizer leaf with
    only some of the parameter's dimensions, such as Adafactor's factored statistics, has the spec of these dimensions.
    Where every axis except the stage axis has one device, names without a meaning are ignored: they cut nothing. So
    they are where `data` is the only such axis, and nothing is annotated with it.

    The specs are None if nothing is annotated, or there is no mesh. `notes` are the annotations of parameters and of
    the model's other state.
    Names that are neither axes (except the stage axis) nor in the rules are refused, and axes that do not divide a
    dimension.
    """
    if mesh is None or not any(note is not None for half in notes for note in half):
        return None, {}
    reader = _Reader(inner_sizes(mesh), rules)
    params, rest = reader.specs(state.params, notes[0]), reader.specs(state.model_state, notes[1])
    reader.refuse_faults()
    with_path = jax.tree_util.tree_leaves_with_path(state.params)
    known = {path: (leaf.shape, spec) for (path, leaf), spec in zip(with_path, params, strict=True)}

    def like_parameters(tree: Any) -> Any:
        leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
        seen: Counter[Any] = Counter()

        def spec_of(path: Any, shape: tuple[int, ...]) -> PartitionSpec | None:
            tail = parameter_of(path, known) or ()
            whole, spec = known.get(tail, ((), None))
            if spec is None:
                return None
            seen[tail, shape] += 1
            return _spec_of_part(shape, whole, spec, seen[tail, shape] - 1)

        return jax.tree.unflatten(structure, [spec_of(path, getattr(leaf, "shape", ())) for path, leaf in leaves])

    specs = TrainState(
        step=None,
        params=jax.tree.unflatten(jax.tree.structure(state.params), params),
        opt_state=like_parameters(state.opt_state),
        model_state=jax.tree.unflatten(jax.tree.structure(state.model_state), rest),
        ema=like_parameters(state.ema),
        loss_scale=None if state.loss_scale is None else dict.fromkeys(state.loss_scale),
    )
    return specs, reader.unknown | {axis: path for (_, axis), path in reader.absent.items()}


def _spec_of_part(shape: tuple[int, ...], whole: tuple[int, ...], spec: PartitionSpec, number: int) -> PartitionSpec:
    """Return the spec of a value with some of a parameter's dimensions; a value with none of them is on every device.

    `number` counts the earlier values with this shape. Where several choices of dimensions fit, as in a square matrix,
    optimizers keep one value for each choice, in order.

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


def as_pairs(rules: Any) -> Pairs:
    """Return the rules of axis names as pairs.

    Raises:
      TypeError: if a rule is not a pair.
    """
    pairs = list(rules.items() if isinstance(rules, Mapping) else rules or ())
    for pair in pairs:
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise TypeError(f"sharding_rules holds {pair!r}; each rule is a pair (name, mesh axis or None).")
    return tuple((name, axes) for name, axes in pairs)


class _Reader:
    """Reads annotations on the axes of a stage; collects faults, so that a message has all names without a meaning."""

    def __init__(self, sizes: Mapping[str, int], rules: AxisRules) -> None:
        self.sizes, self.rules = sizes, rules
        # Each name or axis with the first path that has it.
        self.unknown: dict[str, str] = {}
        self.absent: dict[tuple[Any, str], str] = {}  # by rule and axis
        self.undivided: str | None = None
        self.matters = math.prod(sizes.values()) > 1
        """True if a stage has several devices, so that an axis can cut a dimension."""
        self.cuts = False  # whether a name stands for an axis

    def specs(self, tree: Any, notes: Sequence[Annotation | None]) -> list[PartitionSpec | None]:
        """Return the spec of each leaf; None for a leaf without an annotation."""
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return [
            None if note is None else self._spec(path_text(path), leaf.shape, note)
            for (path, leaf), note in zip(leaves, notes, strict=True)
        ]

    def _spec(self, path: str, shape: tuple[int, ...], note: Annotation) -> PartitionSpec:
        names, pairs = note.names, self.rules.pairs(note.rules)
        if len(names) > len(shape):
            raise MeshError(
                f"the parameter {path} of shape {shape} is annotated with {len(names)} names: {names}. Give one name, "
                "or None, for each dimension."
            )
        taken: set[str] = set()
        entries: list[Any] = []
        for size, name in zip(shape, names, strict=False):
            parts = name if isinstance(name, tuple) else (name,)
            axes = tuple(axis for part in parts for axis in self._axes(part, path, taken, pairs))
            taken.update(axes)
            self.cuts = self.cuts or bool(axes)
            count = math.prod(self.sizes[axis] for axis in axes)
            if size % count:
                self.undivided = self.undivided or (
                    f"the parameter {path} of shape {shape} cannot be cut into {count} equal parts along {name!r}: "
                    f"{size} is no multiple of {count}. Change the width, the mesh, or the rule for {name!r}."
                )
            entries.append(None if not axes else axes[0] if len(axes) == 1 else axes)
        return _trimmed(entries)

    def _axes(self, name: Any, path: str, taken: set[str], pairs: Pairs) -> tuple[str, ...]:
        """Return the mesh axes of a name: from the first rule whose axes are still free, else the axis of this name."""
        if name is None:
            return ()
        meanings = [axes for rule, axes in pairs if rule == name]
        for axes in meanings:
            chosen = () if axes is None else tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)
            if taken.isdisjoint(chosen):
                for axis in chosen:
                    if axis not in self.sizes:
                        self.absent.setdefault((name, axis), path)
                return tuple(axis for axis in chosen if axis in self.sizes)
        if meanings:
            return ()
        if name in taken and self.matters:
            raise MeshError(f"the parameter {path} is annotated with {name!r} in two dimensions. Keep one of them.")
        if name in self.sizes and name not in taken:
            return (name,)
        self.unknown.setdefault(name, path)
        return ()

    def refuse_faults(self) -> None:
        """Refuse all names and axes without a meaning, unless they cannot cut anything; then uneven dimensions."""
        if not self.matters or self._is_data_parallel:
            return
        stage = f"no axis of a stage: these are {dict(self.sizes)}"
        if self.unknown:
            listing = ", ".join(f"{name!r} (of {path})" for name, path in self.unknown.items())
            rules = ", ".join(f"({name!r}, None)" for name in self.unknown)
            raise MeshError(
                f"the model's annotations use names without a rule that are {stage}. The names: {listing}. Give each "
                f"name a rule, with a mesh axis, or None for a dimension that is not sharded: "
                f"mesh=MeshOptions(sharding_rules=[{rules}]), or make "
                "the trainer under `nn.logical_axis_rules(rules)`. If a name is a mesh axis itself, add it to the "
                f"mesh, as in mesh={{{next(iter(self.unknown))!r}: 2}}.{self._absent_text(' Besides, ')}"
            )
        if self.absent:
            raise MeshError(f"{self._absent_text('')} These are no axes of a stage, which has {dict(self.sizes)}.")
        if self.undivided is not None:
            raise MeshError(self.undivided)

    @property
    def _is_data_parallel(self) -> bool:
        """True if only examples are cut, and no annotation or rule is about this mesh: each device has all parameters.

        A model that is annotated for other meshes then trains as it would without annotations.
        """
        return set(self.sizes) == {"data"} and not self.cuts and not self.absent

    def _absent_text(self, begin: str) -> str:
        if not self.absent:
            return ""
        listing = ", ".join(f"{name!r} to {axis!r} (of {path})" for (name, axis), path in self.absent.items())
        (name, axis), *_ = self.absent
        return (
            f"{begin}rules lead names to axes that the mesh lacks: {listing}. Add the axis to the mesh "
            f"(mesh={{{axis!r}: 2}}), or let the rule leave the dimension whole: ({name!r}, None)."
        )
