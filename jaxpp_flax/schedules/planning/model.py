"""The model of a step that every planner uses: seconds, and bytes of each rank, from loads of stages and hardware.

The time is the simulated step. The bytes are those held for the whole step (parameters, optimizer, gradients, data) and
the residuals in flight. Nothing here needs a device, so a plan can be made for hardware that is not there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

from jaxpp_flax.schedules.errors import ScheduleError
from jaxpp_flax.schedules.residuals import ResidualPlan, StageResiduals, host_copies
from jaxpp_flax.schedules.schedule import Schedule
from jaxpp_flax.schedules.simulation.costs import Costs, CostTable, Link, Transfer
from jaxpp_flax.schedules.simulation.simulate import summarize
from jaxpp_flax.schedules.task import AnyTask

__all__ = ["Hardware", "Prediction", "StageLoad", "StageUse", "StepModel"]


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The speed and the memory of one device and of its links, in FLOPs, seconds and bytes.

    Args:
      flops: the floating-point operations that a device does in a second, as models reach them (often 40 to 60 % of
        the peak).
      link_bandwidth: bytes a second from rank to rank, for each device.
      link_latency: seconds that a transfer from rank to rank takes besides.
      host_bandwidth: bytes a second between a device and its host, in each direction.
      host_latency: seconds that a copy to the host or back takes besides.
      device_bytes: the memory of a device.

    Raises:
      ScheduleError: for a value that is not a number above 0 (a latency may be 0).

    Example:
      >>> card = Hardware(flops=400e12, host_bandwidth=50e9, device_bytes=80e9)
      >>> card.host_link.time(1e9)
      0.02
    """

    flops: float
    host_bandwidth: float
    link_bandwidth: float = math.inf
    link_latency: float = 0.0
    host_latency: float = 0.0
    device_bytes: float = math.inf

    def __post_init__(self) -> None:
        for name in (each.name for each in fields(self)):
            value = getattr(self, name)
            least = "of at least 0" if name.endswith("latency") else "above 0"
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or math.isnan(value) or value < 0 or (value == 0 and least == "above 0"):
                raise ScheduleError(f"Hardware: {name}={value!r}; it must be a number {least}.")

    @property
    def host_link(self) -> Link:
        """The link between a device and its host."""
        return Link(self.host_latency, self.host_bandwidth)

    @property
    def transfer(self) -> Transfer:
        """The links from rank to rank."""
        return Transfer(Link(self.link_latency, self.link_bandwidth))


@dataclass(frozen=True, kw_only=True)
class StageLoad:
    """The work of one stage for one microbatch, in seconds, and its bytes on each device.

    Args:
      forward: seconds of the forward.
      backward: seconds of the whole backward; a split backward has half of them in each part.
      residual_bytes: the values of the forward that the backward reads.
      input_bytes: the stage's inputs; a stage that recomputes its residuals keeps these.
      sent_bytes: the values sent to the next stage.
      recomputation: seconds that the backward takes longer if it recomputes the residuals; default: those of the
        forward.
      cheap_bytes: the part of the residuals that the backward can compute again from the rest without a matrix product
        or another costly operation (`StageResiduals(recompute="cheap")`).
      cheap_recomputation: seconds that this takes.
      fixed_bytes: bytes held for the whole step, by kind, such as "parameters", "gradients" and "optimizer".

    Example:
      >>> StageLoad(forward=1.0, backward=2.0, residual_bytes=8.0, fixed_bytes={"parameters": 4.0}).fixed
      4.0
    """

    forward: float
    backward: float
    residual_bytes: float
    input_bytes: float = 0.0
    sent_bytes: float = 0.0
    recomputation: float | None = None
    cheap_bytes: float = 0.0
    cheap_recomputation: float = 0.0
    fixed_bytes: Mapping[str, float] = field(default_factory=dict)

    @property
    def time_again(self) -> float:
        """Seconds that the backward takes longer if it recomputes the residuals."""
        return self.forward if self.recomputation is None else self.recomputation

    def kept_bytes(self, residuals: StageResiduals) -> float:
        """Return the bytes of a microbatch that a forward keeps, on the devices or on the host."""
        if residuals.recompute == "cheap":
            return self.residual_bytes - self.cheap_bytes
        return min(self.input_bytes, self.residual_bytes) if residuals.recompute else self.residual_bytes

    def seconds_again(self, residuals: StageResiduals) -> float:
        """Return the seconds that a backward takes longer because it recomputes values."""
        if residuals.recompute == "cheap":
            return self.cheap_recomputation
        return self.time_again if residuals.recompute else 0.0

    def with_times(self, forward: float, backward: float) -> StageLoad:
        """Return this load with other times, such as measured ones; recomputation takes the same share of a forward."""
        share = forward / self.forward if self.forward else 0.0
        again = self.time_again * share if share else forward
        cheap = self.cheap_recomputation * share
        return replace(self, forward=forward, backward=backward, recomputation=again, cheap_recomputation=cheap)

    @property
    def fixed(self) -> float:
        """The bytes held for the whole step."""
        return sum(self.fixed_bytes.values())


@dataclass(frozen=True, kw_only=True)
class StageUse:
    """What a step does with the residuals of one stage: bytes on each device, summed over the microbatches.

    Attributes:
      kept: bytes that stay on the devices from the forward to the backward.
      moved: bytes that go to the host and come back.
      recomputed: bytes that the backward computes again.
      recomputation: seconds that this takes.
    """

    kept: float
    moved: float
    recomputed: float
    recomputation: float


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The predicted step.

    Attributes:
      seconds: the time of the step, without the work before and after the pipeline.
      peak_bytes: the most bytes on each device, for each rank.
      host_bytes: the most bytes of residuals on the host, for each rank.
      stages: what is done with the residuals of each stage.
    """

    seconds: float
    peak_bytes: tuple[float, ...]
    host_bytes: tuple[float, ...]
    stages: tuple[StageUse, ...]

    @property
    def moved(self) -> float:
        """The bytes that all ranks move to the host in a step."""
        return sum(stage.moved for stage in self.stages)

    @property
    def recomputation(self) -> float:
        """The seconds of recomputation of all ranks in a step."""
        return sum(stage.recomputation for stage in self.stages)


@dataclass(frozen=True, kw_only=True)
class StepModel:
    """A schedule with the loads of its stages, on hardware.

    Args:
      schedule: the schedule.
      num_microbatches: the number of microbatches of a step.
      stages: the load of each stage.
      hardware: the devices and their links.

    Raises:
      ScheduleError: if the number of loads is not the number of stages.

    Example:
      >>> from jaxpp_flax.schedules import GPipe
      >>> from jaxpp_flax.schedules.residuals import KEEP, StageResiduals
      >>> load = StageLoad(forward=1.0, backward=2.0, residual_bytes=10.0, input_bytes=1.0)
      >>> step = StepModel(schedule=GPipe(2), num_microbatches=8, stages=[load] * 2,
      ...                  hardware=Hardware(flops=1.0, host_bandwidth=10.0))
      >>> step.predict(ResidualPlan.keep(2)).peak_bytes, step.predict(ResidualPlan.keep(2)).seconds
      ((80.0, 80.0), 27.0)
      >>> half, again = StageResiduals(offload=0.5), StageResiduals(recompute=True)
      >>> less = step.predict(ResidualPlan([half, again], fetch_ahead=1, offload_within=1))
      >>> less.peak_bytes, less.host_bytes, less.seconds
      ((60.0, 17.0), (40.0, 0.0), 35.0)
    """

    schedule: Schedule
    num_microbatches: int
    stages: Sequence[StageLoad]
    hardware: Hardware

    def __post_init__(self) -> None:
        if len(self.stages) != self.schedule.num_stages:
            raise ScheduleError(
                f"StepModel has {len(self.stages)} loads, but the schedule has {self.schedule.num_stages} stages: give "
                "one load for each stage."
            )

    @cached_property
    def costs(self) -> Costs:
        """The inputs of the simulator."""
        half = [load.backward / 2 for load in self.stages]
        return Costs(
            forward=[load.forward for load in self.stages],
            backward_input=half,
            backward_weight=half,
            activation=[load.residual_bytes for load in self.stages],
            sent=[load.sent_bytes for load in self.stages],
            recomputation=[load.time_again for load in self.stages],
            stage_input=[load.input_bytes for load in self.stages],
            cheap_recomputation=[load.cheap_recomputation for load in self.stages],
            cheap_activation=[load.residual_bytes - load.cheap_bytes for load in self.stages],
        )

    @cached_property
    def tasks(self) -> list[list[AnyTask]]:
        """Each rank's tasks."""
        ranks = range(self.schedule.num_ranks)
        return [list(self.schedule.rank_tasks(rank, self.num_microbatches)) for rank in ranks]

    @cached_property
    def rank_of(self) -> tuple[int, ...]:
        """The rank of each stage."""
        return tuple(map(self.schedule.rank_of, range(self.schedule.num_stages)))

    def predict(self, residuals: ResidualPlan) -> Prediction:
        """Return the time and the bytes of a step with these residuals."""
        step = summarize(
            self.schedule,
            self.costs,
            self.hardware.transfer,
            num_microbatches=self.num_microbatches,
            residuals=residuals,
            host_link=self.hardware.host_link,
        )
        peaks = self.ordered_peaks(residuals)
        return Prediction(
            seconds=step.makespan,
            peak_bytes=tuple(f + peak for f, peak in zip(self.rank_fixed, peaks, strict=True)),
            host_bytes=step.peak_host_memory,
            stages=self._uses(residuals),
        )

    def ordered_peaks(self, residuals: ResidualPlan) -> tuple[float, ...]:
        """Return the most bytes of residuals on each device, for each rank, by the order of its tasks alone.

        A value that moves to the host counts until the task that waits for the end of its offload (without such a task,
        until its fetch), and again from the task in front of which its fetch stands. So the times of copies have no
        influence, and the simulation never holds more.
        """
        table = self.costs.table(self.schedule.num_stages, residuals)
        return tuple(self.ordered_peak(rank, residuals, table) for rank in range(len(self.tasks)))

    def ordered_peak(self, rank: int, residuals: ResidualPlan, table: CostTable | None = None) -> float:
        """Return the most bytes of residuals of one rank; see `ordered_peaks`. Other ranks have no influence."""
        table = self.costs.table(self.schedule.num_stages, residuals) if table is None else table
        tasks = self.tasks[rank]
        fetched, gone = [0.0] * len(tasks), [0.0] * len(tasks)
        for copy in host_copies(tasks, residuals):
            fetched[copy.fetch_before] += table.moved[copy.stage]
            gone[copy.fetch_before if copy.gone_before is None else copy.gone_before] += table.moved[copy.stage]
        held = peak = 0.0
        for position, task in enumerate(tasks):
            added, freed = table.memory_change(task)
            held += fetched[position] - gone[position] + added
            peak = max(peak, held)
            held += freed
        return peak

    def bytes_by_kind(self, rank: int, prediction: Prediction) -> dict[str, float]:
        """Return a rank's bytes at its peak by kind; "residuals" are those in flight."""
        found: dict[str, float] = {}
        for stage in (s for s, of in enumerate(self.rank_of) if of == rank):
            for kind, nbytes in self.stages[stage].fixed_bytes.items():
                found[kind] = found.get(kind, 0.0) + nbytes
        return {**found, "residuals": prediction.peak_bytes[rank] - self.rank_fixed[rank]}

    @cached_property
    def rank_fixed(self) -> tuple[float, ...]:
        """The bytes that each rank's devices hold for the whole step."""
        fixed = [0.0] * self.schedule.num_ranks
        for rank, load in zip(self.rank_of, self.stages, strict=True):
            fixed[rank] += load.fixed
        return tuple(fixed)

    def _uses(self, residuals: ResidualPlan) -> tuple[StageUse, ...]:
        copied = [0] * len(self.stages)
        for tasks in self.tasks:
            for copy in host_copies(tasks, residuals):
                copied[copy.stage] += 1
        uses: list[StageUse] = []
        for stage, load in enumerate(self.stages):
            entry, count = residuals.of(stage), self.num_microbatches
            size = load.kept_bytes(entry)
            moved = size * entry.offload_values * copied[stage]
            again = {True: load.residual_bytes, "cheap": load.cheap_bytes}.get(entry.recompute, 0.0)
            uses.append(
                StageUse(
                    kept=size * count - moved,
                    moved=moved,
                    recomputed=again * count,
                    recomputation=load.seconds_again(entry) * count,
                )
            )
        return tuple(uses)
