"""The choice between even and balanced stages: balanced ones must have a clearly shorter simulated step.

Even stages of identical blocks are identical: they share one lowering and one compilation. A small gain, which may
well be smaller than the estimate's error, is not worth their loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxpp_flax.assignment.balancing import Balance
from jaxpp_flax.assignment.simulated_step import StepTime
from jaxpp_flax.messages import amount

__all__ = ["MARGIN", "StagesChoice", "choose", "is_clearly_less"]

MARGIN = 0.05
"""The share of the step's time that balanced stages must save over even ones to be chosen."""


@dataclass(frozen=True, kw_only=True)
class StagesChoice:
    """The assignment that `"auto"` chose, with the estimates.

    Attributes:
      chosen: "even" or "balanced".
      even, balanced: the simulated times of a step with even and with balanced stages, in the unit of the costs.
      searched: False if no balanced stages were searched; then `balanced` is the time with stages of equal cost.
      reason: why the estimates did not decide; "" if they did.

    Example:
      >>> print(StagesChoice(chosen="even", even=100.0, balanced=97.0).text("FLOP"))
      assignment "auto": even stages; simulated step: even 100 FLOP, balanced 97 FLOP (-3%; chosen from -5% on)
    """

    chosen: str
    even: float
    balanced: float
    searched: bool = True
    reason: str = ""

    def text(self, unit: str) -> str:
        """Return the choice and the estimates as one line."""
        change = f"{self.balanced / self.even - 1.0:+.0%}" if self.even else "+0%"
        other = "balanced" if self.searched else "stages of equal cost"
        because = f" ({self.reason})" if self.reason else ""
        even, best = amount(self.even, unit), amount(self.balanced, unit)
        figures = f"simulated step: even {even}, {other} {best} ({change}; chosen from {-MARGIN:.0%} on)"
        return f'assignment "auto": {self.chosen} stages{because}; {figures}'


def is_clearly_less(balanced: float, even: float) -> bool:
    """Return whether a cost with balanced stages is less than the cost with even ones by the margin.

    Example:
      >>> is_clearly_less(90.0, 100.0), is_clearly_less(96.0, 100.0), is_clearly_less(0.0, 0.0)
      (True, False, False)
    """
    return balanced < (1.0 - MARGIN) * even


def choose(
    even: Sequence[int],
    step: StepTime,
    search: Callable[[], Balance],
    *,
    fits: Callable[[Sequence[int]], bool] = lambda sizes: True,
    can_cut: Callable[[Sequence[int]], bool] = lambda sizes: True,
) -> tuple[Balance | None, StagesChoice]:
    """Return the balanced stages and the choice; the stages are None if the even ones are chosen.

    Args:
      even: the sizes of even stages.
      step: the time of a step for sizes of stages.
      search: finds balanced stages that fit; called only if even stages do not fit, or stages of equal cost would be
        clearly faster.
      fits: whether stages of these sizes keep within the memory limit without recomputation or offload.
      can_cut: whether the model can be cut into stages of these sizes.

    Example:
      >>> from jaxpp_flax.assignment.balancing import balance
      >>> from jaxpp_flax.schedules import Std1F1B
      >>> costs = [1.0, 1.0, 1.0, 5.0]
      >>> step = StepTime(schedule=Std1F1B(2), num_microbatches=4, forward=costs, backward=[0.0] * 4)
      >>> stages, choice = choose([2, 2], step, lambda: balance(costs, range(2)))
      >>> stages.sizes, choice.chosen, choice.even, choice.balanced
      ((3, 1), 'balanced', 26.0, 23.0)
    """
    even_step, even_fits = step(even), fits(even)
    if even_fits and not is_clearly_less(equal := step.with_equal_stages(), even_step):
        return None, StagesChoice(chosen="even", even=even_step, balanced=equal, searched=False)
    found = search()
    balanced_step = step(found.sizes)
    if not even_fits:
        reason = "even stages exceed memory_limit"
        return found, StagesChoice(chosen="balanced", even=even_step, balanced=balanced_step, reason=reason)
    if not is_clearly_less(balanced_step, even_step):
        return None, StagesChoice(chosen="even", even=even_step, balanced=balanced_step)
    if not can_cut(found.sizes):
        reason = "the model cannot be cut into the balanced ones"
        return None, StagesChoice(chosen="even", even=even_step, balanced=balanced_step, reason=reason)
    return found, StagesChoice(chosen="balanced", even=even_step, balanced=balanced_step)
