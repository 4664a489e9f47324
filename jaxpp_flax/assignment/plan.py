"""A plan: the stage and the cost of each block. A plan can be shown, saved, edited and loaded."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rich.table import Table

from jaxpp_flax.assignment.balancing import rank_loads
from jaxpp_flax.assignment.policies import AssignmentError, by_name, segment_names
from jaxpp_flax.assignment.stages_choice import StagesChoice
from jaxpp_flax.engine.tracing.markers import Mark
from jaxpp_flax.messages import amount, listed, near_names
from jaxpp_flax.planning import Choice, describe, why_chosen
from jaxpp_flax.schedules import ScheduleError
from jaxpp_flax.schedules.residuals import ResidualPlan, StageResiduals

__all__ = ["Plan", "PlannedBlock"]

_FORMAT = "jaxpp_flax plan 1"
_ABOUT = "Which block runs on which stage. Edit the stages, and pass this file as assignment=."
_UNITS = {"s": "seconds", "FLOP": "floating-point operations", "": "no unit"}
_MOST_ROWS = 40  # of a table: with more blocks, equal neighbours share a row
_ALIKE = 0.05  # relative difference of costs


@dataclass(frozen=True, kw_only=True)
class PlannedBlock:
    """A block, its stage, and its costs for one microbatch (None: not known), in the plan's unit."""

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
    """The stage of each block, in the model's order; pass a plan, or its file, as `assignment=`.

    Args:
      num_stages: the number of stages.
      blocks: the blocks in the model's order; the last one may be the work after the last mark (head, loss).
      unit: the unit of the costs: "s", "FLOP", or "".
      source: the source of the costs, for people.
      ranks: the rank of each stage, if known.
      even_sizes: the number of blocks in each stage of an even assignment, for comparison; if known.
      exact: True if no other assignment is better; None if no search was made.
      step_gain: the share of its time that the simulated step saves over an even assignment, if the search aimed at the
        step (several stages on a rank).
      residuals: what each stage does with the values that its forward keeps for its backward; None: it keeps them.
      choice: if a memory limit was given, the search for `residuals`, with the predicted bytes and seconds.
      stages_choice: the estimates that decided, if even or balanced stages were chosen by them (`assignment="auto"`).

    Raises:
      AssignmentError: if a stage is empty, out of range or out of order, a name occurs twice, or a cost is not a
        number.

    Example:
      >>> rows = [("a", 0, 1.0), ("b", 0, 1.0), ("c", 1, 2.0)]
      >>> blocks = [PlannedBlock(name=name, stage=stage, forward=cost) for name, stage, cost in rows]
      >>> plan = Plan(num_stages=2, blocks=blocks, ranks=(0, 1))
      >>> plan.stage_sizes, plan.rank_costs, plan.imbalance
      ((2, 1), (2.0, 2.0), 1.0)
      >>> import tempfile, pathlib
      >>> path = plan.save(pathlib.Path(tempfile.mkdtemp()) / "plan.json")
      >>> Plan.load(path).blocks == plan.blocks
      True
    """

    num_stages: int
    blocks: Sequence[PlannedBlock]
    unit: str = ""
    source: str = ""
    ranks: tuple[int, ...] | None = None
    even_sizes: tuple[int, ...] | None = None
    exact: bool | None = None
    step_gain: float | None = None
    residuals: ResidualPlan | None = None
    choice: Choice | None = None
    stages_choice: StagesChoice | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", tuple(self.blocks))
        _check(self)

    # ------------------------------------------------------------ as a policy

    def __call__(self, marks: Sequence[Mark], num_stages: int) -> tuple[int, ...]:
        """Return the marks that cut: a plan is a policy too.

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
                    f"{near_names(block.name, names)} The model's blocks: {listed(names)}."
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
        """Make the plan of these cuts.

        Args:
          marks: the marks of the model.
          cuts: the marks that cut.
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
    def rank_bytes(self) -> tuple[float, ...] | None:
        """Estimated bytes on each rank's devices, if a memory limit was given (`memory_analysis()` is exact)."""
        return None if self.choice is None else self.choice.prediction.peak_bytes

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
        """The share of its time that the slowest rank saves over an even assignment."""
        now, before = self.imbalance, self.even_imbalance
        return None if now is None or before is None else 1.0 - now / before

    def _loads(self, sizes: Sequence[int]) -> tuple[float, ...] | None:
        costs = [block.cost for block in self.blocks]
        known = [cost for cost in costs if cost is not None]
        if self.ranks is None or len(known) < len(costs):
            return None
        return tuple(rank_loads(known, sizes, self.ranks))

    @property
    def choice_text(self) -> str:
        """The choices of stages and of residuals, a line each; "" if nothing was to be chosen."""
        stages = "" if self.stages_choice is None else self.stages_choice.text(self.unit)
        return "\n".join(filter(None, (stages, "" if self.choice is None else why_chosen(self.choice))))

    def table(self) -> Table:
        """Return a table of blocks with cost, stage and rank; below, the imbalance of the ranks, before and after."""
        return _table(self)

    __rich__ = table

    # ------------------------------------------------------------ as a file

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the plan as JSON, one line for each block; return the path."""
        lines = ",\n".join(f"  {json.dumps(_known(block))}" for block in self.blocks)
        head: dict[str, Any] = {"about": _ABOUT, "format": _FORMAT, "num_stages": self.num_stages, "unit": self.unit}
        head["source"] = self.source
        if self.residuals is not None and not self.residuals.is_kept:
            head["residuals"] = asdict(self.residuals)
        top = "".join(f" {json.dumps(k)}: {json.dumps(v)},\n" for k, v in head.items())
        target = Path(path)
        target.write_text(f'{{\n{top} "blocks": [\n{lines}\n ]\n}}\n', encoding="utf-8")
        return target

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan that `save` wrote and somebody may have edited.

        Raises:
          FileNotFoundError: if the file does not exist.
          AssignmentError: if the file holds no valid plan; the message names the line, or the block and the stage.
        """
        source = Path(path)
        if not source.is_file():
            others = sorted(p.name for p in source.parent.glob("*.json")) if source.parent.is_dir() else []
            hint = near_names(source.name, others)
            raise FileNotFoundError(f"assignment={os.fspath(path)!r}: there is no such file.{hint}")
        try:
            found = json.loads(source.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise AssignmentError(f"{os.fspath(path)} is no JSON: {error}.") from error
        try:
            return _read(found)
        except AssignmentError as error:
            raise AssignmentError(f"{os.fspath(path)}: {error}") from error


def _known(block: PlannedBlock) -> dict[str, Any]:
    return {f.name: getattr(block, f.name) for f in fields(block) if getattr(block, f.name) is not None}


def _read(found: Any) -> Plan:
    optional = ("about", "format", "unit", "source", "residuals")
    top = _keys(found, "the plan", required=("num_stages", "blocks"), optional=optional)
    if top.get("format", _FORMAT) != _FORMAT:
        raise AssignmentError(f"the plan has format {top['format']!r}; this version reads {_FORMAT!r}.")
    if not isinstance(top["blocks"], list):
        raise AssignmentError(f"blocks is a {type(top['blocks']).__name__}; it must be a list of blocks.")
    blocks: list[PlannedBlock] = []
    for number, item in enumerate(top["blocks"]):
        name = f" ({item['name']!r})" if isinstance(item, Mapping) and "name" in item else ""
        blocks.append(PlannedBlock(**_keys(item, f"block {number}{name}", ("name", "stage"), ("forward", "backward"))))
    return Plan(
        num_stages=top["num_stages"],
        blocks=blocks,
        unit=top.get("unit", ""),
        source=str(top.get("source", "")),
        residuals=_read_residuals(top["residuals"]) if "residuals" in top else None,
    )


def _read_residuals(found: Any) -> ResidualPlan:
    top = _keys(found, "residuals", required=("stages",), optional=("fetch_ahead", "offload_within"))
    stages = [
        _keys(stage, f"stage {number} of residuals", (), ("recompute", "offload", "offload_values"))
        for number, stage in enumerate(top.pop("stages"))
    ]
    try:
        return ResidualPlan([StageResiduals(**stage) for stage in stages], **top)
    except (ScheduleError, TypeError) as error:
        raise AssignmentError(f"residuals of the plan: {error}") from error


def _keys(found: Any, what: str, required: Sequence[str], optional: Sequence[str]) -> dict[str, Any]:
    if not isinstance(found, Mapping):
        raise AssignmentError(f"{what} is a {type(found).__name__}; it must be an object with {listed(required)}.")
    allowed = [*required, *optional]
    for key in found:
        if key not in allowed:
            hint = near_names(key, allowed)
            raise AssignmentError(f"{what} has the unknown key {key!r}.{hint} Keys: {listed(allowed)}.")
    for key in required:
        if key not in found:
            raise AssignmentError(f"{what} has no {key!r}. Keys: {listed(allowed)}.")
    return dict(found)


def _check(plan: Plan) -> None:
    count = plan.num_stages
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise AssignmentError(f"num_stages of the plan is {count!r}; it must be a whole number of at least 1.")
    if plan.unit not in _UNITS:
        raise AssignmentError(f"unit of the plan is {plan.unit!r}; it must be one of {listed(list(_UNITS))}.")
    seen: set[str] = set()
    for block in plan.blocks:
        if not isinstance(block.name, str):
            raise AssignmentError(f"the plan has a block with the name {block.name!r}; names are texts.")
        if block.name in seen:
            raise AssignmentError(f"the plan lists the block {block.name!r} twice; each ends in exactly one stage.")
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
            f"the plan's residuals have {len(plan.residuals.stages)} entries for num_stages={count}. Give one for each "
            "stage."
        )
    for before, after in itertools.pairwise(plan.blocks):
        if after.stage < before.stage:
            raise AssignmentError(
                f"the plan is not contiguous: {after.name!r} is on stage {after.stage}, but {before.name!r}, which "
                f"stands before it, is on stage {before.stage}. Stages must follow the model's order."
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
    lines = [] if plan.stages_choice is None else [plan.stages_choice.text(plan.unit)]
    costs = plan.rank_costs
    if costs is not None and plan.imbalance is not None:
        lines.append(f"ranks: {', '.join(amount(cost, plan.unit) for cost in costs)}")
        text = f"slowest rank over the mean: {plan.imbalance:.3f}"
        if plan.even_imbalance is not None and plan.gain is not None:
            text = f"slowest rank over the mean: even {plan.even_imbalance:.3f}, here {plan.imbalance:.3f}"
            change = "less" if plan.gain >= 0 else "more"
            text += f": {abs(plan.gain):.0%} {change} time for the slowest rank"
        if plan.step_gain is not None:
            text += f"; simulated step {plan.step_gain:.0%} shorter than even"
        if plan.exact is not None:
            text += "; no other assignment is better" if plan.exact else "; found by local search, not proven best"
        lines.append(text)
    if plan.rank_bytes is not None:
        lines.append(f"estimated bytes on each device: {', '.join(amount(b, 'B') for b in plan.rank_bytes)}")
    if plan.residuals is not None and not plan.residuals.is_kept:
        stages = ", ".join(f"stage {n} {describe(stage)}" for n, stage in enumerate(plan.residuals.stages))
        lines.append(f"residuals: {stages}")
    return "\n".join(lines if plan.choice is None else [*lines, why_chosen(plan.choice)])
