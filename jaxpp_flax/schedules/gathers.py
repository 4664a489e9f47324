"""When a rank gathers the parameters that are sharded inside it (FSDP): once in a step, or in each of its tasks.

The engine and the planners share these rules. They know names and bytes, no arrays.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from jaxpp_flax.schedules.errors import ScheduleError
from jaxpp_flax.schedules.task import Task, TaskKind

__all__ = ["Fsdp", "GatheredParameter", "Gathers", "check_fsdp"]

Fsdp: TypeAlias = Literal["step", "microbatch"]
"""How often parameters are gathered."""


def check_fsdp(fsdp: Any) -> Fsdp:
    """Return a setting `fsdp=` that is "step" or "microbatch".

    Raises:
      ValueError: for anything else.

    Example:
      >>> check_fsdp("step")
      'step'
    """
    if isinstance(fsdp, str) and fsdp in ("step", "microbatch"):
        return fsdp  # type: ignore[return-value]
    raise ValueError(
        f'fsdp={fsdp!r} is no known setting. Use "step" (gather parameters once in a step) or "microbatch" (in every '
        "task)."
    )


@dataclass(frozen=True, slots=True)
class GatheredParameter:
    """A parameter that a rank gathers once, in the order of the rank's tasks.

    Attributes:
      name: the parameter.
      nbytes: its bytes on each device.
      gather_before: the position of the task before which it is gathered.
      read_last: the position of the last task that reads it.
    """

    name: str
    nbytes: float
    gather_before: int
    read_last: int


@dataclass(frozen=True)
class Gathers:
    """The parameters that the stages gather from their shards, for the simulator and for planners.

    Every task of a stage but the weight gradient reads all of them. A gather takes the rank's time, and no other rank
    waits for it. So does the reduction of gradients, in every microbatch or after the loop.

    Args:
      stages: for each stage, the bytes of each gathered parameter on a device, by name. Stages of one rank share a
        parameter of one name.
      fsdp: "step" or "microbatch"; see `MeshOptions`.
      bandwidth: bytes a second that a device receives from the other devices of its stage.

    Raises:
      ScheduleError: for negative bytes, or a bandwidth of 0 or less.
      ValueError: for another `fsdp`.

    Example:
      >>> from jaxpp_flax.schedules import GPipe
      >>> once = Gathers([{"w": 6.0}, {"w": 6.0}], fsdp="step", bandwidth=2.0)
      >>> once.held(GPipe(2).tasks(2)[0])
      (GatheredParameter(name='w', nbytes=6.0, gather_before=0, read_last=3),)
    """

    stages: Sequence[Mapping[str, float]]
    fsdp: Fsdp = "microbatch"
    bandwidth: float = math.inf

    def __post_init__(self) -> None:
        check_fsdp(self.fsdp)
        if not self.bandwidth > 0:
            raise ScheduleError(f"Gathers: bandwidth={self.bandwidth!r}; it must be a number above 0.")
        for stage, sizes in enumerate(self.stages):
            for name, nbytes in sizes.items():
                if not (nbytes >= 0 and math.isfinite(nbytes)):
                    raise ScheduleError(f"Gathers: {name!r} of stage {stage} has {nbytes!r} bytes; give 0 or more.")

    def seconds(self, nbytes: float) -> float:
        """Return the time of gathering, or of reducing and scattering, these bytes."""
        return nbytes / self.bandwidth

    def held(self, tasks: Sequence[Task]) -> tuple[GatheredParameter, ...]:
        """Return what a rank gathers before its tasks."""
        if self.fsdp == "microbatch":
            return ()
        sizes = self._sizes(task.stage for task in tasks)
        first: dict[str, int] = {}
        last: dict[str, int] = {}
        for position, task in enumerate(tasks):
            for name in () if task.kind is TaskKind.BACKWARD_WEIGHT else self.stages[task.stage]:
                first.setdefault(name, position)
                last[name] = position
        return tuple(GatheredParameter(name, sizes[name], first[name], last[name]) for name in first)

    def in_every_task(self, stage: int) -> float:
        """Return the bytes that each task of a stage gathers by itself, and each backward reduces."""
        return sum(self.stages[stage].values()) if self.fsdp == "microbatch" else 0.0

    def reduced_once(self, stages: Collection[int]) -> float:
        """Return the bytes of gradients that a rank with these stages reduces after the loop."""
        return sum(self._sizes(stages).values()) if self.fsdp == "step" else 0.0

    def _sizes(self, stages: Iterable[int]) -> dict[str, float]:
        return {name: nbytes for stage in set(stages) for name, nbytes in self.stages[stage].items()}
