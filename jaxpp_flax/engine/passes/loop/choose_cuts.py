"""Choose the marks of a loop body that cut: ask the policy, and check its answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from jaxpp_flax.engine.passes.loop.open_loops import OpenLoop

__all__ = ["choose_cuts"]


def choose_cuts(loop: OpenLoop, choose: Callable[[OpenLoop], Sequence[int]]) -> OpenLoop:
    """Ask the cut policy for the marks that cut.

    Raises:
      ValueError: if the chosen marks do not make as many stages as the schedule has.
    """
    cuts, stages = tuple(choose(loop)), loop.schedule.num_stages
    legal = len(cuts) == stages - 1 and list(cuts) == sorted({*cuts})
    marks = len(loop.body.marks)
    if not legal or any(not 0 <= c < marks for c in cuts):
        raise ValueError(
            f"the cut policy chose the marks {list(cuts)} of {marks} for {stages} stages: it must "
            f"return {stages - 1} different indices in ascending order."
        )
    return replace(loop, cuts=cuts)
