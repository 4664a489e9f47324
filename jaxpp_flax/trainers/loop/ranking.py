"""Whether the metric of `Checkpoints(best=)` exists: told at the first evaluation, not when the best is asked for."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from jaxpp_flax.checkpoint.best import Best
from jaxpp_flax.messages import near_names, warn_user
from jaxpp_flax.trainers.callbacks.base import Callback
from jaxpp_flax.trainers.callbacks.evaluate import Evaluate

__all__ = ["Ranking"]

_PREFIX = "eval_"


class Ranking:
    """Looks for the metric that ranks checkpoints, among those that a run has.

    Args:
      best: the metric; None: nothing is looked for.

    Example:
      >>> ranking = Ranking(Best("loss"))
      >>> ranking.saved(2, ["loss"])
      >>> ranking.end()
    """

    def __init__(self, best: Best | None) -> None:
        self._best = best
        self._evaluates, self._is_told, self._saved, self._ranked = False, False, list[int](), 0

    def begin(self, callbacks: Sequence[Callback]) -> None:
        """Note whether a loop with these callbacks evaluates.

        Raises:
          ValueError: if the metric is one of an evaluation, and there is none.
        """
        self._evaluates = any(isinstance(callback, Evaluate) for callback in callbacks)
        if self._best is not None and self._best.best.startswith(_PREFIX) and not self._evaluates:
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
            warn_user(
                f"Checkpoints(best={best!r}): step {step} has no number of this name, so no checkpoint will be the "
                f"best. It has: {', '.join(sorted(names))}.{near_names(best, names)}"
            )
            self._best = None

    def saved(self, step: int, names: Collection[str]) -> None:
        """Note a checkpoint with these metrics."""
        if self._best is not None:
            self._saved.append(step)
            self._ranked += self._best.best in names

    def end(self) -> None:
        """Warn if no checkpoint of the run has the metric."""
        if self._best is not None and self._saved and not self._ranked:
            warn_user(
                f"Checkpoints(best={self._best.best!r}): none of the checkpoints of this run has this metric (the last "
                f"is of step {self._saved[-1]}), so none is the best. Save and evaluate at the same steps: every=, "
                "eval_every=."
            )
