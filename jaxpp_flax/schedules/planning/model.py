"""The model of a step that every planner uses: seconds, and bytes of each rank, from loads of stages and hardware.

The time is the simulated step. The bytes are those held for the whole step (parameters, optimizer, gradients, data),
the residuals in flight, gathered parameters, and what the update fetches from the host. Nothing here needs a device, so
a plan can be made for hardware that is not there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

from jaxpp_flax.schedules.errors import ScheduleError
from jaxpp_flax.schedules.gathers import Gathers, check_fsdp
from jaxpp_flax.schedules.residuals import ResidualPlan, StageResiduals, host_copies
from jaxpp_flax.schedules.schedule import Schedule
from jaxpp_flax.schedules.simulation.costs import Costs, CostTable, Link, Transfer
from jaxpp_flax.schedules.simulation.simulate import summarize
from jaxpp_flax.schedules.task import AnyTask

__all__ = ["Hardware", "Prediction", "StageLoad", "StageUse", "StepModel", "update_window"]

_WINDOW = "optimizer state from the host"


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
      gather_bandwidth: bytes a second that a device receives from the other devices of its stage, for parameters that
        are sharded inside the stage (FSDP).
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
    gather_bandwidth: float = math.inf
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
      gathered: bytes of the whole parameters that are sharded inside the stage (FSDP), by name; `StepModel(fsdp=)` says
        how often they are gathered. Stages of one rank share a parameter of one name.
      streamed: bytes of the optimizer state on the host, for each parameter; the update fetches them in windows.

    Raises:
      ScheduleError: for fixed or streamed bytes that are negative or not finite.

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
    gathered: Mapping[str, float] = field(default_factory=dict)
    streamed: Sequence[float] = ()

    def __post_init__(self) -> None:
        for kind, nbytes in (*self.fixed_bytes.items(), *(("streamed", each) for each in self.streamed)):
            if not 0 <= nbytes < math.inf:
                raise ScheduleError(f"StageLoad has {nbytes} bytes of {kind!r}: give a finite number of at least 0.")

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
      fsdp: how often parameters are gathered: "step", "microbatch" or a number of bytes; see `MeshOptions`.
      stream_window: bytes of optimizer state on the host that the update fetches at one time. What one parameter has is
        fetched together.

    Raises:
      ScheduleError: if the number of loads is not the number of stages, and for less than 1 microbatch.
      ValueError, TypeError: for another `fsdp`.

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
    fsdp: str | int = "microbatch"
    stream_window: float = math.inf

    def __post_init__(self) -> None:
        if len(self.stages) != self.schedule.num_stages:
            raise ScheduleError(
                f"StepModel has {len(self.stages)} loads, but the schedule has {self.schedule.num_stages} stages: give "
                "one load for each stage."
            )
        if self.num_microbatches < 1:
            raise ScheduleError(f"num_microbatches={self.num_microbatches}: a step has at least 1 microbatch.")
        if not self.stream_window > 0:
            raise ScheduleError(f"stream_window={self.stream_window}: it must be a number of bytes above 0.")
        check_fsdp(self.fsdp)

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
    def gathers(self) -> Gathers | None:
        """The parameters that are gathered; None if there are no such parameters."""
        if not any(load.gathered for load in self.stages):
            return None
        return Gathers([load.gathered for load in self.stages], self.fsdp, self.hardware.gather_bandwidth)

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
            gathers=self.gathers,
        )
        peaks = self.ordered_peaks(residuals)
        return Prediction(
            seconds=step.makespan,
            peak_bytes=tuple(f + peak for f, peak in zip(self.rank_fixed, peaks, strict=True)),
            host_bytes=step.peak_host_memory,
            stages=self._uses(residuals),
        )

    def ordered_peaks(self, residuals: ResidualPlan) -> tuple[float, ...]:
        """Return the most bytes above the fixed ones on each device, for each rank, by the order of its tasks alone.

        These are residuals and gathered parameters, or what the update fetches from the host, if that is more.
        A value that moves to the host counts until the task that waits for the end of its offload (without such a task,
        until its fetch), and again from the task in front of which its fetch stands. So the times of copies have no
        influence, and the simulation never holds more.
        """
        table = self.costs.table(self.schedule.num_stages, residuals)
        return tuple(self.ordered_peak(rank, residuals, table) for rank in range(len(self.tasks)))

    def ordered_peak(self, rank: int, residuals: ResidualPlan, table: CostTable | None = None) -> float:
        """Return the most bytes above the fixed ones of one rank; see `ordered_peaks`. Other ranks do not matter."""
        return sum(self._fullest_moment(rank, residuals, table).values())

    def _fullest_moment(self, rank: int, residuals: ResidualPlan, table: CostTable | None = None) -> dict[str, float]:
        """Return the bytes above the fixed ones of one rank at its fullest moment, by kind."""
        table = self.costs.table(self.schedule.num_stages, residuals) if table is None else table
        tasks, gathered = self.tasks[rank], self._gathered[rank]
        fetched, gone = [0.0] * len(tasks), [0.0] * len(tasks)
        for copy in host_copies(tasks, residuals):
            fetched[copy.fetch_before] += table.moved[copy.stage]
            gone[copy.fetch_before if copy.gone_before is None else copy.gone_before] += table.moved[copy.stage]
        held = peak = most = 0.0
        for position, task in enumerate(tasks):
            added, freed = table.memory_change(task)
            held += fetched[position] - gone[position] + added
            if held + gathered[position] > peak + most:
                peak, most = held, gathered[position]
            held += freed
        update = self._update_bytes(rank)
        return {_WINDOW: update} if update > peak + most else {"residuals": peak, "gathered parameters": most}

    @cached_property
    def _gathered(self) -> list[list[float]]:
        """The bytes of gathered parameters on each device, for each rank and each of its tasks."""
        found: list[list[float]] = []
        for tasks in self.tasks:
            held = [0.0] * len(tasks)
            for window in () if self.gathers is None else self.gathers.windows(tasks):
                for position in range(window.gather_before, window.read_last + 1):
                    held[position] += window.nbytes
            found.append(held)
        return found

    def _update_bytes(self, rank: int) -> float:
        """Return the most bytes of optimizer state on the host that a rank's update has on each device at one time."""
        leaves = [n for of, load in zip(self.rank_of, self.stages, strict=True) if of == rank for n in load.streamed]
        return update_window(leaves, self.stream_window)

    def bytes_by_kind(self, rank: int, residuals: ResidualPlan) -> dict[str, float]:
        """Return a rank's bytes at its peak by kind; "residuals" are those in flight."""
        found: dict[str, float] = {}
        for stage in (s for s, of in enumerate(self.rank_of) if of == rank):
            for kind, nbytes in self.stages[stage].fixed_bytes.items():
                found[kind] = found.get(kind, 0.0) + nbytes
        return {**found, **self._fullest_moment(rank, residuals)}

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


def update_window(leaves: Sequence[float], window: float) -> float:
    """Return the most bytes of optimizer state that an update fetches from the host at one time.

    Args:
      leaves: the bytes of each parameter's state, which are fetched together.
      window: the bytes that several parameters share.

    Example:
      >>> update_window([3.0, 4.0, 5.0], 8.0), update_window([3.0, 9.0], 8.0)
      (8.0, 9.0)
    """
    return max(min(sum(leaves), window), max(leaves, default=0.0))
