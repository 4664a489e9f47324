"""Lines through the numbers of two sizes of a microbatch, and whether a third size lies on them.

Most numbers of a block are linear in the examples of a microbatch. Those of a mixture of experts whose capacity is that
of a whole microbatch, or of a contrastive loss, grow with its square: no line gives them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxpp_flax.planning.quoting.facts import TaskFacts, interpolated

__all__ = ["are_alike", "between", "is_on_line", "mixed_work"]

_TOLERANCE = 0.05  # of a number; a sum of several terms, of which the largest counts, is not quite linear
_SMALL = 1e-3  # of the largest number: what is smaller does not matter

Pair = tuple[TaskFacts, TaskFacts]  # forward and backward


def between(one: float, other: float, share: float) -> float:
    """Return the number on the line through two, at a share of the way; none is below 0.

    Example:
      >>> between(2.0, 4.0, 3.0), between(2.0, 4.0, -2.0)
      (8.0, 0.0)
    """
    return max(one + (other - one) * share, 0.0)


def are_alike(one: Sequence[Pair], other: Sequence[Pair]) -> bool:
    """Return whether the blocks do the same operations at both sizes."""
    return all(
        len(a.products) == len(b.products) and len(a.collectives) == len(b.collectives)
        for pairs in zip(one, other, strict=True)
        for a, b in zip(*pairs, strict=True)
    )


def mixed_work(one: Sequence[Pair], other: Sequence[Pair], share: float) -> list[Pair]:
    """Return the work of the blocks on the lines through that of two sizes."""
    return [(interpolated(a[0], b[0], share), interpolated(a[1], b[1], share)) for a, b in zip(one, other, strict=True)]


def is_on_line(works: Sequence[Sequence[Pair]], nbytes: Sequence[Mapping[Any, float]], share: float) -> bool:
    """Return whether the third size lies on the lines through the first two.

    Args:
      works: the work of the blocks at the three sizes.
      nbytes: what the blocks hold and send at the three sizes, by name.
      share: where the third size lies; see `between`.
    """
    one, two, three = works
    if not (are_alike(one, two) and are_alike(one, three)):
        return False
    lines = mixed_work(one, two, share)
    for pair, found in zip(lines, three, strict=True):
        if not _near([n for of in pair for n in _numbers(of)], [n for of in found for n in _numbers(of)]):
            return False
    first, second, third = nbytes
    names = [*{**first, **second, **third}]
    on_line = [between(first.get(name, 0.0), second.get(name, 0.0), share) for name in names]
    return _near(on_line, [third.get(name, 0.0) for name in names])


def _numbers(of: TaskFacts) -> Iterable[float]:
    """Return the operations, and the bytes, of a task; both in operations, of which a device does some 100 a byte."""
    yield from (each.times * each.flops for each in of.products)
    yield from (100 * nbytes for nbytes in (of.moved, of.saved, *(each.nbytes for each in of.collectives)))


def _near(one: Sequence[float], other: Sequence[float]) -> bool:
    least = _SMALL * max(*one, *other, 1e-9)
    return all(abs(a - b) <= _TOLERANCE * max(a, b) for a, b in zip(one, other, strict=True) if max(a, b) > least)
