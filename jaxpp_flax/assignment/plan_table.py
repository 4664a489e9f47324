"""A plan as a table for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from rich.table import Table

from jaxpp_flax.messages import amount

__all__ = ["plan_table"]

_MOST_ROWS = 40  # with more blocks, equal neighbours share a row
_ALIKE = 0.05  # relative difference of costs


class _Block(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def stage(self) -> int: ...
    @property
    def forward(self) -> float | None: ...
    @property
    def backward(self) -> float | None: ...
    @property
    def cost(self) -> float | None: ...


class _Plan(Protocol):
    @property
    def num_stages(self) -> int: ...
    @property
    def blocks(self) -> Sequence[_Block]: ...
    @property
    def unit(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def ranks(self) -> tuple[int, ...] | None: ...
    @property
    def exact(self) -> bool | None: ...
    @property
    def step_gain(self) -> float | None: ...
    @property
    def rank_costs(self) -> tuple[float, ...] | None: ...
    @property
    def rank_bytes(self) -> tuple[float, ...] | None: ...
    @property
    def imbalance(self) -> float | None: ...
    @property
    def even_imbalance(self) -> float | None: ...
    @property
    def gain(self) -> float | None: ...


def plan_table(plan: _Plan) -> Table:
    """Block, cost, stage and rank; in the caption, the ranks' costs, their imbalance before and after, their memory.

    Args:
      plan: a `Plan`.
    """
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


def _rows(blocks: Sequence[_Block], grouped: bool) -> list[list[_Block]]:
    rows: list[list[_Block]] = []
    for block in blocks:
        if grouped and rows and _alike(rows[-1][0], block):
            rows[-1].append(block)
        else:
            rows.append([block])
    return rows


def _alike(one: _Block, other: _Block) -> bool:
    if one.cost is None or other.cost is None:
        return one.cost is other.cost
    return abs(one.cost - other.cost) <= _ALIKE * max(one.cost, other.cost)


def _sum(values: Any) -> float | None:
    known = list(values)
    return None if any(value is None for value in known) else sum(known)


def _caption(plan: _Plan) -> str:
    lines: list[str] = []
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
        lines.append(f"bytes on each device: {', '.join(amount(b, 'B') for b in plan.rank_bytes)}")
    return "\n".join(lines)
