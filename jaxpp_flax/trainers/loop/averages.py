"""Averages over a whole data set, from the sums of its batches."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from jaxpp_flax.trainers.step.loss import LossTerms

__all__ = ["Average"]


class Average:
    """Adds up batches on the host, in float64; each batch counts by its weight, or by its number of examples.

    Example:
      >>> average = Average()
      >>> average.add(LossTerms(total=4.0, weight=None, metrics={}), num_microbatches=2, num_examples=8)
      >>> average.add(LossTerms(total=1.0, weight=None, metrics={}), num_microbatches=1, num_examples=4)
      >>> average.result()["loss"] == (2.0 * 8 + 1.0 * 4) / 12
      True
    """

    def __init__(self) -> None:
        self._sums: defaultdict[str, Any] = defaultdict(float)
        self._weights: defaultdict[str, Any] = defaultdict(float)

    def add(self, terms: LossTerms, num_microbatches: int, num_examples: int) -> None:
        """Add a batch's terms, summed over its microbatches."""
        loss = terms.total if terms.weight is None else (terms.total, terms.weight)
        for name, value in {"loss": loss, **terms.metrics}.items():
            if isinstance(value, tuple):
                total, weight = (np.asarray(part, np.float64) for part in value)
            else:
                total = np.asarray(value, np.float64) / num_microbatches * num_examples
                weight = np.float64(num_examples)
            self._sums[name] = self._sums[name] + total
            self._weights[name] = self._weights[name] + weight

    def result(self) -> dict[str, Any]:
        """Return the averages: floats, or NumPy arrays."""
        means: dict[str, Any] = {}
        for name, total in self._sums.items():
            weight = self._weights[name]
            mean = np.asarray(total / np.where(weight == 0, 1.0, weight))
            means[name] = float(mean) if mean.ndim == 0 else mean
        return means
