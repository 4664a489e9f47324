"""The stages of a training: the cuts that `assignment=` asks for, and the plan of the steps that run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from jaxpp_flax.engine.traced import Marks
from jaxpp_flax.engine.tracing.markers import Mark
from jaxpp_flax.messages import amount
from jaxpp_flax.planning import CutPolicy, Plan, even, segment_names
from jaxpp_flax.planning.loads import flops_per_byte
from jaxpp_flax.planning.predicted.blocks import Blocks, Work
from jaxpp_flax.planning.stages.balancing import Sizes
from jaxpp_flax.planning.stages.policies import cuts_of, sizes_of
from jaxpp_flax.planning.stages.step_time import MARGIN, StepTime, is_clearly_less
from jaxpp_flax.schedules import Schedule
from jaxpp_flax.trainers.mesh import layout_of
from jaxpp_flax.trainers.stages.assignment import resolve
from jaxpp_flax.trainers.stages.scheduling import Scheduling

__all__ = ["Assigner"]


class Assigner:
    """Turns `assignment=` into cuts, one choice for each schedule, made when a training step is compiled.

    Args:
      assignment: see `jaxpp_flax.trainers.stages.assignment.resolve`.

    Raises:
      AssignmentError, TypeError: for an assignment that `resolve` refuses.
    """

    def __init__(self, assignment: Any) -> None:
        self._policy = resolve(assignment)
        # How stages are searched: "auto" or "balanced"; None: the policy alone decides.
        self._search = assignment if isinstance(assignment, str) and assignment in ("auto", "balanced") else None
        self._plans: dict[Any, tuple[tuple[int, ...], Plan]] = {}
        self._inferred: dict[Any, tuple[int, ...]] = {}
        self._told: Plan | None = None

    @property
    def fixed_cuts(self) -> CutPolicy | None:
        """The policy that says all; None if the stages are searched, so that a planner may choose them."""
        return None if self._search else self._policy

    def plan_of(self, schedule: Schedule | None, num_microbatches: int) -> Plan | None:
        """Return the plan for a schedule; None before a training step was compiled for the schedule."""
        found = self._plans.get((schedule, num_microbatches))
        return None if found is None else found[1]

    def note_told(self, plan: Plan) -> bool:
        """Note that a plan is told; return True if it is a new one, with costs that somebody asked for."""
        told, self._told = self._told, plan
        return plan is not told and plan.rank_costs is not None and self._search != "auto"

    def policy(self, scheduling: Scheduling, *, training: bool) -> CutPolicy:
        """Return the policy for a training step; inference uses the cuts of training, once these exist."""

        def train(marks: Sequence[Mark], num_stages: int) -> tuple[int, ...]:
            key, marks = (scheduling.schedule, scheduling.num_microbatches), cast(Marks, marks)
            if key in self._plans and any(cut >= len(marks) for cut in self._plans[key][0]):
                # For this batch, the loss calls the model less often.
                return self._unplanned(marks, num_stages, scheduling)
            if key not in self._plans:
                self._plans[key] = self._make(marks, num_stages, scheduling)
            return self._plans[key][0]

        def infer(marks: Sequence[Mark], num_stages: int) -> tuple[int, ...]:
            current = _ranks_of(scheduling.pipeline("an assignment")[0])
            for (schedule, _), (cuts, plan) in self._plans.items():
                if _ranks_of(schedule) == current and len(plan.blocks) == len(marks) + 1:
                    return cuts
            # The first cuts stay: calls of other shapes would balance otherwise, and weights would move for each call.
            key = current, len(marks)
            if key not in self._inferred:
                self._inferred[key] = self._unplanned(cast(Marks, marks), num_stages, scheduling)
            return self._inferred[key]

        return train if training else infer

    def _unplanned(self, marks: Marks, num_stages: int, scheduling: Scheduling) -> tuple[int, ...]:
        """Return cuts that no plan keeps: those of inference before a training, say."""
        if self._search is None:
            return tuple(self._policy(marks, num_stages))
        even_sizes = sizes_of(even()(marks, num_stages), marks)
        return cuts_of(self._balanced(marks, even_sizes, scheduling)[0])

    def _make(self, marks: Marks, num_stages: int, scheduling: Scheduling) -> tuple[tuple[int, ...], Plan]:
        schedule, mesh = scheduling.pipeline("an assignment")
        even_sizes = sizes_of(even()(marks, num_stages), marks)  # raises where there are too few marks
        known: dict[str, Any] = {}
        if self._search is None:
            cuts = tuple(self._policy(marks, num_stages))
            known = _known_of(self._policy, marks, scheduling) if isinstance(self._policy, Plan) else {}
        else:
            sizes, work, notes = self._balanced(marks, even_sizes, scheduling)
            cuts = cuts_of(sizes)
            known = {"work": work, "unit": "FLOP", "source": "operations and bytes estimated", "notes": notes}
        plan = Plan.of(
            marks,
            cuts,
            num_stages,
            even_sizes=even_sizes,
            schedule=schedule,
            num_microbatches=scheduling.num_microbatches,
            residuals=scheduling.residuals,
            layout=layout_of(mesh),
            **known,
        )
        return cuts, plan

    def _balanced(
        self, marks: Marks, even_sizes: Sizes, scheduling: Scheduling
    ) -> tuple[Sizes, Sequence[Work], tuple[str, ...]]:
        """Return balanced stages, the work of each block, and what decided.

        For "auto" they are even ones, unless the others are clearly faster.
        """
        schedule, mesh = scheduling.pipeline("an assignment")
        blocks = Blocks.of(marks)
        work = blocks.work(flops_per_byte(mesh.rank_devices(0)[0].platform))
        step = StepTime(
            schedule=schedule,
            num_microbatches=scheduling.num_microbatches,
            forward=[w.forward for w in work],
            backward=[w.backward for w in work],
        )
        sizes = step.balanced(even_sizes, [0.0, *blocks.sent])
        if self._search == "balanced":
            return sizes, work, ()
        now, other = step(even_sizes), step(sizes)
        if not is_clearly_less(other, now):
            return even_sizes, work, (_told("even stages", now, other),)
        if not blocks.can_cut(cuts_of(sizes)):
            return (
                even_sizes,
                work,
                (_told("even stages (the model cannot be cut into the balanced ones)", now, other),),
            )
        return sizes, work, (_told("balanced stages", now, other),)


def _ranks_of(schedule: Schedule) -> tuple[int, ...]:
    """Return the rank of each stage."""
    return tuple(map(schedule.rank_of, range(schedule.num_stages)))


def _told(chosen: str, even_step: float, step: float) -> str:
    """Return the choice of "auto" and the estimates as one line.

    Example:
      >>> _told("even stages", 100.0, 97.0)
      'assignment "auto": even stages; simulated step: even 100 FLOP, balanced 97 FLOP (-3%; chosen from -10% on)'
    """
    change = f"{step / even_step - 1.0:+.0%}" if even_step else "+0%"
    figures = f"even {amount(even_step, 'FLOP')}, balanced {amount(step, 'FLOP')}"
    return f'assignment "auto": {chosen}; simulated step: {figures} ({change}; chosen from {-MARGIN:.0%} on)'


def _known_of(plan: Plan, marks: Marks, scheduling: Scheduling) -> dict[str, Any]:
    """Return what a user's plan knows of the blocks; and of the step, if it is a plan for this schedule."""
    listed = {block.name: block for block in plan.blocks if block.cost is not None}
    names = segment_names(marks)
    known: dict[str, Any] = {"notes": plan.notes}
    if listed and not set(names[:-1]) - set(listed):
        nothing = Work(0.0, 0.0)
        work = [Work(listed[n].forward or 0.0, listed[n].backward or 0.0) if n in listed else nothing for n in names]
        known |= {"work": work, "unit": plan.unit, "source": plan.source}
    if (plan.schedule, plan.num_microbatches) == (scheduling.schedule, scheduling.num_microbatches):
        known |= {"seconds": plan.seconds, "peak_bytes": plan.peak_bytes, "host_bytes": plan.host_bytes}
    return known
