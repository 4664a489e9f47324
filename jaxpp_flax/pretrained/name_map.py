"""A map of names: which tensor of a file fills which leaf of a model, and the order of its dimensions. Data only."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from jaxpp_flax.globs import captures, matches_any

T = TypeVar("T")

NO_RULE = "no rule of the map fills it. Add a Rule for it, or name it in keep="

_LAYER = "#"  # stands for the number of a layer in the name of a stacked rule's tensor


@dataclass(frozen=True)
class Rule:
    """Leaves of the model, and the tensors that fill them.

    To fill a leaf, a tensor's dimensions are split (`merge`), then permuted (`transpose`); then the tensors of several
    layers are stacked (`stack`). To write tensors, the inverse steps run in reverse order.

    Args:
      leaf: the path of a leaf, such as `layers/*/query/kernel`. Each `*` stands for any text.
      tensor: the name of its tensor, such as `model.layers.*.self_attn.q_proj.weight`. Each `*` stands for the text of
        the leaf's `*`, with "." for "/".
      transpose: the permutation from the tensor's dimensions to the leaf's, as in `numpy.transpose`.
      merge: for each dimension of the tensor, the number of the leaf's dimensions that it holds, before `transpose`:
        `(2, 1)` for a leaf of (heads, head size, width) and a tensor of (heads * head size, width). 0 stands for a
        dimension of size 1 that only the tensor has.
      stack: the dimension of the leaf that counts layers (`nnx.scan`, `nn.scan`). The tensor's name has "#" for the
        layer's number. If several leaves match, each has a part of the layers, in the order of their paths.

    Raises:
      ValueError: if the numbers of "*" differ, `transpose` is no permutation, `merge` has other dimensions than
        `transpose`, or only one of `stack` and "#" is given.

    Example:
      >>> rule = Rule("layers/*/query/kernel", "model.layers.*.self_attn.q_proj.weight", transpose=(1, 0))
      >>> print(rule)
      layers/*/query/kernel <- model.layers.*.self_attn.q_proj.weight, transpose (1, 0)
    """

    leaf: str
    tensor: str
    transpose: tuple[int, ...] | None = None
    merge: tuple[int, ...] | None = None
    stack: int | None = None

    def __post_init__(self) -> None:
        if (self.stack is None) == (_LAYER in self.tensor):
            raise ValueError(
                f"Rule({self.leaf!r}, {self.tensor!r}, stack={self.stack}): stack= and a {_LAYER!r} in the tensor's "
                "name, for the layer's number, belong together. Give both or neither."
            )
        stars = 0 if self.stack is not None else self.leaf.count("*")
        if self.tensor.count("*") != stars:
            raise ValueError(
                f"Rule({self.leaf!r}, {self.tensor!r}): the tensor's name needs {stars} '*', as many as the leaf's "
                "path (none for a stacked rule)."
            )
        if self.transpose is not None and sorted(self.transpose) != list(range(len(self.transpose))):
            raise ValueError(f"Rule({self.leaf!r}): transpose={self.transpose} is no permutation of the dimensions.")
        dims = len(self.transpose) if self.transpose is not None else None
        if self.merge is not None and dims is not None and sum(self.merge) != dims:
            raise ValueError(
                f"Rule({self.leaf!r}): merge={self.merge} does not sum up to the {dims} dimensions of transpose."
            )

    def __str__(self) -> str:
        steps = [f"{name} {of}" for name in ("merge", "transpose", "stack") if (of := getattr(self, name)) is not None]
        return ", ".join([f"{self.leaf} <- {self.tensor}", *steps])

    def fits(self, ndim: int) -> bool:
        """Return True if the rule is for leaves with `ndim` dimensions.

        Example:
          >>> Rule("kernel", "weight", transpose=(1, 0)).fits(3)
          False
        """
        inner = ndim - (self.stack is not None)
        if self.stack is not None and not 0 <= self.stack < ndim:
            return False
        counts = [len(self.transpose)] if self.transpose is not None else []
        counts += [sum(self.merge)] if self.merge is not None else []
        return all(count == inner for count in counts)

    def before_transpose(self, of_leaf: Sequence[T]) -> tuple[T, ...]:
        """Arrange what belongs to the dimensions of a leaf, such as its sizes, as in one layer before `transpose`.

        Example:
          >>> Rule("q", "#.q.weight", transpose=(2, 0, 1), stack=0).before_transpose((8, "width", "heads", "size"))
          ('heads', 'size', 'width')
        """
        inner = [of for dim, of in enumerate(of_leaf) if dim != self.stack]
        order = range(len(inner)) if self.transpose is None else np.argsort(self.transpose)
        return tuple(inner[dim] for dim in order)

    def grouped(self, split: Sequence[T]) -> list[Sequence[T]]:
        """Group what `before_transpose` arranges: a group for each dimension of the tensor.

        Example:
          >>> Rule("q", "q.weight", merge=(2, 0, 1)).grouped(("heads", "size", "width"))
          [('heads', 'size'), (), ('width',)]
        """
        counts = (1,) * len(split) if self.merge is None else self.merge
        return [split[end - count : end] for count, end in zip(counts, itertools.accumulate(counts), strict=True)]

    def tensor_shape(self, leaf_shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the tensor that fills a leaf of this shape, or one layer of it.

        Example:
          >>> Rule("q", "q.weight", merge=(2, 1), transpose=(2, 0, 1)).tensor_shape((64, 4, 16))
          (64, 64)
          >>> Rule("q", "#.q.weight", transpose=(1, 0), stack=0).tensor_shape((8, 2, 3))
          (3, 2)
        """
        return tuple(map(math.prod, self.grouped(self.before_transpose(leaf_shape))))


@dataclass(frozen=True)
class Fill:
    """A leaf with its rule, and its tensors: one, or one for each layer of a stack."""

    leaf: str
    rule: Rule
    tensors: tuple[str, ...]


@dataclass(frozen=True)
class NameMap:
    """The rules by which files of another library fill a model, and by which a model is written to such files.

    Args:
      rules: the rules; every leaf of the model must match exactly one of them.
      prefix: a prefix that the names in a file may have or lack, such as `transformer.` for GPT-2. An export writes it.
      ignore: globs of tensors in a file that no leaf needs, such as masks.
      ties: tensors that a file leaves out if they are tied to another tensor, with the name of that tensor:
        `{"lm_head.weight": "model.embed_tokens.weight"}`.

    Example:
      >>> names = NameMap((Rule("embed/embedding", "wte.weight"), Rule("blocks/*/scale", "h.*.ln.weight")))
      >>> print(names)
      embed/embedding <- wte.weight
      blocks/*/scale <- h.*.ln.weight
      >>> fills, faults = names.resolve({"embed/embedding": (8, 4), "blocks/3/scale": (4,), "head/kernel": (4, 8)})
      >>> [(fill.leaf, fill.tensors) for fill in fills]
      [('embed/embedding', ('wte.weight',)), ('blocks/3/scale', ('h.3.ln.weight',))]
      >>> faults
      ['head/kernel: no rule of the map fills it. Add a Rule for it, or name it in keep=']
    """

    rules: tuple[Rule, ...]
    prefix: str = ""
    ignore: tuple[str, ...] = ()
    ties: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        more = [f"prefix {self.prefix}"] if self.prefix else []
        more += [f"ignored: {name}" for name in self.ignore] + [f"tie: {a} = {b}" for a, b in self.ties.items()]
        return "\n".join([*map(str, self.rules), *more])

    def is_ignored(self, tensor: str) -> bool:
        """Return True if no leaf needs this tensor of a file.

        Example:
          >>> NameMap((), ignore=("*.attn.bias",)).is_ignored("h.0.attn.bias")
          True
        """
        return matches_any(self.ignore)(tensor)

    def resolve(self, shapes: Mapping[str, Sequence[int]]) -> tuple[list[Fill], list[str]]:
        """Return the tensors of each leaf, and a line for each fault.

        Faults are a leaf without a rule, with several rules, or with a rule for another number of dimensions, and a
        tensor that fills several leaves.

        Args:
          shapes: the shapes of the model's leaves by path.
        """
        fills, faults = [], []
        layers = self._layers(shapes)
        for leaf, shape in shapes.items():
            found = [(rule, stars) for rule in self.rules if (stars := captures(leaf, rule.leaf)) is not None]
            if len(found) != 1:
                texts = " and ".join(f"({rule})" for rule, _ in found)
                faults.append(
                    f"{leaf}: filled twice, by {texts}. Keep one, or let the '*' of one match less"
                    if found
                    else f"{leaf}: {NO_RULE}"
                )
                continue
            ((rule, stars),) = found
            if not rule.fits(len(shape)):
                faults.append(
                    f"{leaf}: has shape {tuple(shape)}, and its rule is for another number of dimensions: {rule}. "
                    "Change the rule's transpose= and merge=, or add one for this leaf"
                )
                continue
            fills.append(Fill(leaf, rule, _tensors(rule, stars, layers.get(leaf, range(0)))))
        return fills, faults + _shared(fills)

    def _layers(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, range]:
        """Return the numbers of the layers in each stacked leaf: the leaves of one rule have the layers in order."""
        layers: dict[str, range] = {}
        for rule in self.rules:
            if rule.stack is None:
                continue
            first = 0
            for leaf in sorted((leaf for leaf in shapes if captures(leaf, rule.leaf) is not None), key=_natural):
                count = shapes[leaf][rule.stack] if rule.stack < len(shapes[leaf]) else 0
                layers[leaf] = range(first, first + count)
                first += count
        return layers


IDENTITY = NameMap((Rule("*", "*"),))
"""Each leaf has a tensor of the same name, with "." for "/"."""


def _tensors(rule: Rule, stars: Sequence[str], layers: range) -> tuple[str, ...]:
    if rule.stack is not None:
        return tuple(rule.tensor.replace(_LAYER, str(layer)) for layer in layers)
    name = rule.tensor
    for text in stars:
        name = name.replace("*", text.replace("/", "."), 1)
    return (name,)


def _shared(fills: Iterable[Fill]) -> list[str]:
    """List the tensors that several leaves would read or write."""
    first: dict[str, str] = {}
    faults: list[str] = []
    for fill in fills:
        for tensor in fill.tensors:
            other = first.setdefault(tensor, fill.leaf)
            if other != fill.leaf:
                faults.append(f"{fill.leaf}: its tensor {tensor} fills {other} too. Give each leaf its own in the map")
    return faults


def _natural(path: str) -> list[Any]:
    """Return a sort key that puts `stage_2` before `stage_10`."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path)]
