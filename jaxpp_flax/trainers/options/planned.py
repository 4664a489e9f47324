"""The arguments that a plan gives a trainer, beside those that the user gives: `PipelineTrainer(plan=)`."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxpp_flax.planning.plan import Plan
from jaxpp_flax.schedules import Schedule, by_name
from jaxpp_flax.trainers.errors import MeshError
from jaxpp_flax.trainers.mesh import STAGE_AXIS, layout_of, wrap_mesh
from jaxpp_flax.trainers.options.memory import Memory
from jaxpp_flax.trainers.options.mesh import MeshOptions

__all__ = ["Planned", "take_plan"]


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The arguments of a trainer that a plan may give."""

    num_stages: Any
    num_microbatches: Any
    schedule: Any
    assignment: Any
    mesh: MeshOptions
    memory: Memory


def take_plan(plan: Plan | str | os.PathLike[str] | None, given: Planned) -> Planned:
    """Return the arguments of a trainer: those that are given, and those of the plan in the place of None.

    Raises:
      AssignmentError, FileNotFoundError: for a file that holds no plan.
      TypeError: without a plan, if the number of stages or of microbatches is missing; for a value that is no plan.
      MeshError: for a plan for another number of devices; axes in `mesh=` that are the plan's allow fewer.
      ValueError: if an argument differs from the plan; it names the field and both values.
    """
    if plan is None:
        for name in ("num_stages", "num_microbatches"):
            if getattr(given, name) is None:
                raise TypeError(f"PipelineTrainer needs {name}=, a whole number, or a plan= that has it.")
        return replace(given, schedule="1f1b" if given.schedule is None else given.schedule)
    if isinstance(plan, (str, os.PathLike)):
        plan = Plan.load(plan)
    if not isinstance(plan, Plan):
        kind = type(plan).__name__
        raise TypeError(f"plan must be a jaxpp_flax.planning.Plan or its JSON file, got {kind}: {plan!r}.")
    if given.assignment != "auto":
        raise ValueError(
            f"both plan= and assignment={given.assignment!r} are given, and both say which blocks form a stage. Leave "
            "one of them out. To change the stages of a plan, edit its file."
        )
    residuals = None if plan.residuals is None or plan.residuals.is_kept else plan.residuals
    schedule = _schedule(given.schedule, plan)
    return Planned(
        num_stages=_same("num_stages", given.num_stages, plan.num_stages),
        num_microbatches=_same("num_microbatches", given.num_microbatches, plan.num_microbatches),
        schedule="1f1b" if schedule is None else schedule,
        assignment=plan,
        mesh=_mesh(given.mesh, plan),
        memory=replace(given.memory, residuals=_same("residuals", given.memory.residuals, residuals)),
    )


def _same(name: str, given: Any, planned: Any) -> Any:
    """Return the one that is there."""
    if given is None or planned is None or given == planned:
        if name.startswith("num_") and given is None and planned is None:
            raise TypeError(f"the plan has no {name}: give PipelineTrainer({name}=), or write it into the plan.")
        return planned if given is None else given
    raise ValueError(
        f"{name}={given!r} differs from the plan, which has {planned!r}. Leave {name} out, or make another plan."
    )


def _schedule(given: Any, plan: Plan) -> Schedule | str | None:
    if isinstance(given, str) and plan.schedule is not None:
        given = by_name(given, plan.num_stages, plan.schedule.num_ranks)
    return _same("schedule", given, plan.schedule)


def _mesh(given: MeshOptions, plan: Plan) -> MeshOptions:
    if not plan.layout:
        return given
    given = replace(given, fsdp=_same("fsdp", None if given.fsdp == "microbatch" else given.fsdp, plan.fsdp))
    axes = {name: size for name, size in plan.layout.items() if name != STAGE_AXIS}
    num_ranks = plan.layout.get(STAGE_AXIS, plan.num_stages)
    if given.mesh is not None:
        _same("mesh", layout_of(wrap_mesh(given.mesh, None)), dict(plan.layout))
        return given
    needed, available = num_ranks * math.prod(axes.values()), jax.device_count()
    if needed > available:
        raise MeshError(
            f"the plan's layout {dict(plan.layout)} needs {needed} devices, but there are {available}. Start the job "
            f"with {needed} devices, or make a plan for {available}."
        )
    if needed < available and given.axes is None:  # without a plan the trainer would take all of them
        raise MeshError(
            f"the plan's layout {dict(plan.layout)} is for {needed} devices, but there are {available}: the others "
            f"would be idle. Make a plan for {available} devices; or allow it, by mesh={_divided(axes)}."
        )
    if given.axes is not None:
        _same("the mesh's axes", _divided(given.axes), _divided(axes))
    return replace(
        given,
        axes=axes,
        num_ranks=_same("num_ranks", given.num_ranks, num_ranks),
    )


def _divided(axes: Mapping[str, int]) -> dict[str, int]:
    """Return the axes that divide something: one of size 1 is there for the names in annotations."""
    return {name: size for name, size in axes.items() if size != 1}
