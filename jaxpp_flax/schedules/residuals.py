"""What a stage does with its residuals, the values that its backward reads: keep, recompute or offload them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from jaxpp_flax.schedules.errors import ScheduleError
from jaxpp_flax.schedules.task import Task, TaskKind

__all__ = ["KEEP", "HostCopy", "ResidualPlan", "StageResiduals", "host_copies"]


@dataclass(frozen=True, kw_only=True)
class StageResiduals:
    """The residuals of one stage: the values of its forward that its backward reads.

    Args:
      recompute: True keeps the stage's inputs in place of the residuals; the backward computes the residuals again.
        Values that a `jax.checkpoint` policy in the model saves are still kept.
      offload: the share of microbatches, from 0 to 1, whose kept values move to host memory after the forward and
        come back before the backward. The microbatches are spread evenly.

    Raises:
      ScheduleError: if `offload` is not from 0 to 1, or `recompute` is neither True nor False.

    Example:
      >>> half = StageResiduals(offload=0.5)
      >>> [half.offloads(microbatch) for microbatch in range(4)]
      [False, True, False, True]
      >>> StageResiduals(recompute=True, offload=1.0).is_kept
      False
    """

    recompute: bool = False
    offload: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.recompute, bool):
            raise ScheduleError(
                f"recompute={self.recompute!r}: use True or False. To keep some values and recompute the others, give "
                "`jax.checkpoint` in the model a policy, such as `jax.checkpoint_policies.dots_saveable`."
            )
        if not 0 <= self.offload <= 1:
            raise ScheduleError(f"offload={self.offload!r}: the share of offloaded microbatches is from 0 to 1.")

    @property
    def is_kept(self) -> bool:
        """True if all residuals stay on the devices."""
        return not self.recompute and not self.offload

    def offloads(self, microbatch: int) -> bool:
        """Return True if the values of this microbatch move to host memory."""
        return int((microbatch + 1) * self.offload) > int(microbatch * self.offload)


KEEP = StageResiduals()
"""All residuals stay on the devices."""


@dataclass(frozen=True)
class ResidualPlan:
    """The residuals of each stage.

    Args:
      stages: an entry for each stage.
      fetch_ahead: a fetch starts this number of the rank's tasks before the backward that reads the values. A larger
        number hides a longer copy, but keeps the values on the devices for longer.
      offload_within: after a forward, this number of the rank's tasks may run before its offload has ended; the next
        task waits for the end. This limits the number of offloads at one time, also on a slow link. None: no task
        waits.

    Raises:
      ScheduleError: if there are no stages, an entry is no `StageResiduals`, or `fetch_ahead` or `offload_within` is no
        whole number of at least 1.

    Example:
      >>> plan = ResidualPlan((StageResiduals(offload=1.0), StageResiduals(recompute=True), KEEP))
      >>> plan.of(0).offload, plan.of(1).recompute, plan.of(2).is_kept
      (1.0, True, True)
      >>> ResidualPlan.keep(2).is_kept
      True
    """

    stages: Sequence[StageResiduals]
    _: KW_ONLY
    fetch_ahead: int = 1
    offload_within: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", tuple(self.stages))
        if not self.stages:
            raise ScheduleError("a ResidualPlan needs an entry for each stage, got none.")
        for number, stage in enumerate(self.stages):
            if not isinstance(stage, StageResiduals):
                raise ScheduleError(
                    f"entry {number} of the ResidualPlan is {stage!r}: an entry is a StageResiduals, such as "
                    "StageResiduals(recompute=True)."
                )
        if not _is_count(self.fetch_ahead):
            raise ScheduleError(
                f"fetch_ahead={self.fetch_ahead!r}: it must be a whole number of at least 1, the tasks between a fetch "
                "and its backward."
            )
        if self.offload_within is not None and not _is_count(self.offload_within):
            raise ScheduleError(
                f"offload_within={self.offload_within!r}: it must be a whole number of at least 1, the tasks that may "
                "run during an offload, or None."
            )

    @classmethod
    def keep(cls, num_stages: int) -> ResidualPlan:
        """Return the plan that keeps all residuals."""
        return cls((KEEP,) * num_stages)

    @property
    def is_kept(self) -> bool:
        """True if every stage keeps all residuals."""
        return all(stage.is_kept for stage in self.stages)

    def of(self, stage: int) -> StageResiduals:
        """Return the entry of a stage."""
        return self.stages[stage]

    def check(self, num_stages: int) -> None:
        """Raise `ScheduleError` if the plan is for another number of stages."""
        if len(self.stages) != num_stages:
            raise ScheduleError(
                f"the ResidualPlan has {len(self.stages)} entries, but the schedule has {num_stages} stages: give one "
                "entry for each stage."
            )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


@dataclass(frozen=True, slots=True)
class HostCopy:
    """The way of one microbatch's offloaded values to the host and back, in the order of a rank's tasks.

    Attributes:
      stage, microbatch: the forward that makes the values.
      offload_after: the position of this forward in the rank's tasks; the offload follows it.
      gone_before: the position of the task that waits for the end of the offload; None: no task does.
      fetch_before: the position of the task in front of which the fetch stands.
      read_at: the position of the backward that reads the values.
    """

    stage: int
    microbatch: int
    offload_after: int
    gone_before: int | None
    fetch_before: int
    read_at: int


def host_copies(tasks: Sequence[Task], plan: ResidualPlan) -> list[HostCopy]:
    """Return what a rank offloads, in the order of its forwards.

    The fetch stands `plan.fetch_ahead` tasks before the backward, and at least one task after the offload. If the
    backward follows within two tasks after the forward, the values stay on the devices: moving them frees nothing. A
    fused task keeps nothing.

    Example:
      >>> from jaxpp_flax.schedules import GPipe
      >>> plan = ResidualPlan([StageResiduals(offload=0.5), KEEP])
      >>> host_copies(GPipe(2).tasks(4)[0], plan)[0]
      HostCopy(stage=0, microbatch=1, offload_after=1, gone_before=None, fetch_before=4, read_at=5)
    """
    forwards: dict[tuple[int, int], int] = {}
    copies: list[HostCopy] = []
    for position, task in enumerate(tasks):
        if task.kind is TaskKind.FUSED:
            continue
        key = task.stage, task.microbatch
        if task.kind is TaskKind.FORWARD:
            if plan.of(task.stage).offloads(task.microbatch):
                forwards[key] = position
            continue
        # A weight gradient reads first where a program lacks the input gradient: below the stage, nothing is trained.
        after = forwards.pop(key, position)
        fetch = max(position - plan.fetch_ahead, after + 2)
        if fetch < position:
            gone = None if plan.offload_within is None else min(after + 1 + plan.offload_within, fetch)
            copies.append(HostCopy(*key, after, gone, fetch, position))
    return sorted(copies, key=lambda copy: copy.offload_after)
