"""Whether the metric of `Checkpoints(best=)` exists: told at the first evaluation, not when the best is asked for."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from jaxpp_flax.checkpoint.best import Best
from jaxpp_flax.messages import near_names, warn_user
from jaxpp_flax.trainers.callbacks.base import Callback
from jaxpp_flax.trainers.callbacks.evaluate import Evaluate

__all__ = ["RankingCheck"]

_PREFIX = "eval_"


class RankingCheck:
    """Looks for the metric that ranks checkpoints, among those that a run has.

    Args:
      best: the metric; None: nothing is looked for.
      by_itself: False if the loop saves only where the user calls `trainer.save`: nothing is told before that.

    Example:
      >>> ranking = RankingCheck(Best("loss"))
      >>> ranking.saved(2, ["loss"])
      >>> ranking.end()
    """

    def __init__(self, best: Best | None, *, by_itself: bool = True) -> None:
        self._best, self._by_itself = best, by_itself
        self._missing: str | None = None  # what is to be told
        self._evaluates, self._is_told, self._saved, self._ranked = False, False, list[int](), 0

    def begin(self, callbacks: Sequence[Callback]) -> None:
        """Note whether a loop with these callbacks evaluates.

        Raises:
          ValueError: if the loop saves, the metric is one of an evaluation, and there is none.
        """
        self._evaluates = any(isinstance(callback, Evaluate) for callback in callbacks)
        if not self._by_itself or self._best is None or self._evaluates:
            return
        if self._best.best.startswith(_PREFIX):
            raise ValueError(
                f"Checkpoints(best={self._best.best!r}) ranks checkpoints by a metric of an evaluation, and this loop "
                "has none: pass fit(eval_data=, eval_every=), the callback Evaluate, or a metric of the step, such as "
                'best="loss".'
            )

    def measured(self, step: int, names: Collection[str], *, evaluated: bool) -> None:
        """Warn once if a step has all metrics that there will be, `names`, and not the one that ranks."""
        if self._best is None or self._is_told or evaluated != self._evaluates:
            return
        self._is_told, best = True, self._best.best
        if best not in names:
            self._missing = (
                f"Checkpoints(best={best!r}): step {step} has no number of this name, so no checkpoint will be the "
                f"best. It has: {', '.join(sorted(names))}.{near_names(best, names)}"
            )
            self._tell_missing()

    def saved(self, step: int, names: Collection[str]) -> None:
        """Note a checkpoint with these metrics."""
        if self._best is not None:
            self._saved.append(step)
            self._ranked += self._best.best in names
            self._tell_missing()

    def _tell_missing(self) -> None:
        """Warn that the metric does not exist, if there are checkpoints, or the loop will save some."""
        if self._missing is not None and (self._by_itself or self._saved):
            warn_user(self._missing)
            self._missing = self._best = None

    def end(self) -> None:
        """Warn if no checkpoint of the run has the metric."""
        if self._best is not None and self._saved and not self._ranked:
            warn_user(
                f"Checkpoints(best={self._best.best!r}): none of the checkpoints of this run has this metric (the last "
                f"is of step {self._saved[-1]}), so none is the best. Save and evaluate at the same steps: every=, "
                "eval_every=."
            )
