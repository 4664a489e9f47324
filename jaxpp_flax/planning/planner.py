"""Make a plan: for each schedule the best stages and residuals by the model of a step; its program judges bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, cast

from jaxpp_flax.engine.pipeline import PlacedPipeline
from jaxpp_flax.engine.summary import MemoryAnalysis
from jaxpp_flax.engine.traced import CutPolicy, Marks
from jaxpp_flax.messages import listed
from jaxpp_flax.planning.block_costs import Costing, block_costs
from jaxpp_flax.planning.block_loads import BlockLoads
from jaxpp_flax.planning.choice import Choice, LimitError, mixture_within, nothing_fits, why_chosen
from jaxpp_flax.planning.loads import Hardware, hardware_of, limits_of
from jaxpp_flax.planning.model import Prediction, StepModel
from jaxpp_flax.planning.plan import Plan
from jaxpp_flax.planning.predicted.blocks import Blocks, Work
from jaxpp_flax.planning.predicted.placed_step import predict_memory
from jaxpp_flax.planning.stages.balancing import Sizes, climb
from jaxpp_flax.planning.stages.policies import AssignmentError, cuts_of, even, sizes_of
from jaxpp_flax.planning.stages.step_time import StepTime
from jaxpp_flax.schedules import Schedule, by_name, names
from jaxpp_flax.schedules.errors import ScheduleError
from jaxpp_flax.schedules.gathers import Fsdp
from jaxpp_flax.schedules.residuals import KEEP, ResidualPlan, StageResiduals

__all__ = ["PlanningStep", "TracedUpdate", "check_made", "plan"]

_CORRECTIONS = 4  # of the limits by the program, for each assignment
_MOVES = 300  # of single blocks, to find stages that fit
_LEANEST = StageResiduals(recompute=True, offload=1.0)

Schedules = str | Schedule | Sequence[str | Schedule] | None


@dataclass(frozen=True)
class TracedUpdate:
    """The optimizer's update as a jaxpr.

    Args:
      jaxpr: of gradients, then of all else.
      parameters: for each of its inputs the place of the parameter that it belongs to, among the leaves of the step's
        arguments; None for what belongs to none.
    """

    jaxpr: Any
    parameters: Sequence[int | None]


@dataclass(frozen=True, kw_only=True)
class PlanningStep:
    """The description of a training step that `trainer.planning_step` gives to a planner.

    Args:
      schedule: the trainer's schedule.
      num_microbatches: the number of parts of a batch.
      layout: the axes of the mesh with their sizes, the axis of the ranks first.
      platform: the platform of the devices, such as "gpu".
      devices_of_a_rank: the number of devices of each rank.
      examples: the examples of a microbatch, divided by the devices of a rank.
      units: the number of tokens of a step; the number of examples if the batch has no tokens.
      fsdp: how often parameters are gathered; see `MeshOptions`.
      kept: for each leaf of the step's arguments, the bytes of the optimizer on each device, and on the host.
      argument_bytes: the bytes of each of these leaves.
      place: a function that places the step on ranks, for a schedule, cuts and residuals. The step is traced once;
        nothing is compiled.
      update: a function that traces the optimizer's update.
      cuts: the cuts that the trainer's `assignment=` gives; None if the planner may choose them.
      residuals: the trainer's `Memory(residuals=)`; None if the planner may choose them.
      ignored: the names in the model's annotations that shard nothing, each with a leaf.
    """

    schedule: Schedule
    num_microbatches: int
    layout: Mapping[str, int]
    platform: str
    devices_of_a_rank: int
    examples: float
    units: int
    fsdp: Fsdp
    kept: Sequence[tuple[float, float]]
    argument_bytes: Sequence[float]
    place: Callable[[Schedule, CutPolicy, ResidualPlan | None], PlacedPipeline]
    update: Callable[[], TracedUpdate]
    cuts: CutPolicy | None = None
    residuals: ResidualPlan | None = None
    ignored: Mapping[str, str] = field(default_factory=dict)


class Plannable(Protocol):
    """An object with a step to plan, such as a `PipelineTrainer`."""

    def planning_step(self, batch: Any) -> PlanningStep: ...


def check_made(made: Any, factory: str) -> tuple[Plannable, Any]:
    """Return what a user's factory has made, if it is a trainer and a batch.

    Raises:
      ValueError: for anything else.
    """
    if not isinstance(made, tuple) or len(made) != 2 or not hasattr(made[0], "planning_step"):
        got = f"({', '.join(type(of).__name__ for of in made)})" if isinstance(made, tuple) else type(made).__name__
        raise ValueError(f"{factory} must return a trainer and a batch, got {got}.")
    return made


def plan(
    trainer: Plannable | Callable[[], Plannable],
    batch: Any,
    *,
    memory_limit: float | Sequence[float] | None = None,
    schedules: Schedules = None,
    costs: Costing = "estimated",
    hardware: Hardware | None = None,
) -> Plan:
    """Choose the schedule, the stages and the residuals of a training, and predict the seconds and bytes of its step.

    Nothing is compiled or run. The plan keeps what the trainer's arguments fix: sizes or names in `assignment=`, and
    `Memory(residuals=)`. The bytes are those that the step's program holds, task by task. Among the plans within the
    limit, the one with the shortest predicted step is chosen.

    Args:
      trainer: a `PipelineTrainer`, or a function that makes one.
      batch: arrays, or their shapes (`jax.ShapeDtypeStruct`).
      memory_limit: the bytes that each device may hold (one number, or one for each rank); None: no limit. They include
        parameters, gradients, optimizer state, activations in flight and an estimate of XLA's workspace inside a task.
        If not all of them fit, stages recompute or offload residuals, and blocks move to other stages.
      schedules: names or `Schedule`s to choose from, on the trainer's ranks. "all": each named schedule with one stage
        or two stages on each rank. None: the trainer's schedule.
      costs: the costs of the blocks: "estimated" from operations and bytes, "flops", a step that `trainer.profile_step`
        measured, numbers, or a mapping from names of blocks to numbers.
      hardware: the speeds of devices and links. None: rough speeds of the platform.

    Raises:
      LimitError: if no plan keeps within the limit; it names the closest one, and the bytes of the fullest rank.
      AssignmentError, ScheduleError: for marks, costs, limits or schedules that do not fit.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from flax import nnx
      >>> from jaxpp_flax import PipelineStage, PipelineTrainer
      >>> layers = [PipelineStage(nnx.Linear(8, 8, rngs=nnx.Rngs(i)), name=f"layer_{i}") for i in range(4)]
      >>> model, loss = nnx.Sequential(*layers), lambda model, x: jnp.mean(model(x) ** 2)
      >>> options = {"num_stages": 2, "num_microbatches": 4, "mesh": {}, "logging": False}
      >>> found = plan(PipelineTrainer(model, optax.sgd(0.1), loss, **options), jnp.ones((8, 8)))
      >>> found.stage_sizes, found.residuals.is_kept  # what follows the last block counts as one
      ((2, 3), True)
      >>> PipelineTrainer(model, optax.sgd(0.1), loss, plan=found, mesh={}, logging=False).num_stages
      2
    """
    source = trainer if hasattr(trainer, "planning_step") else cast(Callable[[], Plannable], trainer)()
    step = cast(Plannable, source).planning_step(batch)
    card = hardware_of(step.platform) if hardware is None else hardware
    limits = limits_of(memory_limit, step.schedule.num_ranks)
    found, refused = list[Plan](), dict[Schedule, Exception]()
    for schedule in _schedules(schedules, step):
        try:
            found.append(_Planner(step, schedule, costs, card, limits).best())
        except (AssignmentError, ScheduleError) as error:
            if schedules is None:
                raise
            refused[schedule] = error
    if not found:
        raise _none_left(refused)
    best = min(found, key=lambda of: cast(float, of.seconds))
    if len(found) + len(refused) > 1:
        others = f"the best of {len(found)} schedules; {len(refused)} do not fit" if refused else ""
        best = replace(best, notes=(*best.notes, others or f"the best of {len(found)} schedules"))
    return best


def _schedules(wanted: Schedules, step: PlanningStep) -> list[Schedule]:
    own = step.schedule
    if wanted is None:
        return [own]
    ranks, fixed = own.num_ranks, step.cuts is not None or step.residuals is not None
    if wanted == "all":
        counts = [own.num_stages] if fixed else [ranks, 2 * ranks]
        every = [by_name(name, count, ranks) for count in counts for name in names(count, ranks)]
        return list(dict.fromkeys([own, *every]))
    given = [wanted] if isinstance(wanted, (str, Schedule)) else wanted
    made = [s if isinstance(s, Schedule) else by_name(s, own.num_stages, ranks) for s in given]
    for schedule in made:
        if schedule.num_ranks != ranks:
            raise ScheduleError(
                f"{schedule!r} is for {schedule.num_ranks} ranks, but the trainer has {ranks}. Give schedules for "
                f"{ranks} ranks, or a trainer with as many."
            )
        schedule.check(step.num_microbatches)
    return list(dict.fromkeys(made))


def _none_left(refused: Mapping[Schedule, Exception]) -> Exception:
    limited = {s: e for s, e in refused.items() if isinstance(e, LimitError)}
    if not limited:
        return next(iter(refused.values()))
    schedule, closest = min(limited.items(), key=lambda pair: pair[1].closest.excess)
    return LimitError(
        f"none of {len(refused)} schedules fits: {listed(list(refused), 20, repr)}. The closest is {schedule!r}: "
        f"{closest}",
        closest.closest,
    )


@dataclass(kw_only=True)
class _Planned:
    """Stages of one schedule, with their residuals and the bytes of their program."""

    sizes: Sizes
    model: StepModel
    choice: Choice
    memory: tuple[MemoryAnalysis, ...]

    @property
    def held(self) -> list[float]:
        """The bytes of each rank's devices."""
        return [rank.held_bytes for rank in self.memory]

    def excess(self, limits: Sequence[float]) -> float:
        """Return the bytes by which the fullest rank exceeds its limit."""
        return max(0.0, *(held - limit for held, limit in zip(self.held, limits, strict=True)))


@dataclass
class _Planner:
    """Plans one schedule.

    Args:
      step: the step; schedule: the schedule; costing: the costs of blocks, as the user gives them.
      hardware: the devices; limits: the bytes of each rank.
    """

    step: PlanningStep
    schedule: Schedule
    costing: Costing
    hardware: Hardware
    limits: Sequence[float]

    def __post_init__(self) -> None:
        def remember(marks: Any, num_stages: int) -> Sequence[int]:
            if isinstance(marks, Marks) and marks.loop.body.has_sums:  # the second pass of a `WholeBatchLoss`
                self.marks = marks
            return (self.step.cuts or even())(marks, num_stages)

        self.marks = cast(Marks, None)
        self.step.place(self.schedule, remember, None)
        if self.marks is None:
            raise AssignmentError("the step has no loop that accumulates gradients, so there is nothing to plan.")

    def best(self) -> Plan:
        """Return the best plan within the limits.

        Raises:
          LimitError: if there is none.
        """
        tried = [self._planned(sizes) for sizes in self._candidates()]
        if all(of.excess(self.limits) > 0 for of in tried) and self.step.cuts is None:
            sizes = self._leanest(min(tried, key=lambda of: of.excess(self.limits)).sizes)
            if self._can_cut(sizes):
                tried.append(self._planned(sizes))
        fitting = [of for of in tried if of.excess(self.limits) <= 0]
        if not fitting:
            closest = min(tried, key=lambda of: of.excess(self.limits))
            raise nothing_fits(closest.model, closest.choice, self.limits, closest.held)
        return self._plan(min(fitting, key=lambda of: of.choice.prediction.seconds))

    # ------------------------------------------------------------ stages

    @cached_property
    def _blocks(self) -> Blocks:
        return Blocks.of(self.marks)

    @cached_property
    def _costs(self) -> tuple[list[Work], str, str]:
        return block_costs(self._blocks, self.costing, self.step.platform, self.step.examples)

    @cached_property
    def _loads(self) -> BlockLoads:
        work, _, unit = self._costs
        estimated, _, _ = block_costs(self._blocks, "estimated", self.step.platform, self.step.examples)
        seconds = 1.0 if unit == "s" else 1.0 / (self.hardware.flops * self.step.devices_of_a_rank)
        if not unit:  # numbers without a unit share the estimated time
            seconds *= sum(w.total for w in estimated) / (sum(w.total for w in work) or 1.0)
        timed = [Work(w.forward * seconds, w.backward * seconds) for w in work]
        return BlockLoads.of(self._blocks, timed, self.step.kept, self.hardware, self.step.fsdp)

    @cached_property
    def _even(self) -> Sizes:
        return sizes_of(even()(self.marks, self.schedule.num_stages), self.marks)

    def _candidates(self) -> list[Sizes]:
        """Return the sizes to try first: those that are given, or even ones and those of equal time."""
        if self.step.cuts is not None:
            return [sizes_of(tuple(self.step.cuts(self.marks, self.schedule.num_stages)), self.marks)]
        time = StepTime(
            schedule=self.schedule,
            num_microbatches=self.step.num_microbatches,
            forward=[w.forward for w in self._loads.work],
            backward=[w.backward for w in self._loads.work],
        )
        found = dict.fromkeys((self._even, time.balanced(self._even, self._loads.sent)))
        return [sizes for sizes in found if self._can_cut(sizes)]

    def _leanest(self, start: Sizes) -> Sizes:
        """Move blocks away from ranks above their limits, by the model with the leanest residuals."""

        def over(sizes: Sizes) -> float:
            model = self._loads.model(self.schedule, self.step.num_microbatches, sizes)
            lean = ResidualPlan([KEEP if load.has_effects else _LEANEST for load in model.stages], offload_within=1)
            held = (fixed + peak for fixed, peak in zip(model.rank_fixed, model.ordered_peaks(lean), strict=True))
            return sum(max(0.0, nbytes - limit) for nbytes, limit in zip(held, self.limits, strict=True))

        return climb(start, over, _MOVES)

    def _can_cut(self, sizes: Sizes) -> bool:
        return self._blocks.can_cut(cuts_of(sizes))

    # ------------------------------------------------------------ residuals

    def _planned(self, sizes: Sizes) -> _Planned:
        """Return the best residuals for these stages; where the program holds other bytes, the limits follow.

        The first are those that stay on the devices, which nothing beats if they fit.
        """
        model, found = self._loads.model(self.schedule, self.step.num_microbatches, sizes), list[_Planned]()
        given = self.step.residuals
        residuals = ResidualPlan.keep(self.schedule.num_stages) if given is None else given
        prediction = model.predict(residuals)
        choice = Choice(residuals=residuals, prediction=prediction, keep=prediction, excess=0.0)
        while all(of.choice.residuals != choice.residuals for of in found):
            memory = predict_memory(self.step.place(self.schedule, _cutting(cuts_of(sizes)), choice.residuals))
            found.append(_Planned(sizes=sizes, model=model, choice=choice, memory=memory))
            if found[-1].excess(self.limits) <= 0 or given is not None or len(found) > _CORRECTIONS:
                break
            said = zip(self.limits, found[-1].held, choice.prediction.peak_bytes, strict=True)
            choice = mixture_within(model, [limit - (held - predicted) for limit, held, predicted in said])
        return min(found, key=lambda of: of.excess(self.limits))

    def _plan(self, found: _Planned) -> Plan:
        work, source, unit = self._costs
        prediction: Prediction = found.choice.prediction
        limited = any(limit < math.inf for limit in self.limits)
        state = zip(prediction.state_host_bytes, found.memory, strict=True)
        on_host = [nbytes + rank.host_peak_bytes for nbytes, rank in state]
        return Plan.of(
            self.marks,
            cuts_of(found.sizes),
            self.schedule.num_stages,
            work=work,
            unit=unit,
            source=source,
            even_sizes=self._even,
            schedule=self.schedule,
            num_microbatches=self.step.num_microbatches,
            residuals=found.choice.residuals,
            layout=dict(self.step.layout),
            fsdp=self.step.fsdp,
            seconds=prediction.seconds,
            peak_bytes=tuple(map(float, found.held)),
            host_bytes=tuple(map(float, on_host)),
            notes=(why_chosen(found.choice),) if limited else (),
        )


def _cutting(cuts: Sequence[int]) -> CutPolicy:
    """Return the policy that cuts where the gradients' loop is cut; other loops of the step are cut alike."""
    return lambda marks, num_stages: cuts
