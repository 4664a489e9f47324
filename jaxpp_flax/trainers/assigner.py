"""The trainer's part of assignments: costs of blocks, the memory limit, and the plan of the training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from jaxpp_flax.assignment import AssignmentError, CutPolicy, Plan, even, resolve, segment_names
from jaxpp_flax.assignment.balancing import Balance, balance
from jaxpp_flax.assignment.limited import LimitedPlan, LimitedStep, balance_within, too_large
from jaxpp_flax.assignment.memory import Held, MemoryModel, live_counts
from jaxpp_flax.assignment.platform_speed import flops_per_byte, hardware_of
from jaxpp_flax.assignment.policies import cuts_of, sizes_of
from jaxpp_flax.assignment.simulated_step import MOST_TASKS, StepTime
from jaxpp_flax.assignment.stages_choice import StagesChoice, choose
from jaxpp_flax.engine.arrays.ambient_mesh import context_mesh
from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.engine.blocks import Marks, Work
from jaxpp_flax.engine.passes.memory import stream_updates
from jaxpp_flax.engine.tracing.markers import Mark
from jaxpp_flax.messages import near_names
from jaxpp_flax.planning import Choice, Hardware
from jaxpp_flax.schedules import Schedule
from jaxpp_flax.schedules.gathers import Fsdp
from jaxpp_flax.schedules.residuals import ResidualPlan
from jaxpp_flax.trainers.tuning.exact_bytes import ExactBytes
from jaxpp_flax.trainers.tuning.shared_block_times import shared_block_times

__all__ = ["Assigner", "Pipeline"]

# Of a search that nobody asked for, with several stages on a rank: about a tenth of a second.
_MOST_TASKS_UNASKED = 60_000


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """The inputs of an assignment, except the model.

    Args:
      schedule: gives the rank of each stage, and the number of microbatches in flight.
      num_microbatches: the number of microbatches of a step.
      mesh: the mesh of the ranks.
      kept: for each leaf of a step's arguments, what the optimizer and the average keep; see `step.kept_bytes`.
      fsdp: how often the training step gathers parameters; see `MeshOptions`.
    """

    schedule: Schedule
    num_microbatches: int
    mesh: MpmdMesh
    kept: Callable[[], Sequence[tuple[float, float]]]
    fsdp: Fsdp = "microbatch"

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank of each stage."""
        return tuple(map(self.schedule.rank_of, range(self.schedule.num_stages)))


class Assigner:
    """Turns `assignment=`, `cost=` and `memory_limit=` into plans, one for each schedule, made when a step is compiled.

    Args:
      assignment: see `jaxpp_flax.assignment.resolve`.
      cost, memory_limit, hardware: the checked values of `jaxpp_flax.trainers.Assignment`.

    Raises:
      AssignmentError, TypeError: for an assignment that `resolve` refuses.
    """

    def __init__(
        self, assignment: Any, cost: Any = None, memory_limit: Any = None, hardware: Hardware | None = None
    ) -> None:
        self._policy = resolve(assignment)
        # How stages are searched: "auto" or "balanced"; None: the policy alone decides.
        self._search = assignment if isinstance(assignment, str) and assignment in ("auto", "balanced") else None
        self._cost = "estimated" if cost is None and self._search else cost
        self._quiet = self._search == "auto" and cost is None  # the table of stages tells the choice
        self._limit, self._hardware = memory_limit, hardware
        self._plans: dict[Any, tuple[tuple[int, ...], Plan]] = {}
        self._works: dict[int, tuple[Work, ...]] = {}
        self._unseen: list[Plan] = []
        self._last: tuple[Marks, Pipeline] | None = None  # of the step that was cut last
        self._exact = ExactBytes(memory_limit)
        self._is_new = False  # whether the step that was cut last has a plan of its own

    def compile_within_limit(self, schedule: Schedule | None, num_microbatches: int, run: Callable[[], Any]) -> Any:
        """Return `run()`, a training step that is compiled, with a plan whose exact bytes are within the memory limit.

        If a rank of the compiled step holds more, plan again with what the model has left out, a few times.

        Raises:
          AssignmentError: if no such plan is found; it names the closest one.
        """
        key = schedule, num_microbatches
        try:
            while True:
                compiled, found = run(), self.plan_of(*key)
                fits = self._limit is None or found is None
                try:
                    fits = fits or self._exact.fit(cast(Plan, found), compiled.memory_analysis())
                finally:
                    if not fits and self._is_new:  # otherwise the blocks stay where they are
                        del self._plans[key]
                        self._unseen.pop()
                if fits:
                    return compiled
        finally:
            self._exact.forget()

    def plan_with(self, schedule: Schedule) -> LimitedPlan | None:
        """Return the plan that the step which was cut last would have with another schedule on the same ranks.

        None without a memory limit, or before a step was cut.

        Raises:
          AssignmentError: if nothing fits the limit, or the model has too few marks.
        """
        if self._limit is None or self._last is None:
            return None
        marks, pipeline = Marks(replace(self._last[0].blocks, split_backward=schedule.splits_backward)), self._last[1]
        pipeline, mesh = replace(pipeline, schedule=schedule), pipeline.mesh
        with context_mesh(mesh.abstract_submesh if mesh.is_explicit else None):
            step = self._limited_step(marks, pipeline)
            cuts, plan = self._make(marks, schedule.num_stages, pipeline, step)
            choice = cast(Choice, plan.choice)
            return LimitedPlan(model=step.model(sizes_of(cuts, marks)), choice=choice, limits=step.memory.limits)

    def plan_of(self, schedule: Schedule | None, num_microbatches: int) -> Plan | None:
        """Return the plan for a schedule; None before a training step was compiled for the schedule."""
        found = self._plans.get((schedule, num_microbatches))
        return None if found is None else found[1]

    def residuals_of(self, schedule: Schedule | None, num_microbatches: int) -> ResidualPlan | None:
        """Return the residuals for the step that was cut last for a schedule; None if all stages keep theirs."""
        plan = self.plan_of(schedule, num_microbatches)
        return None if plan is None or plan.residuals is None or plan.residuals.is_kept else plan.residuals

    def news(self) -> list[Plan]:
        """Return the plans with costs that were made since the last call, so that each is shown once.

        Costs that only served to choose between even and balanced stages are not shown.
        """
        unseen, self._unseen = self._unseen, []
        return [plan for plan in unseen if plan.rank_costs is not None and not self._quiet]

    def policy(self, pipeline: Pipeline, *, training: bool) -> CutPolicy:
        """Return the policy for a training step; inference uses the cuts of training, once these exist."""

        def train(marks: Sequence[Mark], num_stages: int) -> tuple[int, ...]:
            key, marks = (pipeline.schedule, pipeline.num_microbatches), cast(Marks, marks)
            if key in self._plans and any(cut >= len(marks) for cut in self._plans[key][0]):
                return tuple(self._policy(marks, num_stages))  # for this batch, the loss calls the model less often
            if key in self._plans and not marks.blocks.body.has_sums:
                return self._plans[key][0]  # the first pass of a `WholeBatchLoss`: the stages of the second
            self._last, self._is_new = (marks, pipeline), key not in self._plans
            if self._is_new:
                limited = None if self._limit is None else self._limited_step(marks, pipeline)
                self._plans[key] = self._make(marks, num_stages, pipeline, limited)
                self._unseen.append(self._plans[key][1])
            elif self._limit is not None:  # other shapes of a batch: the blocks stay where they are
                cuts, plan = self._plans[key]
                choice = _choose(marks, sizes_of(cuts, marks), self._limited_step(marks, pipeline))
                self._plans[key] = cuts, replace(plan, choice=choice, residuals=choice.residuals)
            return self._plans[key][0]

        def infer(marks: Sequence[Mark], num_stages: int) -> tuple[int, ...]:
            for (schedule, _), (cuts, plan) in self._plans.items():
                same = tuple(map(schedule.rank_of, range(schedule.num_stages))) == pipeline.ranks
                if same and len(plan.blocks) == len(marks) + 1:
                    return cuts
            return tuple(self._policy(marks, num_stages))

        return train if training else infer

    # ------------------------------------------------------------------ making a plan

    def _make(
        self, marks: Marks, num_stages: int, pipeline: Pipeline, limited: LimitedStep | None
    ) -> tuple[tuple[int, ...], Plan]:
        even_sizes = sizes_of(even()(marks, num_stages), marks)  # raises where there are too few marks
        work, source, unit = self._work(marks, pipeline)
        exact = step_gain = stages_choice = choice = None
        if self._search is None:
            cuts = tuple(self._policy(marks, num_stages))
            choice = None if limited is None else _choose(marks, sizes_of(cuts, marks), limited)
        else:
            step = _step_time(pipeline, work, _MOST_TASKS_UNASKED if self._quiet else MOST_TASKS)
            found, stages_choice, choice = self._found(marks, step, even_sizes, pipeline, limited)
            cuts = cuts_of(even_sizes if found is None else found.sizes)
            exact = None if found is None else found.exact and (choice is None or choice.residuals.is_kept)
            if found is not None and len(set(pipeline.ranks)) < num_stages and (even_step := step(even_sizes)):
                step_gain = 1.0 - step(found.sizes) / even_step
        given = self._policy.residuals if isinstance(self._policy, Plan) else None
        plan = Plan.of(
            marks,
            cuts,
            num_stages,
            work=work,
            unit=unit,
            source=source,
            ranks=pipeline.ranks,
            even_sizes=even_sizes,
            exact=exact,
            step_gain=step_gain,
            choice=choice,
            stages_choice=stages_choice,
            residuals=given if choice is None else choice.residuals,
        )
        return cuts, plan

    def _found(
        self,
        marks: Marks,
        step: StepTime,
        even_sizes: Sequence[int],
        pipeline: Pipeline,
        limited: LimitedStep | None,
    ) -> tuple[Balance | None, StagesChoice | None, Choice | None]:
        """Return balanced stages (None: even ones are better), the choice of "auto", and that of residuals."""
        choices: dict[tuple[int, ...], Choice] = {}

        def search() -> Balance:
            if limited is None:  # without a limit, there always is an assignment
                costs = [f + b for f, b in zip(step.forward, step.backward, strict=True)]
                return cast(Balance, balance(costs, pipeline.ranks, None, [0.0, *marks.sent], even_sizes, step))
            found, choice = balance_within(limited, even_sizes)
            if choice.excess > 0:
                raise too_large(segment_names(marks), found.sizes, limited, choice, found.exact)
            choices[tuple(found.sizes)] = choice
            return found

        def fits(sizes: Sequence[int]) -> bool:
            if limited is None:
                return True
            choice = choices[tuple(sizes)] = limited.choose(sizes)
            return choice.excess <= 0 and choice.residuals.is_kept

        if self._search == "balanced":
            found, stages_choice = search(), None
        else:
            can_cut = lambda sizes: marks.blocks.can_cut(cuts_of(sizes))  # noqa: E731
            found, stages_choice = choose(even_sizes, step, search, fits=fits, can_cut=can_cut)
        return found, stages_choice, choices.get(tuple(even_sizes if found is None else found.sizes))

    def _work(self, marks: Marks, pipeline: Pipeline) -> tuple[Any, str, str]:
        """Return the cost of each block, the source of the costs, and their unit."""
        cost = self._cost
        if cost is None:
            plan = self._policy if isinstance(self._policy, Plan) else None
            listed = {} if plan is None else {block.name: block for block in plan.blocks if block.cost is not None}
            names = segment_names(marks)
            if plan is None or not listed or set(names[:-1]) - set(listed):
                return None, "", ""
            nothing = Work(0.0, 0.0)
            found = [
                Work(listed[n].forward or 0.0, listed[n].backward or 0.0) if n in listed else nothing for n in names
            ]
            return found, plan.source, plan.unit
        if not isinstance(cost, str):
            return _given(cost, segment_names(marks)), "given costs", ""
        if cost == "measured":
            if len(marks) not in self._works:
                self._works[len(marks)] = self._measure(marks, pipeline.mesh)
            return self._works[len(marks)], "measured", "s"
        if cost == "flops":
            return marks.work(), "operations counted", "FLOP"
        return _estimated(marks, pipeline), "operations and bytes estimated", "FLOP"

    def _measure(self, marks: Marks, mesh: MpmdMesh) -> tuple[Work, ...]:
        return _at_every_mark(lambda: shared_block_times(marks, mesh), "cost='measured'", "cost='estimated'")

    # ------------------------------------------------------------------ memory

    def _memory(self, marks: Marks, pipeline: Pipeline) -> MemoryModel:
        kept = pipeline.kept()
        found = _at_every_mark(lambda: marks.blocks.holdings, "memory_limit=", "no memory_limit")
        held: list[Held] = []
        for item in found:
            held.append(Held(kind=item.kind, nbytes=item.nbytes, blocks=item.blocks))
            extra = kept[item.argument] if item.argument is not None and item.kind == "parameters" else (0.0, 0.0)
            for kind, nbytes in zip(("optimizer", "streamed"), extra, strict=True):
                if nbytes:
                    held.append(Held(kind=kind, nbytes=nbytes, blocks=item.blocks))
        schedule, limit = pipeline.schedule, self._limit
        limits = tuple(map(float, limit)) if isinstance(limit, Sequence) else (float(limit),) * schedule.num_ranks
        if len(limits) != schedule.num_ranks:
            raise AssignmentError(
                f"memory_limit has {len(limits)} numbers for {schedule.num_ranks} ranks. Give one for each, or one "
                "number for all."
            )
        return MemoryModel(
            held=held,
            num_blocks=len(marks) + 1,
            rank_of=pipeline.ranks,
            live=live_counts(schedule, pipeline.num_microbatches),
            limits=limits,
            fsdp=pipeline.fsdp,
            stream_window=stream_updates.WINDOW_BYTES,
            left_out=self._exact.left_out,
        )

    def _limited_step(self, marks: Marks, pipeline: Pipeline) -> LimitedStep:
        work, _, unit = self._work(marks, pipeline)
        estimated = _estimated(marks, pipeline)
        work, unit = (estimated, "FLOP") if work is None else (work, unit)
        devices = pipeline.mesh.rank_devices(0)
        hardware = hardware_of(devices[0].platform) if self._hardware is None else self._hardware
        seconds = 1.0 if unit == "s" else 1.0 / (hardware.flops * len(devices))
        if not unit:  # numbers without a unit share the estimated time
            seconds *= sum(w.total for w in estimated) / (sum(w.total for w in work) or 1.0)
        return LimitedStep(
            time=_step_time(pipeline, work),
            seconds=seconds,
            memory=self._memory(marks, pipeline),
            sent=[0.0, *(nbytes / marks.blocks.batch_shards for nbytes in marks.sent)],
            passing=[0.0, *marks.blocks.passing],
            with_effects=marks.blocks.with_effects,
            hardware=hardware,
        )


def _choose(marks: Marks, sizes: Sequence[int], step: LimitedStep) -> Choice:
    """Return the cheapest residuals for these stages; refuse an assignment in which a rank exceeds its limit."""
    choice = step.choose(sizes)
    if choice.excess > 0:
        raise too_large(segment_names(marks), sizes, step, choice, None)
    return choice


def _estimated(marks: Marks, pipeline: Pipeline) -> tuple[Work, ...]:
    return marks.work(_bytes_as_flops(pipeline))


def _bytes_as_flops(pipeline: Pipeline) -> float:
    return flops_per_byte(pipeline.mesh.rank_devices(0)[0].platform)


def _step_time(pipeline: Pipeline, work: Sequence[Work], most_tasks: int = MOST_TASKS) -> StepTime:
    return StepTime(
        schedule=pipeline.schedule,
        num_microbatches=pipeline.num_microbatches,
        forward=[w.forward for w in work],
        backward=[w.backward for w in work],
        most_tasks=most_tasks,
    )


def _at_every_mark(run: Callable[[], Any], what: str, instead: str) -> Any:
    try:
        return run()
    except AssignmentError:
        raise
    except ValueError as error:
        raise AssignmentError(
            f"{what} looks at each block alone, for which the model must be cut at every mark; that is refused: "
            f"{error} Take away the marks that cannot cut, or use {instead}."
        ) from error


def _given(cost: Any, names: Sequence[str]) -> list[Work]:
    """Return the user's own costs, forward and backward together; the part after the last block may have no cost."""
    if isinstance(cost, Mapping):
        for name in cost:
            if name not in names:
                raise AssignmentError(f"cost= names {name!r}, which is no block of the model.{near_names(name, names)}")
        missing = [name for name in names[:-1] if name not in cost]
        if missing:
            raise AssignmentError(f"cost= leaves out {missing[0]!r}. Give a number for each block.")
        return [Work(float(cost.get(name, 0.0)), 0.0) for name in names]
    if len(cost) not in (len(names) - 1, len(names)):
        raise AssignmentError(
            f"cost= has {len(cost)} numbers for {len(names) - 1} blocks. Give one for each, and perhaps one more for "
            f"what follows the last of them ({names[-1]!r})."
        )
    return [Work(float(value), 0.0) for value in (*cost, 0.0)[: len(names)]]
