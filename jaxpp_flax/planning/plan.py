"""A plan: the stages, schedule and residuals of a training, chosen before it runs. A plan is also a JSON file."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from jaxpp_flax.engine.tracing.markers import Mark, segment_names
from jaxpp_flax.messages import amount, listed, near_names
from jaxpp_flax.planning import plan_file
from jaxpp_flax.planning.choice import describe
from jaxpp_flax.planning.stages.balancing import rank_loads
from jaxpp_flax.planning.stages.policies import AssignmentError, by_name
from jaxpp_flax.schedules import Schedule
from jaxpp_flax.schedules.gathers import Fsdp, check_fsdp
from jaxpp_flax.schedules.residuals import ResidualPlan

__all__ = ["Plan", "PlannedBlock"]

_UNITS = {"s": "seconds", "FLOP": "floating-point operations", "": "no unit"}
_MOST_ROWS = 40  # of a table: with more blocks, equal neighbours share a row
_ALIKE = 0.05  # relative difference of costs


@dataclass(frozen=True, kw_only=True)
class PlannedBlock:
    """A block, its stage, and its costs for one microbatch in the plan's unit (None: not known)."""

    name: str
    stage: int
    forward: float | None = None
    backward: float | None = None

    @property
    def cost(self) -> float | None:
        """The cost of forward and backward together."""
        known = [part for part in (self.forward, self.backward) if part is not None]
        return sum(known) if known else None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The stages, schedule and residuals of a training: pass a plan, or its file, as `PipelineTrainer(plan=)`.

    As `assignment=` or `cut_policy=`, a plan only says which blocks form a stage.

    Args:
      num_stages: the number of stages.
      blocks: the blocks in the model's order, each with its stage. The last one may be the work after the last mark
        (head, loss).
      unit: the unit of the costs: "s", "FLOP", or "".
      source: a text that says where the costs come from.
      ranks: the rank of each stage, if known.
      even_sizes: the number of blocks in each stage of an even assignment, for comparison; if known.
      schedule: the schedule; None if it is not a part of the plan.
      num_microbatches: the number of parts of a batch; None if it is not a part of the plan.
      residuals: what each stage does with the values that its forward pass keeps for its backward pass; None: every
        stage keeps them on the devices.
      layout: the axes of the mesh with their sizes, the axis of the ranks first; empty if not a part of the plan.
      fsdp: how often parameters are gathered, if there is a layout; see `MeshOptions`.
      seconds: the predicted time of a step, without the work before and after the pipeline.
      peak_bytes: for each rank, the largest number of bytes on each device, with an estimate of XLA's workspace.
      host_bytes: for each rank, the largest number of bytes on the host for each of its devices.
      notes: texts that say why this plan was chosen.

    Raises:
      AssignmentError: if a stage is empty, out of range or out of order, a name occurs twice, a cost is not a number,
        or schedule, residuals and stages do not fit one another.

    Example:
      >>> rows = [("a", 0, 1.0), ("b", 0, 1.0), ("c", 1, 2.0)]
      >>> blocks = [PlannedBlock(name=name, stage=stage, forward=cost) for name, stage, cost in rows]
      >>> plan = Plan(num_stages=2, blocks=blocks, ranks=(0, 1))
      >>> plan.stage_sizes, plan.rank_costs, plan.imbalance
      ((2, 1), (2.0, 2.0), 1.0)
      >>> import tempfile, pathlib
      >>> path = plan.save(pathlib.Path(tempfile.mkdtemp()) / "plan.json")
      >>> Plan.load(path) == plan
      True
    """

    num_stages: int
    blocks: Sequence[PlannedBlock]
    unit: str = ""
    source: str = ""
    ranks: tuple[int, ...] | None = None
    even_sizes: tuple[int, ...] | None = None
    schedule: Schedule | None = None
    num_microbatches: int | None = None
    residuals: ResidualPlan | None = None
    layout: Mapping[str, int] = field(default_factory=dict[str, int])
    fsdp: Fsdp = "microbatch"
    seconds: float | None = None
    peak_bytes: tuple[float, ...] = ()
    host_bytes: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("blocks", "peak_bytes", "host_bytes", "notes"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.ranks is None and self.schedule is not None and self.schedule.num_stages == self.num_stages:
            object.__setattr__(self, "ranks", tuple(map(self.schedule.rank_of, range(self.num_stages))))
        _check(self)

    # ------------------------------------------------------------ as a policy

    def __call__(self, marks: Sequence[Mark], num_stages: int) -> tuple[int, ...]:
        """Return the indices of the marks that cut: a plan can be used as a cut policy.

        Raises:
          AssignmentError: if the plan is for another number of stages, or for other blocks.
        """
        if num_stages != self.num_stages:
            raise AssignmentError(
                f"the plan is for {self.num_stages} stages, but num_stages={num_stages}. Make them equal, or make "
                "a new plan with assignment='balanced'."
            )
        names = segment_names(marks)
        planned = [block.name for block in self.blocks]
        for block in self.blocks:
            if block.name not in names:
                raise AssignmentError(
                    f"the plan puts {block.name!r} on stage {block.stage}, but the model has no such block."
                    f"{near_names(block.name, names)} The model's blocks: {listed(names)}. Make a plan for this model."
                )
        for name in names[:-1]:
            if name not in planned:
                raise AssignmentError(
                    f"the plan leaves out the model's block {name!r}.{near_names(name, planned)} Add it with its "
                    f"stage. The plan's blocks: {listed(planned)}."
                )
        return tuple(by_name({block.name: block.stage for block in self.blocks})(marks, num_stages))

    @classmethod
    def of(cls, marks: Sequence[Mark], cuts: Sequence[int], num_stages: int, **options: Any) -> Plan:
        """Make a plan from the marks that cut the model.

        Args:
          marks: the marks of the model.
          cuts: the indices of the marks that cut.
          num_stages: the number of cuts plus one.
          options: other arguments of `Plan`; `work` has each block's cost, an object with `forward` and `backward`.
        """
        work = options.pop("work", None)
        names = segment_names(marks)
        costs = [(None, None)] * len(names) if work is None else [(w.forward, w.backward) for w in work]
        blocks = [
            PlannedBlock(name=name, stage=sum(cut < i for cut in cuts), forward=forward, backward=backward)
            for i, (name, (forward, backward)) in enumerate(zip(names, costs, strict=True))
        ]
        return cls(num_stages=num_stages, blocks=blocks, **options)

    # ------------------------------------------------------------ values of a plan

    @property
    def stage_sizes(self) -> tuple[int, ...]:
        """The number of blocks in each stage."""
        stages = [block.stage for block in self.blocks]
        return tuple(stages.count(stage) for stage in range(self.num_stages))

    @property
    def rank_costs(self) -> tuple[float, ...] | None:
        """The cost of each rank's stages; None if costs or ranks are not known."""
        return self._loads(self.stage_sizes)

    @property
    def imbalance(self) -> float | None:
        """The slowest rank's cost divided by the mean; 1 is perfect balance."""
        return _imbalance(self.rank_costs)

    @property
    def even_imbalance(self) -> float | None:
        """The imbalance of an even assignment of these blocks."""
        return None if self.even_sizes is None else _imbalance(self._loads(self.even_sizes))

    @property
    def gain(self) -> float | None:
        """The time that the slowest rank saves, as a share of its time in an even assignment."""
        now, before = self.imbalance, self.even_imbalance
        return None if now is None or before is None else 1.0 - now / before

    def _loads(self, sizes: Sequence[int]) -> tuple[float, ...] | None:
        costs = [block.cost for block in self.blocks]
        known = [cost for cost in costs if cost is not None]
        if self.ranks is None or len(known) < len(costs):
            return None
        return tuple(rank_loads(known, sizes, self.ranks))

    def table(self) -> Table:
        """Return a table of blocks with cost, stage and rank, and the imbalance of this and an even assignment."""
        return _table(self)

    __rich__ = table

    # ------------------------------------------------------------ as a file

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the plan as JSON, one line for each block; return the path."""
        target = Path(path)
        target.write_text(plan_file.as_text(self), encoding="utf-8")
        return target

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan from a file that `save` wrote, and that may have been edited.

        Raises:
          FileNotFoundError: if the file does not exist.
          AssignmentError: if the file holds no valid plan; the message names the line, or the block and the stage.
        """
        found = plan_file.read(Path(path))
        try:
            blocks = [PlannedBlock(**block) for block in found.pop("blocks")]
            return cls(blocks=blocks, **found)
        except AssignmentError as error:
            raise AssignmentError(f"{os.fspath(path)}: {error}") from error


def _check(plan: Plan) -> None:
    count = plan.num_stages
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise AssignmentError(f"num_stages of the plan is {count!r}; it must be a whole number of at least 1.")
    try:
        check_fsdp(plan.fsdp)
    except ValueError as error:
        raise AssignmentError(f"the plan's {error}") from error
    if plan.unit not in _UNITS:
        raise AssignmentError(f"unit of the plan is {plan.unit!r}; it must be one of {listed(list(_UNITS))}.")
    seen: set[str] = set()
    for block in plan.blocks:
        if not isinstance(block.name, str):
            raise AssignmentError(f"the plan has a block with the name {block.name!r}; names are texts.")
        if block.name in seen:
            raise AssignmentError(f"the plan lists the block {block.name!r} twice; each block is in exactly one stage.")
        seen.add(block.name)
        stage = block.stage
        if isinstance(stage, bool) or not isinstance(stage, int) or not 0 <= stage < count:
            raise AssignmentError(
                f"the plan puts {block.name!r} on stage {stage!r}; stages are numbered 0 to {count - 1} "
                f"(num_stages={count})."
            )
        for kind in ("forward", "backward"):
            cost = getattr(block, kind)
            number = isinstance(cost, (int, float)) and not isinstance(cost, bool)
            if cost is not None and not (number and math.isfinite(cost) and cost >= 0):
                raise AssignmentError(f"{kind} of {block.name!r} is {cost!r}; costs are numbers of at least 0.")
    if plan.residuals is not None and len(plan.residuals.stages) != count:
        raise AssignmentError(
            f"the plan's residuals have {len(plan.residuals.stages)} entries, but num_stages={count}. Give one entry "
            "for each stage."
        )
    if plan.schedule is not None and plan.schedule.num_stages != count:
        raise AssignmentError(
            f"the plan's schedule {plan.schedule!r} has {plan.schedule.num_stages} stages, but num_stages={count}. "
            "Make them equal."
        )
    for before, after in itertools.pairwise(plan.blocks):
        if after.stage < before.stage:
            raise AssignmentError(
                f"the plan is not contiguous: {after.name!r} is on stage {after.stage}, but {before.name!r}, which "
                f"comes before it, is on stage {before.stage}. Stages must follow the model's order."
            )
    used = {block.stage for block in plan.blocks}
    for stage in range(count):
        if stage not in used:
            raise AssignmentError(
                f"the plan leaves stage {stage} of num_stages={count} empty. Put a block on it, or use fewer stages."
            )


def _imbalance(loads: Sequence[float] | None) -> float | None:
    if loads is None or not sum(loads):
        return None
    return max(loads) * len(loads) / sum(loads)


def _table(plan: Plan) -> Table:
    title = f"assignment of {len(plan.blocks)} blocks to {plan.num_stages} stages"
    table = Table(title=f"{title}, {plan.source}" if plan.source else title, title_justify="left")
    table.add_column("block")
    for column in ("forward", "backward", "cost", "share", "stage", "rank"):
        table.add_column(column, justify="right")
    total = sum(block.cost or 0.0 for block in plan.blocks)
    for stage in range(plan.num_stages):
        here = [block for block in plan.blocks if block.stage == stage]
        rank = "?" if plan.ranks is None else str(plan.ranks[stage])
        for blocks in _rows(here, len(plan.blocks) > _MOST_ROWS):
            first, last = blocks[0], blocks[-1]
            name = first.name if len(blocks) == 1 else f"{first.name} … {last.name} ({len(blocks)})"
            parts = [_sum(getattr(block, part) for block in blocks) for part in ("forward", "backward", "cost")]
            share = "?" if parts[2] is None or not total else f"{parts[2] / total:.1%}"
            table.add_row(name, *(amount(part, plan.unit) for part in parts), share, str(stage), rank)
        table.add_section()
    table.caption = _caption(plan)
    table.caption_justify = "left"
    return table


def _rows(blocks: Sequence[PlannedBlock], grouped: bool) -> list[list[PlannedBlock]]:
    rows: list[list[PlannedBlock]] = []
    for block in blocks:
        if grouped and rows and _alike(rows[-1][0], block):
            rows[-1].append(block)
        else:
            rows.append([block])
    return rows


def _alike(one: PlannedBlock, other: PlannedBlock) -> bool:
    if one.cost is None or other.cost is None:
        return one.cost is other.cost
    return abs(one.cost - other.cost) <= _ALIKE * max(one.cost, other.cost)


def _sum(values: Any) -> float | None:
    known = list(values)
    return None if any(value is None for value in known) else sum(known)


def _caption(plan: Plan) -> str:
    lines: list[str] = []
    costs = plan.rank_costs
    if costs is not None and plan.imbalance is not None:
        lines.append(f"ranks: {', '.join(amount(cost, plan.unit) for cost in costs)}")
        text = f"slowest rank over the mean: {plan.imbalance:.3f}"
        if plan.even_imbalance is not None and plan.gain is not None and plan.even_sizes != plan.stage_sizes:
            text = f"slowest rank over the mean: even {plan.even_imbalance:.3f}, here {plan.imbalance:.3f}"
            change = "less" if plan.gain >= 0 else "more"
            text += f": {abs(plan.gain):.0%} {change} time for the slowest rank"
        lines.append(text)
    if plan.schedule is not None:
        step = "" if plan.seconds is None else f"; predicted step {amount(plan.seconds, 's')}"
        lines.append(f"schedule: {plan.schedule!r}{step}")
    if plan.peak_bytes:
        lines.append(f"predicted bytes on each device: {', '.join(amount(b, 'B') for b in plan.peak_bytes)}")
    if plan.residuals is not None and not plan.residuals.is_kept:
        stages = ", ".join(f"stage {n} {describe(stage)}" for n, stage in enumerate(plan.residuals.stages))
        lines.append(f"residuals: {stages}")
    return "\n".join([*lines, *plan.notes])
