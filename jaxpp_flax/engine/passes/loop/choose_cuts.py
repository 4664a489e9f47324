"""Choose the marks that cut, for each loop: ask the policy, and check its answer.

The last loop of a step is asked for first: it is the one that trains, and earlier ones compute what it trains on. A
policy that gives all loops the same stages then decides by the work of training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from jaxpp_flax.engine.passes.loop.loop import Loop, Step

__all__ = ["choose_cuts"]


def choose_cuts(step: Step, choose: Callable[[Loop], Sequence[int]]) -> Step:
    """Ask the cut policy for the marks that cut each loop, beginning with the last one.

    Raises:
      ValueError: if the chosen marks do not make as many stages as the schedule has.
    """
    return replace(step, loops=tuple(_cut(loop, choose) for loop in reversed(step.loops))[::-1])


def _cut(loop: Loop, choose: Callable[[Loop], Sequence[int]]) -> Loop:
    cuts, stages = tuple(choose(loop)), loop.schedule.num_stages
    legal = len(cuts) == stages - 1 and list(cuts) == sorted({*cuts})
    marks = len(loop.body.marks)
    if not legal or any(not 0 <= c < marks for c in cuts):
        raise ValueError(
            f"the cut policy chose the marks {list(cuts)} of {marks} for {stages} stages: it must "
            f"return {stages - 1} different indices in ascending order."
        )
    return replace(loop, cuts=cuts)
