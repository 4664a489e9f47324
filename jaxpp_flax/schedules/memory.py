"""Memory while something runs: bytes come and go in an order; what is live then, and the most at one time.

The order comes from what runs: tasks and copies by their times (the simulator), a rank's tasks one after the other
(planners), or the instructions of a compiled program (`engine/program/live_memory.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxpp_flax.schedules.task import MEANING, Task

__all__ = ["MemoryInUse", "StageBytes"]


class MemoryInUse:
    """The bytes in one memory, a rank's devices or its host, while something runs.

    Call `change` in the order in which bytes come (a number above 0) and go (below 0).

    Attributes:
      live: the bytes now.
      kinds: the bytes now, by kind.
      peak: the most at one time.
      at_peak: the bytes of the peak, by kind.

    Example:
      >>> memory = MemoryInUse()
      >>> for nbytes, kind in ((8, "weights"), (4, "activations"), (-4, "activations"), (2, "activations")):
      ...     memory.change(nbytes, kind)
      >>> memory.live, memory.peak, memory.at_peak
      (10, 12, {'weights': 8, 'activations': 4})
    """

    __slots__ = ("at_peak", "kinds", "live", "peak")

    def __init__(self) -> None:
        self.live: float = 0
        self.peak: float = 0
        self.at_peak: dict[str, float] = {}
        self.kinds: dict[str, float] = {}

    def change(self, nbytes: float, kind: str = "") -> None:
        """Add bytes of a kind, or take them away."""
        if not nbytes:
            return
        self.live += nbytes
        self.kinds[kind] = self.kinds.get(kind, 0) + nbytes
        if self.live > self.peak:
            self.peak = self.live
            self.at_peak = self.kinds.copy()


@dataclass(frozen=True, slots=True)
class StageBytes:
    """The bytes of one microbatch in one stage.

    Attributes:
      activation: what a forward makes for its backward.
      saved: what stays from the forward to the backward: the activation, or less in a stage that recomputes.
      kept: what stays from the input gradient to the weight gradient.
      passing: what a forward makes for other stages alone; it leaves when the forward has ended.
      received: the input from the stage before. When the forward starts, it counts as a part of what is saved.
      gradient: the gradient from the next stage. The backward reads it beside its residuals.
      region: the workspace of a backward, with what the user's `jax.checkpoint` makes again.

    Example:
      >>> from jaxpp_flax.schedules.task import backward, forward
      >>> again = StageBytes(activation=8.0, saved=2.0)
      >>> again.changes(forward(0, 0)), again.changes(backward(0, 0))
      ((2.0, 0.0), (6.0, -8.0))
    """

    activation: float = 1.0
    saved: float = 1.0
    kept: float = 1.0
    passing: float = 0.0
    received: float = 0.0
    gradient: float = 0.0
    region: float = 0.0

    @property
    def recomputed(self) -> float:
        """What a backward makes for itself, and holds while it runs: the residuals once more, or its workspace."""
        return max(0.0, self.activation - self.saved, self.region)

    def made_again(self, task: Task) -> float:
        """Return what a task makes for itself: a part of what it takes, gone when it ends."""
        takes = MEANING[task.kind].takes
        return sum((getattr(self, name) for name in ("recomputed", "region") if name in takes), 0.0)

    def changes(self, task: Task) -> tuple[float, float]:
        """Return the change of what the stage holds when a task starts, and the one when it ends."""
        meaning = MEANING[task.kind]
        takes, frees, leaves = (
            sum((getattr(self, name) for name in names), 0.0)
            for names in (meaning.takes, meaning.frees, meaning.leaves)
        )
        return takes, leaves - frees
