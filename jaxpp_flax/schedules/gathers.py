"""When a rank gathers the parameters that are sharded inside it (FSDP): once, or once for each window of its tasks.

The engine and the planners share these rules. They know names and bytes, no arrays.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, TypeVar

from jaxpp_flax.schedules.errors import ScheduleError
from jaxpp_flax.schedules.task import AnyTask, FusedTask, TaskKind

__all__ = ["GatherWindow", "Gathers", "check_fsdp", "gathered_inside", "gathers_before"]

_Name = TypeVar("_Name", bound=Hashable)


def check_fsdp(fsdp: Any) -> str | int:
    """Return a setting `fsdp=` that is "step", "microbatch" or a number of bytes.

    Raises:
      ValueError: for another word, or for a number below 1.
      TypeError: for another type.

    Example:
      >>> check_fsdp("step"), check_fsdp(1 << 30)
      ('step', 1073741824)
    """
    known = (
        'Use "step" (gather once in a step), "microbatch" (in every task), or the bytes that may be gathered at once.'
    )
    if isinstance(fsdp, str):
        if fsdp not in ("step", "microbatch"):
            raise ValueError(f"fsdp={fsdp!r} is no known setting. {known}")
        return fsdp
    if isinstance(fsdp, bool) or not isinstance(fsdp, int):
        raise TypeError(f"fsdp must be a word or a whole number of bytes, got {type(fsdp).__name__}: {fsdp!r}. {known}")
    if fsdp < 1:
        raise ValueError(f"fsdp={fsdp}: a limit must be at least 1 byte. {known}")
    return fsdp


def gathered_inside(sizes: Mapping[_Name, float], limit: float | None) -> list[_Name]:
    """Return the parameters of a stage that its tasks gather by themselves, because they do not fit the limit.

    The largest ones are gathered before the tasks, since they save the most.

    Args:
      sizes: the bytes of each gathered parameter on a device.
      limit: the bytes that a device may hold; None: no limit.

    Example:
      >>> gathered_inside({"up": 6, "down": 6, "bias": 1}, 8)
      ['down']
    """
    total, inside = 0.0, list[_Name]()
    for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
        if limit is not None and total + size > limit:
            inside.append(name)
        else:
            total += size
    return inside


def gathers_before(
    reads: Sequence[Sequence[_Name]], sizes: Mapping[_Name, float], limit: float | None
) -> list[tuple[_Name, ...]]:
    """Return the parameters that a rank gathers before each of its tasks.

    Under a limit, the rank forgets gathered parameters that its next task does not read, until the new ones fit: the
    one that is read again last goes first, so that windows of consecutive tasks are as long as they can be.

    Args:
      reads: the gathered parameters that each task reads.
      sizes: the bytes of each on a device.
      limit: the bytes that a device may hold; each task fits it. None: no limit.

    Example:
      >>> gathers_before(["a", "b", "b", "a"], {"a": 4, "b": 4}, None)
      [('a',), ('b',), (), ()]
      >>> gathers_before(["a", "b", "b", "a"], {"a": 4, "b": 4}, 4)
      [('a',), ('b',), (), ('a',)]
    """
    next_reads: dict[_Name, list[int]] = {}
    for at in range(len(reads) - 1, -1, -1):
        for name in reads[at]:
            next_reads.setdefault(name, []).append(at)
    held: dict[_Name, float] = {}
    found: list[tuple[_Name, ...]] = []
    for read in reads:
        new = tuple(name for name in read if name not in held)
        held.update((name, sizes[name]) for name in new)
        idle = [name for name in held if name not in read] if new and limit is not None else []
        while idle and limit is not None and sum(held.values()) > limit:
            # The list of a name's reads is reversed, so its end is the next one; a name without one goes first.
            last = max(idle, key=lambda name: (next_reads[name] or [len(reads)])[-1])
            idle.remove(last)
            del held[last]
        for name in read:
            next_reads[name].pop()
        found.append(new)
    return found


@dataclass(frozen=True, slots=True)
class GatherWindow:
    """A gathered parameter in the order of a rank's tasks.

    Attributes:
      name: the parameter.
      nbytes: its bytes on each device.
      gather_before: the position of the task before which it is gathered.
      read_last: the position of the last task that reads it from this gather.
    """

    name: str
    nbytes: float
    gather_before: int
    read_last: int


_Sizes = tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Gathers:
    """The parameters that the stages gather from their shards, for the simulator and for planners.

    Every task of a stage but the weight gradient reads all of them. A gather takes the rank's time, and no other rank
    waits for it. So does the reduction of gradients, in every microbatch or after the loop.

    Args:
      stages: for each stage, the bytes of each gathered parameter on a device, by name. Stages of one rank share a
        parameter of one name.
      fsdp: "step", "microbatch" or a number of bytes; see `MeshOptions`.
      bandwidth: bytes a second that a device receives from the other devices of its stage.

    Raises:
      ScheduleError: for negative bytes, or a bandwidth of 0 or less.
      ValueError, TypeError: for another `fsdp`.

    Example:
      >>> from jaxpp_flax.schedules import GPipe
      >>> once = Gathers([{"w": 6.0}, {"w": 6.0}], fsdp="step", bandwidth=2.0)
      >>> once.windows(GPipe(2).tasks(2)[0])
      (GatherWindow(name='w', nbytes=6.0, gather_before=0, read_last=3),)
    """

    stages: tuple[_Sizes, ...]
    fsdp: str | int
    bandwidth: float

    def __init__(
        self, stages: Iterable[Mapping[str, float]], fsdp: str | int = "microbatch", bandwidth: float = math.inf
    ) -> None:
        object.__setattr__(self, "stages", tuple(tuple(sizes.items()) for sizes in stages))
        object.__setattr__(self, "fsdp", check_fsdp(fsdp))
        object.__setattr__(self, "bandwidth", bandwidth)
        if not bandwidth > 0:
            raise ScheduleError(f"Gathers: bandwidth={bandwidth!r}; it must be a number above 0.")
        for stage, sizes in enumerate(self.stages):
            for name, nbytes in sizes:
                if not (nbytes >= 0 and math.isfinite(nbytes)):
                    raise ScheduleError(f"Gathers: {name!r} of stage {stage} has {nbytes!r} bytes; give 0 or more.")

    def seconds(self, nbytes: float) -> float:
        """Return the time of gathering, or of reducing and scattering, these bytes."""
        return nbytes / self.bandwidth

    def windows(self, tasks: Sequence[AnyTask]) -> tuple[GatherWindow, ...]:
        """Return what a rank gathers before its tasks."""
        return _windows(self._outside, self._limit, tuple(tasks))

    def inside(self, stage: int) -> float:
        """Return the bytes that each task of a stage gathers by itself."""
        outside = dict(self._outside[stage])
        return sum(nbytes for name, nbytes in self.stages[stage] if name not in outside)

    def reduced(self, stage: int) -> float:
        """Return the bytes of gradients that a stage reduces in every microbatch."""
        return sum(nbytes for _, nbytes in self.stages[stage]) if self.fsdp == "microbatch" else 0.0

    def reduced_once(self, stages: Collection[int]) -> float:
        """Return the bytes of gradients that a rank with these stages reduces after the loop."""
        if self.fsdp == "microbatch":
            return 0.0
        return sum({name: nbytes for stage in stages for name, nbytes in self.stages[stage]}.values())

    @property
    def _limit(self) -> int | None:
        return None if isinstance(self.fsdp, str) else self.fsdp

    @cached_property
    def _outside(self) -> tuple[_Sizes, ...]:
        """The parameters of each stage that are gathered before its tasks."""
        if self.fsdp == "microbatch":
            return ((),) * len(self.stages)
        found: list[_Sizes] = []
        for sizes in self.stages:
            inside = gathered_inside(dict(sizes), self._limit)
            found.append(tuple((name, nbytes) for name, nbytes in sizes if name not in inside))
        return tuple(found)


@lru_cache(maxsize=256)
def _windows(stages: tuple[_Sizes, ...], limit: float | None, tasks: tuple[AnyTask, ...]) -> tuple[GatherWindow, ...]:
    sizes = {name: nbytes for stage in {task.stage for task in tasks} for name, nbytes in stages[stage]}
    names = [tuple(name for name, _ in of) for of in stages]
    reads = [() if _is_weight_gradient(task) else names[task.stage] for task in tasks]
    began: dict[str, int] = {}
    last: dict[str, int] = {}
    found: list[GatherWindow] = []
    for position, new in enumerate(gathers_before(reads, sizes, limit)):
        found += [GatherWindow(name, sizes[name], began[name], last[name]) for name in new if name in began]
        began.update(dict.fromkeys(new, position))
        last.update(dict.fromkeys(reads[position], position))
    found += [GatherWindow(name, sizes[name], start, last[name]) for name, start in began.items()]
    return tuple(sorted(found, key=lambda window: window.gather_before))


def _is_weight_gradient(task: AnyTask) -> bool:
    return not isinstance(task, FusedTask) and task.kind is TaskKind.BACKWARD_WEIGHT
