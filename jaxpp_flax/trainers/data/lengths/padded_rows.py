"""Examples of several lengths as the rows of one microbatch, padded to one length, with a mask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxpp_flax.trainers.errors import BatchError

__all__ = ["RowLayout", "leaves_by_name"]


def leaves_by_name(example: Any) -> dict[str, np.ndarray]:
    """Return the arrays of an example by name; an example that is one array is named "tokens".

    Example:
      >>> sorted(leaves_by_name({"tokens": [1, 2], "label": 3})), list(leaves_by_name([1, 2]))
      (['label', 'tokens'], ['tokens'])
    """
    named = example if isinstance(example, Mapping) else {"tokens": example}
    return {str(name): np.asarray(leaf) for name, leaf in named.items()}


@dataclass(frozen=True, kw_only=True)
class RowLayout:
    """How an example becomes a row: the type of each leaf, and the value that pads it.

    Attributes:
      kinds: of each leaf, its dtype and the shape behind the axis of tokens; the whole shape for a leaf without one.
      pads: the value behind the tokens of each leaf that has an axis of tokens.
      mask: the name of the leaf that is True for tokens, False for padding.
    """

    kinds: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]
    pads: Mapping[str, float]
    mask: str

    @classmethod
    def of(cls, example: Any, pad: float | Mapping[str, float], mask: str) -> RowLayout:
        """Return the layout that all examples share with this one; for the arguments, see `group_by_length`."""
        leaves = leaves_by_name(example)
        if mask in leaves:
            raise BatchError(
                f"the examples have a leaf {mask!r} of their own, which is the name of the mask to add. Name the mask "
                f'otherwise: mask="{mask}_of_tokens".'
            )
        if isinstance(pad, Mapping):
            unknown = sorted(set(pad) - set(leaves))
            if unknown:
                raise BatchError(f"pad names {unknown[0]!r}, but the examples have the leaves {sorted(leaves)}.")
            pads = dict(pad)
        else:
            pads = {name: pad for name, leaf in leaves.items() if leaf.ndim}
        without = sorted(name for name in pads if not leaves[name].ndim)
        if without or not pads:
            what = f"leaf {without[0]!r}" if without else f"of {sorted(leaves)} no leaf"
            raise BatchError(
                f"{what} of an example has an axis of tokens: an example is arrays of shape (length, ...)."
            )
        kinds = {name: (leaf.dtype, leaf.shape[name in pads :]) for name, leaf in leaves.items()}
        return cls(kinds=kinds, pads=pads, mask=mask)

    def length_of(self, example: Any, number: int) -> int:
        """Return the number of tokens of an example; raise a `BatchError` if it is of another layout."""
        leaves = leaves_by_name(example)
        if set(leaves) != set(self.kinds):
            raise BatchError(
                f"example {number} has the leaves {sorted(leaves)}, but the first one has {sorted(self.kinds)}. Give "
                "every example the same leaves."
            )
        for name, leaf in leaves.items():
            dtype, shape = self.kinds[name]
            if (leaf.dtype, leaf.shape[name in self.pads :], leaf.ndim) != (dtype, shape, self._ndim(name)):
                wanted = (f"({', '.join(['length', *map(str, shape)])})") if name in self.pads else f"{shape}"
                raise BatchError(
                    f"example {number} has {leaf.dtype}{list(leaf.shape)} at {name!r}, but the first one has {dtype} "
                    f"of shape {wanted} there. Examples may differ in length alone: convert the others, or name the "
                    "leaves with an axis of tokens: pad={name: value}."
                )
        lengths = {name: len(leaves[name]) for name in self.pads}
        if len(set(lengths.values())) > 1:
            raise BatchError(
                f"example {number} has leaves of several lengths: {lengths}. Give all of them one length, or name "
                "those with an axis of tokens: pad={name: value}."
            )
        return next(iter(lengths.values()))

    def _ndim(self, name: str) -> int:
        return len(self.kinds[name][1]) + (name in self.pads)

    def stacked(self, examples: Sequence[Any], rows: int, length: int) -> dict[str, np.ndarray]:
        """Return a microbatch of so many rows: the examples, and rows of padding behind them.

        Example:
          >>> layout = RowLayout.of([1, 2, 3], pad=0, mask="mask")
          >>> microbatch = layout.stacked([[1, 2, 3], [4]], rows=2, length=4)
          >>> microbatch["tokens"].tolist(), microbatch["mask"].sum(1).tolist()
          ([[1, 2, 3, 0], [4, 0, 0, 0]], [3, 1])
        """
        arrays: dict[str, np.ndarray] = {}
        for name, (dtype, shape) in self.kinds.items():
            axes = (rows, length) if name in self.pads else (rows,)
            arrays[name] = np.full((*axes, *shape), self.pads.get(name, 0), dtype)
        mask = np.zeros((rows, length), bool)
        for row, example in enumerate(examples):
            for name, leaf in leaves_by_name(example).items():
                if name not in self.pads:
                    arrays[name][row] = leaf
                    continue
                size = min(len(leaf), length)  # a longer one is cut where the user asks for it
                arrays[name][row, :size] = leaf[:size]
                mask[row, :size] = True
        return {**arrays, self.mask: mask}
