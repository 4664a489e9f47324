"""The likely class of a difference, from numbers alone: what known bugs would make, and what arrays have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

__all__ = ["Case", "classify"]


@dataclass(frozen=True)
class Case:
    """What is known of an array that differs, in double precision.

    Args:
      expected, actual: the array of the plain step and of the pipeline.
      parts: the summands of the microbatches on the plain side, stacked; or for what is stacked itself, None.
      stacked: the array has a first axis of microbatches.
      allowed: how far rounding explains a difference.
      num_microbatches, num_shards: the counts by which a sum may be scaled wrongly.
      before: for a leaf of the new state, its value before the step.
      dtype: the type of the array.
      is_exact: the array holds no floats: integers, booleans or bits.
    """

    expected: np.ndarray
    actual: np.ndarray
    allowed: float
    num_microbatches: int
    parts: np.ndarray | None = None
    stacked: bool = False
    num_shards: int = 1
    before: np.ndarray | None = None
    dtype: str = "float32"
    is_exact: bool = False

    def is_near(self, other: np.ndarray | float, times: float = 1.0, at: Any = ...) -> bool:
        """Return True if the actual array, or its part at an index, is another one, but for rounding."""
        with np.errstate(invalid="ignore"):
            return bool(np.all(np.abs(self.actual[at] - other) <= times * self.allowed + 1e-300))


def _random_bits(case: Case) -> str | None:
    """Dropped numbers are zeros: where they lie is what a key decides."""
    zeros, others = case.expected == 0, case.actual == 0
    both = bool(zeros.any() and others.any()) and not zeros.all() and not others.all()
    differing = float(np.mean(zeros != others))
    alike = abs(float(zeros.mean()) - float(others.mean())) < 0.25
    return "other random bits" if both and alike and differing > 0.02 else None


def _known_bugs(case: Case) -> Iterator[tuple[str, Any, float]]:
    """Yield what bugs would make of the array, in words, as numbers, and times how much rounding explains."""
    if case.before is not None:
        yield "a missing update: the leaf is as it was before the step", case.before, 1.0
    parts = [] if case.parts is None or len(case.parts) < 2 else case.parts
    for i, part in enumerate(parts):
        if np.all(np.abs(part) <= case.allowed):
            continue
        yield f"a microbatch dropped: number {i} is not in the sum", case.expected - part, 1.0
        yield f"a doubled microbatch: number {i} is twice in the sum", case.expected + part, 1.0
        yield f"microbatches dropped: the sum holds number {i} alone", part, 1.0
        for other in (parts[j] for j in range(len(parts)) if j != i):
            words = f"a microbatch swapped: another one is in the sum in place of number {i}"
            yield words, case.expected - part + other, 1.0
    start = 0.0 if case.before is None else case.before  # an update is scaled, not what it is added to
    for factor, words in _factors(case):
        yield words, start + factor * (case.expected - start), max(1.0, abs(factor))


def _factors(case: Case) -> Iterator[tuple[float, str]]:
    count, shards = case.num_microbatches, case.num_shards
    yield 2.0, "a doubled reduction: the sum is counted twice"
    yield 0.0, "a missing reduction: all zeros"
    if count > 1:
        yield count, f"a scale by the number of microbatches ({count})"
        yield 1 / count, f"a scale by 1 / the number of microbatches (1/{count})"
    if shards > 1:
        yield shards, f"a doubled reduction, or a scale by the number of shards ({shards})"
        yield 1 / shards, f"a missing reduction, or a scale by 1 / the number of shards (1/{shards})"
    yield 0.5, "a missing reduction: half of the sum"
    yield -1.0, "a wrong sign"


def _swapped(case: Case) -> str | None:
    """Microbatches at one another's places."""
    if not case.stacked or len(case.expected) < 2:
        return None
    numbers = range(len(case.expected))
    wrong = [i for i in numbers if not case.is_near(case.expected[i], at=i)]
    from_others = [next((j for j in numbers if case.is_near(case.expected[j], at=i)), None) for i in wrong]
    if None in from_others:
        return None
    return f"microbatches swapped: number {from_others[0]} is in the place of number {wrong[0]}"


def _reordered(case: Case) -> str | None:
    """The same numbers at other places: shards, or axes, taken for one another."""
    if case.expected.size < 2 or np.ptp(np.real(case.expected)) <= 2 * case.allowed:
        return None
    pairs = (np.sort(np.real(case.actual), axis=None), np.sort(np.real(case.expected), axis=None))
    near = bool(np.all(np.abs(pairs[0] - pairs[1]) <= case.allowed))
    return "shards swapped: the same numbers at other places" if near else None


def _cast(case: Case) -> str | None:
    """Numbers as far from the expected ones as the rounding of a narrower type."""
    if case.is_exact:
        return None
    width = jnp.finfo(case.dtype).bits
    for name in ("float16", "bfloat16"):
        kind = jnp.finfo(name)
        largest = np.max(np.abs(case.expected))
        if kind.bits < width and np.max(np.abs(case.actual - case.expected)) <= float(kind.eps) * largest:
            return f"a cast to {name}, or to another narrower type"
    return None


def _other_order(case: Case) -> str | None:
    return "another order of sums" if case.is_near(case.expected, times=8.0) else None


def _stale(case: Case) -> str | None:
    """Some microbatches are right, and the others have numbers of the same size that belong to none."""
    if not case.stacked or len(case.expected) < 2:
        return None
    right = [case.is_near(of, at=i) for i, of in enumerate(case.expected)]
    sizes = np.max(np.abs(case.actual)), np.max(np.abs(case.expected))
    alike = sizes[0] <= 8 * sizes[1] and sizes[1] <= 8 * sizes[0]
    return "a stale residual: only some microbatches are wrong" if any(right) and alike else None


_OTHERS: tuple[Callable[[Case], str | None], ...] = (
    _swapped, _random_bits, _reordered, _other_order, _cast, _stale,
)  # fmt: skip


def classify(case: Case) -> str:
    """Return the likely class of a difference, in words.

    Example:
      >>> parts = np.array([[1.0, 2.0], [3.0, 5.0], [0.5, 0.25]])
      >>> def of(actual):
      ...     return classify(Case(parts.sum(0), actual, allowed=1e-6, num_microbatches=3, parts=parts))
      >>> of(3 * parts.sum(0))
      'a scale by the number of microbatches (3)'
      >>> of(parts[2])
      'microbatches dropped: the sum holds number 2 alone'
      >>> of(np.array([8.0, 1.0]))
      'unknown'
    """
    if np.isfinite(case.expected).all() > np.isfinite(case.actual).all():
        return "values that are not finite"
    for words, made, times in _known_bugs(case):
        if case.is_near(made, times):
            return words
    return next((words for of in _OTHERS if (words := of(case)) is not None), "unknown")
