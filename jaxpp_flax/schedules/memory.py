"""The one walk of memory: bytes come and go in an order; what is live then, and the most at one time.

The order comes from what runs: tasks and copies by their times (the simulator), a rank's tasks one after the other
(planners), or the instructions of a compiled program (`engine/program/live_memory.py`). The bytes of a stage come from
what knows the model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxpp_flax.schedules.gathers import GatheredParameter
from jaxpp_flax.schedules.residuals import HostCopy
from jaxpp_flax.schedules.task import MEANING, AnyTask, FusedTask, TaskKind

__all__ = [
    "BETWEEN_STAGES",
    "GATHERED",
    "WORKSPACE",
    "RESIDUALS",
    "Memory",
    "RankMemory",
    "StageBytes",
    "walk_rank",
]

RESIDUALS, WORKSPACE = "residuals", "workspace"
GATHERED, BETWEEN_STAGES = "gathered parameters", "arrays between stages"


class Memory:
    """The bytes in one memory, a rank's devices or its host, while something runs.

    Call `change` in the order in which bytes come (a number above 0) and go (below 0).

    Attributes:
      live: the bytes now.
      kinds: the bytes now, by kind.
      peak: the most at one time.
      at_peak: the bytes of the peak, by kind.

    Example:
      >>> memory = Memory()
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

    @property
    def fused(self) -> float:
        """What a forward and a backward in one task hold: XLA writes only a part of what the two hold apart."""
        return max(self.activation, self.region)

    def made_again(self, task: AnyTask) -> float:
        """Return what a task makes for itself: a part of what it takes, gone when it ends."""
        if isinstance(task, FusedTask):
            return self.fused - self.activation
        return self.recomputed if "recomputed" in MEANING[task.kind].takes else 0.0

    def changes(self, task: AnyTask) -> tuple[float, float]:
        """Return the change of what the stage holds when a task starts, and the one when it ends."""
        if isinstance(task, FusedTask):
            return self.fused, -self.fused
        meaning = MEANING[task.kind]
        takes, frees, leaves = (
            sum((getattr(self, name) for name in names), 0.0)
            for names in (meaning.takes, meaning.frees, meaning.leaves)
        )
        return takes, leaves - frees


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The memories of a rank: of each of its devices, and of its host for each device."""

    devices: Memory
    host: Memory


def walk_rank(
    tasks: Sequence[AnyTask],
    stages: Sequence[StageBytes],
    *,
    copies: Iterable[HostCopy] = (),
    gathered: Iterable[GatheredParameter] = (),
    arrivals: Sequence[Sequence[tuple[int, bool]]] = (),
) -> RankMemory:
    """Walk the tasks of a rank in their order, with what the rank copies, gathers and receives between them.

    The times of copies have no influence. A value that moves to the host counts on the devices until the task that
    waits for the end of its offload (without such a task, until its fetch), and again from its fetch on. So no run
    holds more.

    Args:
      tasks: the rank's tasks.
      stages: the bytes of each stage of the schedule.
      copies: what moves to the host and back.
      gathered: the parameters that are gathered once.
      arrivals: of this rank, from `order.arrivals`; by default, arrays between stages do not count.

    Example:
      >>> from jaxpp_flax.schedules import Std1F1B
      >>> walk_rank(Std1F1B(2).tasks(4)[0], [StageBytes(activation=10.0, saved=10.0)] * 2).devices.peak
      20.0
    """
    devices, host = Memory(), Memory()
    leaving, fetched, offloaded, gathers, last_reads = (defaultdict[int, float](float) for _ in range(5))
    for copy in copies:
        moved = stages[copy.stage].saved
        offloaded[copy.offload_after] += moved
        leaving[copy.fetch_before if copy.gone_before is None else copy.gone_before] += moved
        fetched[copy.fetch_before] += moved
    for each in gathered:
        gathers[each.gather_before] += each.nbytes
        last_reads[each.read_last] += each.nbytes
    changes: dict[tuple[TaskKind | None, int], tuple[float, float, float]] = {}
    for position, task in enumerate(tasks):
        here, kind = stages[task.stage], None if isinstance(task, FusedTask) else task.kind
        key = kind, task.stage
        if key not in changes:
            changes[key] = *here.changes(task), here.made_again(task)
        taken, left, again = changes[key]
        passing = here.passing if kind is TaskKind.FORWARD else 0.0
        received = gradient = 0.0
        if arrivals:
            for stage, is_forward in arrivals[position]:
                devices.change(stages[stage].received if is_forward else stages[stage].gradient, BETWEEN_STAGES)
            received = here.received if kind in (None, TaskKind.FORWARD) else 0.0
            gradient = here.gradient if kind in (TaskKind.BACKWARD, TaskKind.BACKWARD_INPUT) else 0.0
        devices.change(gathers[position], GATHERED)
        devices.change(-leaving[position], RESIDUALS)  # it may still be there when the others have come
        devices.change(-received, BETWEEN_STAGES)
        devices.change(fetched[position] + taken - again, RESIDUALS)
        devices.change(again, WORKSPACE)
        devices.change(passing, BETWEEN_STAGES)
        devices.change(-passing - gradient, BETWEEN_STAGES)
        devices.change(-again, WORKSPACE)
        devices.change(left + again, RESIDUALS)
        devices.change(-last_reads[position], GATHERED)
        host.change(-fetched[position], RESIDUALS)
        host.change(offloaded[position], RESIDUALS)
    return RankMemory(devices, host)
