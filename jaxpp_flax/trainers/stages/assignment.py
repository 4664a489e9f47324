"""Convert the value of `assignment=` (a name, sizes, a mapping, a plan, a file, a callable) to a policy."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from typing import TypeAlias, cast

from jaxpp_flax.engine.tracing.markers import Mark
from jaxpp_flax.messages import near_names
from jaxpp_flax.planning.plan import Plan
from jaxpp_flax.planning.stages.policies import AssignmentError, CutPolicy, balanced, by_name, even, sizes

__all__ = ["AssignmentLike", "resolve"]

AssignmentLike: TypeAlias = str | os.PathLike[str] | Mapping[str, int] | Sequence[int] | Plan | CutPolicy
"""The type of `assignment=`: see `resolve`."""

_NAMED = {"auto": even, "even": even, "balanced": balanced}  # where costs and schedule are known: see `Assigner`


def resolve(assignment: AssignmentLike) -> CutPolicy:
    """Return the policy for `"auto"`, `"even"`, `"balanced"`, sizes, names, a plan, its file, or a policy.

    Raises:
      AssignmentError: if `assignment` is an unknown string.
      TypeError: if `assignment` has another type.

    Example:
      >>> marks = [Mark(f"block_{i}", True, "model.py:7") for i in range(4)]
      >>> resolve("even")(marks, 2), resolve([1, 3])(marks, 2), resolve({"block_[012]": 0, "*": 1})(marks, 2)
      ((1,), (0,), (2,))
    """
    if isinstance(assignment, str):
        if assignment in _NAMED:
            return _NAMED[assignment]()
        if not assignment.endswith(".json"):
            raise AssignmentError(
                f"unknown assignment {assignment!r}.{near_names(assignment, list(_NAMED))} Use 'auto', 'even', "
                "'balanced', a list of sizes such as [3, 2, 3], a mapping from names of blocks to stages, a plan or "
                "its .json file, or a callable (marks, num_stages) -> indices of the marks that cut."
            )
    if isinstance(assignment, (str, os.PathLike)):
        return Plan.load(assignment)
    if isinstance(assignment, Plan):
        return assignment
    if isinstance(assignment, Mapping):
        return by_name(assignment)
    if isinstance(assignment, Sequence):
        return sizes(assignment)
    if callable(assignment):
        return _checked(cast(CutPolicy, assignment))
    raise TypeError(
        f"assignment is {assignment!r} ({type(assignment).__name__}); it must be 'auto', 'even', 'balanced', a list of "
        "sizes, a mapping from names of blocks to stages, a plan or its .json file, or a callable (marks, num_stages) "
        "-> indices of the marks that cut."
    )


def _checked(policy: CutPolicy) -> CutPolicy:
    """Wrap a user's own policy so that its result is checked."""

    def checked(marks: Sequence[Mark], num_stages: int) -> tuple[int, ...]:
        cuts = tuple(policy(marks, num_stages))
        increasing = all(before < after for before, after in itertools.pairwise(cuts))
        if len(cuts) != num_stages - 1 or not increasing or not all(0 <= cut < len(marks) for cut in cuts):
            raise AssignmentError(
                f"the assignment {policy!r} returned {cuts!r} for {len(marks)} marks and num_stages={num_stages}. "
                f"It must return {num_stages - 1} increasing indices of marks, each below {len(marks)}."
            )
        return cuts

    return checked
