"""The layouts that a quote ranks: each has sizes of mesh axes and microbatches, a schedule, and residuals."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import NamedTuple

from jaxpp_flax.messages import known_names
from jaxpp_flax.planning.choice import describe
from jaxpp_flax.planning.quoting.traced import Axes, TracedModel
from jaxpp_flax.schedules import Schedule, by_name
from jaxpp_flax.schedules.gathers import Fsdp
from jaxpp_flax.schedules.memory import StageBytes
from jaxpp_flax.schedules.residuals import KEEP, ResidualPlan, StageResiduals
from jaxpp_flax.schedules.task import MEANING, Task, TaskKind

__all__ = ["Layout", "explained", "fullest_moments", "fused_stages", "layouts"]

_CHOICES = (
    KEEP,
    StageResiduals(recompute=True),
    StageResiduals(offload=1.0),
    StageResiduals(recompute=True, offload=1.0),
)
_AXES = {"PP": "pipeline", "DP": "data", "FSDP": "fsdp", "EP": "expert", "TP": "tensor", "MB": "microbatch"}
_GATHERS: tuple[Fsdp, ...] = ("microbatch", "step")
_MOST_TENSOR = 16
_ONE_STAGE = ("1f1b", "zero_bubble")
_TWO_STAGES = ("interleaved_1f1b", "zbv", "dualpipe_v")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way to run a step.

    Args:
      pipeline: the number of ranks.
      data, fsdp, expert, tensor: the sizes of the mesh axes inside a rank.
      microbatch: the number of examples of a microbatch on each device along "data" and "fsdp".
      schedule: the name of the schedule.
      stages: the number of stages of the model.
      residuals: what every stage does with its residuals.
      gather: how often parameters are gathered; see `MeshOptions(fsdp=)`.

    Example:
      >>> layout = Layout(pipeline=4, data=2, tensor=8, microbatch=1, schedule="1f1b", stages=4)
      >>> layout.devices, layout.num_microbatches(64), str(layout)
      (64, 32, 'PP 4 x DP 2 x TP 8, microbatch 1, 1f1b, keep')
    """

    pipeline: int = 1
    data: int = 1
    fsdp: int = 1
    expert: int = 1
    tensor: int = 1
    microbatch: int = 1
    schedule: str = "1f1b"
    stages: int = 1
    residuals: StageResiduals = KEEP
    gather: Fsdp = "microbatch"

    @property
    def of_a_rank(self) -> int:
        """The number of devices of a rank."""
        return self.data * self.fsdp * self.expert * self.tensor

    @property
    def devices(self) -> int:
        """The number of devices of all ranks."""
        return self.pipeline * self.of_a_rank

    @property
    def order(self) -> Schedule:
        """The schedule."""
        return _order(self.schedule, self.stages, self.pipeline)

    @cached_property
    def plan(self) -> ResidualPlan:
        """The residuals of every stage; an offload ends before the task after the next one."""
        within = 1 if self.residuals.offload else None
        return ResidualPlan([self.residuals] * self.stages, offload_within=within)

    def num_microbatches(self, global_batch: int) -> int:
        """Return the number of microbatches of a step."""
        return global_batch // (self.data * self.fsdp * self.microbatch)

    @property
    def axes_of_parameters(self) -> Axes:
        """The axes inside a rank that divide parameters."""
        return Axes(self.tensor, self.fsdp, self.gather, self.expert)

    @property
    def axes(self) -> dict[str, int]:
        """The axes of the mesh with their sizes, the axis of the ranks first, as `Plan(layout=)` has them."""
        inside = {name: getattr(self, name) for name in ("data", "fsdp", "expert", "tensor")}
        return {"stage": self.pipeline, **inside}

    def __str__(self) -> str:
        sizes = {short: getattr(self, name) for short, name in _AXES.items() if short != "MB"}
        once = {"FSDP": " once"} if self.gather == "step" else {}
        cut = (f"{short} {size}{once.get(short, '')}" for short, size in sizes.items() if size > 1)
        mesh = " x ".join(cut) or "one device"
        more = f" of {self.stages} stages" if self.stages != self.pipeline else ""
        return f"{mesh}, microbatch {self.microbatch}, {self.schedule}{more}, {describe(self.residuals)}"


def layouts(model: TracedModel, devices: int, wanted: Mapping[str, int] | None = None) -> Iterator[Layout]:
    """Return every layout of so many devices that divides the batch, the blocks and the annotated parameters.

    Args:
      wanted: sizes that are given; see `explained`.

    Raises:
      ValueError: for a size that no layout has.
    """
    given = dict(wanted or {})
    for name in given:
        if name not in _AXES.values():
            raise ValueError(f"wanted={given}: there is no size {name!r}.{known_names(name, _AXES.values())}")

    def sizes(name: str, all_of: int) -> list[int]:
        found = [size for size in range(1, all_of + 1) if all_of % size == 0]
        return [size for size in found if given.get(name, size) == size]

    blocks = len(model.names) - 1
    for pipeline in sizes("pipeline", devices):
        for tensor in sizes("tensor", devices // pipeline):
            if pipeline > blocks or tensor > _MOST_TENSOR or not model.divides("tensor", tensor):
                continue
            left = devices // (pipeline * tensor)
            for expert, fsdp in ((e, f) for e in sizes("expert", left) for f in sizes("fsdp", left // e)):
                data = left // (expert * fsdp)
                if given.get("data", data) != data or model.global_batch % (data * fsdp):
                    continue
                if not (model.divides("expert", expert) and model.divides("fsdp", fsdp)):
                    continue
                mesh = Layout(pipeline=pipeline, data=data, fsdp=fsdp, expert=expert, tensor=tensor)
                for microbatch in sizes("microbatch", model.global_batch // (data * fsdp)):
                    yield from _orders(replace(mesh, microbatch=microbatch), blocks)


def _orders(layout: Layout, blocks: int) -> Iterator[Layout]:
    """Return a layout with each schedule, each choice of residuals, and each way to gather parameters."""
    pairs = itertools.chain(
        ((name, layout.pipeline) for name in _ONE_STAGE), ((name, 2 * layout.pipeline) for name in _TWO_STAGES)
    )
    for name, stages in pairs if layout.pipeline > 1 else (("1f1b", 1),):
        if stages > blocks:
            continue
        for gather, residuals in itertools.product(_GATHERS if layout.fsdp > 1 else _GATHERS[:1], _CHOICES):
            yield replace(layout, schedule=name, stages=stages, residuals=residuals, gather=gather)


@cache
def _order(name: str, stages: int, ranks: int) -> Schedule:
    return by_name(name, stages, ranks)


@cache
def fused_stages(name: str, stages: int, ranks: int) -> frozenset[int]:
    """Return the stages whose forward and backward are one task, which recomputes nothing."""
    tasks = _order(name, stages, ranks).tasks(ranks)
    return frozenset(task.stage for of in tasks for task in of if task.kind is TaskKind.FUSED)


class HeldAtBackward(NamedTuple):
    """What a rank holds when a backward starts.

    Attributes:
      held: how often each `(name of StageBytes, stage)`.
      here: the stages of what is saved on the devices even if all is offloaded: of the backward, and of a forward just
        before it.
    """

    held: tuple[tuple[tuple[str, int], int], ...]
    here: tuple[int, ...]

    def nbytes(self, stages: Sequence[StageBytes], *, offloaded: bool) -> float:
        """Return the bytes, with those of each stage."""
        saved = sum(stages[stage].saved for stage in self.here) if offloaded else 0.0
        return saved + sum(
            count * getattr(stages[stage], name)
            for (name, stage), count in self.held
            if not (offloaded and name == "saved")
        )


@cache
def fullest_moments(name: str, stages: int, ranks: int, num_microbatches: int) -> tuple[HeldAtBackward, ...]:
    """Return for each rank the start of a backward at which most microbatches are in flight.

    Example:
      >>> fullest_moments("1f1b", 2, 2, 8)[0]
      HeldAtBackward(held=((('saved', 0), 2), (('recomputed', 0), 1)), here=(0, 0))
    """
    return tuple(map(_fullest, _order(name, stages, ranks).tasks(num_microbatches)))


def _fullest(tasks: Sequence[Task]) -> HeldAtBackward:
    held, most, found = Counter[tuple[str, int]](), 0, HeldAtBackward((), ())
    before: set[tuple[int, int]] = set()  # what a forward just before has saved
    for task in tasks:
        own = set[tuple[int, int]]() if task.kind is TaskKind.FUSED else {(task.stage, task.microbatch)}
        meaning = MEANING[task.kind]
        takes, frees, leaves = meaning.takes, meaning.frees, meaning.leaves
        held.update((name, task.stage) for name in takes)
        if takes != ("saved",) and held.total() > most:
            most, here = held.total(), tuple(stage for stage, _ in own | before)
            found = HeldAtBackward(tuple((key, n) for key, n in held.items() if n), here)
        held.update((name, task.stage) for name in leaves)
        held.subtract((name, task.stage) for name in frees)
        before = own if takes == ("saved",) else set()
    return found


def explained(text: str) -> dict[str, int]:
    """Return the sizes that a text such as "PP=8,DP=8" gives.

    Raises:
      ValueError: for another text.

    Example:
      >>> explained("PP=8,DP=4,MB=2")
      {'pipeline': 8, 'data': 4, 'microbatch': 2}
      >>> explained("PQ=8")
      Traceback (most recent call last):
      ValueError: 'PQ=8': the size 'PQ' is unknown. Did you mean 'TP' or 'PP' or 'EP'? Known: PP, DP, FSDP, EP, TP, MB.
    """
    found: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (each.strip() for each in part.partition("="))
        if name.upper() not in _AXES:
            raise ValueError(f"{part!r}: the size {name!r} is unknown.{known_names(name, _AXES)}")
        if not size.isdecimal() or not int(size):
            raise ValueError(f"{part!r}: the size must be a number of at least 1.")
        found[_AXES[name.upper()]] = int(size)
    return found
