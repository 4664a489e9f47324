"""Two runs that should be equal: the first checkpoint at which they differ, and the leaves that differ there.

`python -m jaxpp_flax.verify bisect RUN OTHER` compares the directories of checkpoints of two runs.
"""

from __future__ import annotations

import argparse
import os
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from jaxpp_flax.checkpoint.checkpoint_store import CheckpointStore
from jaxpp_flax.checkpoint.format.paths import flatten, nest
from jaxpp_flax.checkpoint.reading import leaves_of, restore
from jaxpp_flax.commands.exit_status import exit_status
from jaxpp_flax.verify.errors import VerifyError
from jaxpp_flax.verify.rounding import apart, wide

__all__ = ["Parting", "bisect", "main"]

_SHOWN = 10  # leaves of a printed parting


@dataclass(frozen=True, kw_only=True)
class Parting:
    """The place at which two runs begin to differ.

    Args:
      equal: the step of the last checkpoint at which they agree; None if they agree at no checkpoint.
      differs: the step of the first checkpoint at which they differ; None if they agree at all checkpoints.
      leaves: for each leaf that differs there, its largest difference divided by its largest number, in descending
        order. Infinity for a leaf that only one run has, or that has different shapes.
    """

    equal: int | None
    differs: int | None
    leaves: dict[str, float]

    def __str__(self) -> str:
        """Return both steps in a sentence, and a list of the leaves."""
        if self.differs is None:
            return f"The runs agree up to their last common checkpoint, of step {self.equal}."
        before = "none before agrees" if self.equal is None else f"that of step {self.equal} agrees"
        lines = [f"{distance:9.2e}  {path}" for path, distance in list(self.leaves.items())[:_SHOWN]]
        more = [f"           and {len(self.leaves) - _SHOWN} more leaves"] if len(self.leaves) > _SHOWN else []
        remedy = "Restore the last equal checkpoint in both layouts, and call `verify` with the next batch."
        return "\n".join(
            [f"The checkpoint of step {self.differs} is the first that differs; {before}.", *lines, *more, remedy]
        )


def bisect(run: str | os.PathLike[str], other: str | os.PathLike[str], *, rtol: float = 1e-5) -> Parting:
    """Find the first common checkpoint at which two runs differ, by bisection.

    Bisection needs runs that stay different after the first difference. The runs may have different layouts, versions
    and numbers of processes: leaves are matched by their paths in the model. Of n common checkpoints, about log2(n) are
    compared; for each of these, both states are read into host memory.

    Args:
      run, other: the directories of `checkpoints=` of both runs.
      rtol: leaves count as equal if their difference, divided by the leaf's largest number, is not above this. With
        0.0, all values must be equal.

    Raises:
      VerifyError: if a directory does not exist, or the runs have no checkpoint of the same step.
      CheckpointNotFoundError, CorruptCheckpointError: if a checkpoint cannot be read.

    Example:
      >>> import tempfile, jax.numpy as jnp
      >>> from jaxpp_flax.checkpoint import save
      >>> run, other = tempfile.mkdtemp(), tempfile.mkdtemp()
      >>> for step in range(1, 5):
      ...     w = jnp.full(3, float(step))
      ...     _ = save(f"{run}/{step}", {"w": w, "b": w}), save(f"{other}/{step}", {"w": w + 0.5 * (step > 2), "b": w})
      >>> parting = bisect(run, other)
      >>> parting.equal, parting.differs, {path: round(of, 3) for path, of in parting.leaves.items()}
      (2, 3, {'w': 0.167})
    """
    stores = [CheckpointStore(place) for place in (run, other)]
    for store in stores:
        if not store.directory.is_dir():
            raise VerifyError(
                f"there is no directory {store.directory}. Give the directories of two runs' checkpoints."
            )
    steps = sorted(set(stores[0].steps()) & set(stores[1].steps()))
    if not steps:
        listed = " and ".join(
            f"{place} has {', '.join(map(str, of.steps())) or 'none'}"
            for place, of in zip((run, other), stores, strict=True)
        )
        raise VerifyError(f"the runs have no checkpoint of the same step: {listed}. Save both at the same steps.")
    differences = cache(lambda step: _differences(stores[0].path(step), stores[1].path(step), rtol))
    at = bisect_left(steps, True, key=lambda step: bool(differences(step)))
    differs = steps[at] if at < len(steps) else None
    leaves = {} if differs is None else differences(differs)
    return Parting(equal=steps[at - 1] if at else None, differs=differs, leaves=leaves)


def _differences(path: Path, other: Path, rtol: float) -> dict[str, float]:
    """Return how far apart the leaves of two checkpoints are that are not equal, the farthest first."""
    one, two = _read(path), _read(other)
    found = {name: _distance(one.get(name), two.get(name)) for name in one | two}
    return dict(sorted(((name, d) for name, d in found.items() if d > rtol), key=lambda item: -item[1]))


def _distance(one: Any, other: Any) -> float:
    if one is None or other is None or one.shape != other.shape:
        return float("inf")
    difference = float(apart(one, other).max(initial=0.0))
    largest = float(np.abs(wide(one)).max(initial=0.0))
    return difference / largest if largest and np.isfinite(largest) else difference


def _read(path: Path) -> dict[str, np.ndarray]:
    stored = {name: leaf for name, leaf in leaves_of(path).items() if leaf.shape is not None}
    target = nest({name: np.empty(leaf.shape or (), leaf.dtype) for name, leaf in stored.items()})
    return flatten(restore(path, target, extra="ignore"))[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print where two runs begin to differ; return 0 if they agree, 1 if they do not, 2 if they cannot be compared."""
    parser = argparse.ArgumentParser(prog="python -m jaxpp_flax.verify bisect", description=__doc__)
    parser.add_argument("run", help="the directory of one run's checkpoints")
    parser.add_argument("other", help="the directory of the other run's checkpoints")
    parser.add_argument("--rtol", type=float, default=1e-5, help="largest relative difference of equal leaves (1e-5)")
    given = parser.parse_args(arguments)

    def compare() -> int:
        parting = bisect(given.run, given.other, rtol=given.rtol)
        print(parting)
        return 0 if parting.differs is None else 1

    return exit_status(compare)
