"""The model of a step that every planner uses: it predicts seconds and the bytes of each rank from loads and hardware.

The time is the simulated step. The bytes are those held for the whole step (parameters, optimizer, gradients, data),
the residuals in flight, gathered parameters, and what the update fetches from the host. Nothing here needs a device, so
a plan can be made for hardware that is not there.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from jaxpp_flax.planning.loads import Hardware, StageLoad
from jaxpp_flax.schedules.errors import ScheduleError
from jaxpp_flax.schedules.gathers import Fsdp, GatheredParameter, Gathers, check_fsdp
from jaxpp_flax.schedules.memory import MemoryInUse, StageBytes
from jaxpp_flax.schedules.order import merge_order
from jaxpp_flax.schedules.residuals import HostCopy, ResidualPlan, StageResiduals, host_copies
from jaxpp_flax.schedules.schedule import Schedule, TaskLists
from jaxpp_flax.schedules.simulation.costs import Costs
from jaxpp_flax.schedules.simulation.simulate import simulate
from jaxpp_flax.schedules.task import RUN_FORWARD, Task, TaskKind, parts

__all__ = ["Hardware", "Prediction", "StageLoad", "StepModel", "arrivals", "update_window", "walk_rank"]

_WINDOW = "optimizer state from the host"
_RESIDUALS, _WORKSPACE = "residuals", "workspace"
_GATHERED, _BETWEEN_STAGES = "gathered parameters", "arrays between stages"


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The predicted time and memory of a step.

    Attributes:
      seconds: the time of the step, without the work before and after the pipeline.
      peak_bytes: for each rank, the largest number of bytes on each of its devices.
      host_bytes: for each rank, the largest number of bytes of residuals on the host.
      moved: the bytes of residuals that all ranks move to the host in a step.
      recomputation: the seconds of recomputation of all ranks in a step.
      state_host_bytes: the bytes of the optimizer's state on the host, for each rank.
    """

    seconds: float
    peak_bytes: tuple[float, ...]
    host_bytes: tuple[float, ...]
    moved: float
    recomputation: float
    state_host_bytes: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StepModel:
    """A model of a step: a schedule with the loads of its stages, on given hardware.

    Args:
      schedule: the schedule.
      num_microbatches: the number of microbatches of a step.
      stages: the load of each stage.
      hardware: the speed of the devices and their links.
      fsdp: how often parameters are gathered: "step" or "microbatch"; see `MeshOptions`.
      stream_window: the bytes of optimizer state that the update fetches from the host at one time. The state of one
        parameter is always fetched together.

    Raises:
      ScheduleError: if the number of loads is not the number of stages, `num_microbatches` is below 1, or
        `stream_window` is not above 0.
      ValueError: for an unknown `fsdp`.

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
    fsdp: Fsdp = "microbatch"
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
        """The costs of tasks, for the simulator."""
        half = [load.backward / 2 for load in self.stages]
        return Costs(
            forward=[load.forward for load in self.stages],
            backward_input=half,
            backward_weight=half,
            activation=[load.residual_bytes for load in self.stages],
            weight_activation=[
                load.residual_bytes if load.weight_bytes is None else load.weight_bytes for load in self.stages
            ],
            sent=[load.sent_bytes for load in self.stages],
            passing=[load.passing_bytes for load in self.stages],
            recomputation=[load.time_again for load in self.stages],
            stage_input=[load.kept_bytes(StageResiduals(recompute=True)) for load in self.stages],
            region=[load.region_bytes for load in self.stages],
        )

    @cached_property
    def gathers(self) -> Gathers | None:
        """The parameters that are gathered; None if there are no such parameters."""
        if not any(load.gathered for load in self.stages):
            return None
        return Gathers([load.gathered for load in self.stages], self.fsdp, self.hardware.gather_bandwidth)

    @cached_property
    def tasks(self) -> list[list[Task]]:
        """Each rank's tasks."""
        return _tasks(self.schedule, self.num_microbatches)

    @cached_property
    def rank_of(self) -> tuple[int, ...]:
        """The rank of each stage."""
        return tuple(map(self.schedule.rank_of, range(self.schedule.num_stages)))

    def predict(self, residuals: ResidualPlan) -> Prediction:
        """Return the time and the bytes of a step with these residuals."""
        step = simulate(
            self.schedule,
            self.costs,
            self.hardware.transfer,
            num_microbatches=self.num_microbatches,
            residuals=residuals,
            host_link=self.hardware.host_link,
            gathers=self.gathers,
        )
        peaks = self.ordered_peaks(residuals)
        again = [load.seconds_again(entry) for load, entry in zip(self.stages, residuals.stages, strict=True)]
        return Prediction(
            seconds=step.makespan,
            peak_bytes=tuple(f + peak for f, peak in zip(self.rank_fixed, peaks, strict=True)),
            host_bytes=step.peak_host_memory,
            moved=self._moved(residuals),
            recomputation=sum(again) * self.num_microbatches,
            state_host_bytes=tuple(sum(self._streamed(rank)) for rank in range(len(self.tasks))),
        )

    def ordered_peaks(self, residuals: ResidualPlan) -> tuple[float, ...]:
        """Return, for each rank, the largest number of bytes on each device in addition to `rank_fixed`.

        These are residuals, gathered parameters and arrays between stages; or the optimizer state that the update
        fetches from the host, if that is more. They follow from the order of the tasks alone: a value that is offloaded
        counts until the task that waits for the end of its offload (without such a task, until its fetch), and again
        from the task before which its fetch starts. So the times of copies have no influence, and the simulation never
        holds more.
        """
        return tuple(self.ordered_peak(rank, residuals) for rank in range(len(self.tasks)))

    def ordered_peak(self, rank: int, residuals: ResidualPlan) -> float:
        """Return the number of `ordered_peaks` for one rank; only the rank's own stages matter."""
        return max(self.walk(rank, residuals).peak, self._update_bytes(rank))

    def walk(self, rank: int, residuals: ResidualPlan) -> MemoryInUse:
        """Return the memory of a rank, without the fixed bytes, from its first task to its last one."""
        return walk_rank(
            self.tasks[rank],
            self.costs.table(len(self.stages), residuals).stages,
            copies=host_copies(self.tasks[rank], residuals),
            gathered=self._gathered[rank],
            arrivals=self._arrivals[rank],
        )

    @cached_property
    def _gathered(self) -> list[tuple[GatheredParameter, ...]]:
        """What each rank gathers once."""
        return [() if self.gathers is None else self.gathers.held(tasks) for tasks in self.tasks]

    @cached_property
    def _arrivals(self) -> Sequence[Sequence[Sequence[tuple[int, bool]]]]:
        """The arrays from other stages that come before each task of each rank."""
        is_sent = any(load.sent_bytes for load in self.stages)
        return _arrivals(self.schedule, self.num_microbatches) if is_sent else [()] * len(self.tasks)

    def _update_bytes(self, rank: int) -> float:
        """Return the most bytes of optimizer state on the host that a rank's update has on each device at one time."""
        return update_window(self._streamed(rank), self.stream_window)

    def _streamed(self, rank: int) -> list[float]:
        return [n for of, load in zip(self.rank_of, self.stages, strict=True) if of == rank for n in load.streamed]

    def bytes_by_kind(self, rank: int, residuals: ResidualPlan) -> dict[str, float]:
        """Return a rank's bytes at its peak by kind, such as "residuals" (in flight) and "workspace" (of a task)."""
        found: dict[str, float] = {}
        for stage in (s for s, of in enumerate(self.rank_of) if of == rank):
            for kind, nbytes in self.stages[stage].fixed_bytes.items():
                found[kind] = found.get(kind, 0.0) + nbytes
        memory, update = self.walk(rank, residuals), self._update_bytes(rank)
        return {**found, **({_WINDOW: update} if update > memory.peak else memory.at_peak)}

    @cached_property
    def rank_fixed(self) -> tuple[float, ...]:
        """The bytes that each rank's devices hold for the whole step."""
        fixed = [0.0] * self.schedule.num_ranks
        for rank, load in zip(self.rank_of, self.stages, strict=True):
            fixed[rank] += load.fixed
        return tuple(fixed)

    def _moved(self, residuals: ResidualPlan) -> float:
        table = self.costs.table(len(self.stages), residuals)
        return sum(table.stages[copy.stage].saved for tasks in self.tasks for copy in host_copies(tasks, residuals))


@lru_cache(maxsize=16)  # a search asks for them again for all sizes of stages
def _tasks(schedule: Schedule, num_microbatches: int) -> list[list[Task]]:
    return [list(schedule.rank_tasks(rank, num_microbatches)) for rank in range(schedule.num_ranks)]


@lru_cache(maxsize=16)
def _arrivals(schedule: Schedule, num_microbatches: int) -> list[list[list[tuple[int, bool]]]]:
    return arrivals(_tasks(schedule, num_microbatches))


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


def walk_rank(
    tasks: Sequence[Task],
    stages: Sequence[StageBytes],
    *,
    copies: Iterable[HostCopy] = (),
    gathered: Iterable[GatheredParameter] = (),
    arrivals: Sequence[Sequence[tuple[int, bool]]] = (),
) -> MemoryInUse:
    """Walk the tasks of a rank in their order, with what the rank copies, gathers and receives between them.

    The times of copies have no influence. A value that moves to the host counts on the devices until the task that
    waits for the end of its offload (without such a task, until its fetch), and again from its fetch on. So no run
    holds more.

    Args:
      tasks: the rank's tasks.
      stages: the bytes of each stage of the schedule.
      copies: what moves to the host and back.
      gathered: the parameters that are gathered once.
      arrivals: of this rank, from `arrivals`; by default, arrays between stages do not count.

    Example:
      >>> from jaxpp_flax.schedules import Std1F1B
      >>> walk_rank(Std1F1B(2).tasks(4)[0], [StageBytes(activation=10.0, saved=10.0)] * 2).peak
      20.0
    """
    memory = MemoryInUse()
    leaving, fetched, gathers, last_reads = (defaultdict[int, float](float) for _ in range(4))
    for copy in copies:
        moved = stages[copy.stage].saved
        leaving[copy.fetch_before if copy.gone_before is None else copy.gone_before] += moved
        fetched[copy.fetch_before] += moved
    for each in gathered:
        gathers[each.gather_before] += each.nbytes
        last_reads[each.read_last] += each.nbytes
    changes: dict[tuple[TaskKind, int], tuple[float, float, float]] = {}
    for position, task in enumerate(tasks):
        here, kind, key = stages[task.stage], task.kind, (task.kind, task.stage)
        if key not in changes:
            changes[key] = *here.changes(task), here.made_again(task)
        taken, left, again = changes[key]
        passing = here.passing if kind is TaskKind.FORWARD else 0.0
        received = gradient = 0.0
        if arrivals:
            for stage, is_forward in arrivals[position]:
                memory.change(stages[stage].received if is_forward else stages[stage].gradient, _BETWEEN_STAGES)
            received = here.received if kind in RUN_FORWARD else 0.0
            gradient = here.gradient if kind in (TaskKind.BACKWARD, TaskKind.BACKWARD_INPUT) else 0.0
        memory.change(gathers[position], _GATHERED)
        memory.change(-leaving[position], _RESIDUALS)  # it may still be there when the others have come
        memory.change(-received, _BETWEEN_STAGES)
        memory.change(fetched[position] + taken - again, _RESIDUALS)
        memory.change(again, _WORKSPACE)
        memory.change(passing, _BETWEEN_STAGES)
        memory.change(-passing - gradient, _BETWEEN_STAGES)
        memory.change(-again, _WORKSPACE)
        memory.change(left + again, _RESIDUALS)
        memory.change(-last_reads[position], _GATHERED)
    return memory


def arrivals(task_lists: TaskLists) -> list[list[list[tuple[int, bool]]]]:
    """Return, for each rank and each of its tasks, the inputs from other stages that come before this task.

    An input is a stage, and True for the input of its forward, False for that of its backward. It is on the rank of
    its reader from its maker's dispatch on.

    >>> from jaxpp_flax.schedules import Std1F1B
    >>> arrivals(Std1F1B(2).tasks(3))  # rank 0 runs F0 F1 B0 F2 B1 B2
    [[[], [], [(0, False)], [(0, False)], [], [(0, False)]], [[(1, True), (1, True)], [], [(1, True)]]]
    """
    home = {task.stage: rank for rank, tasks in enumerate(task_lists) for task in tasks}
    found: list[list[list[tuple[int, bool]]]] = [[[] for _ in tasks] for tasks in task_lists]
    dispatched = [0] * len(task_lists)
    for rank, task in merge_order(task_lists):
        dispatched[rank] += 1
        for part in parts(task):
            is_forward = part.kind is TaskKind.FORWARD
            reader = part.stage + (1 if is_forward else -1)
            if part.kind is not TaskKind.BACKWARD_WEIGHT and reader in home:
                target = home[reader]
                found[target][dispatched[target]].append((reader, is_forward))
    return found
