"""The fastest layouts that fit, found by bounds: a layout is simulated only while its bound is below what is found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

from jaxpp_flax.planning.quoting.layouts import Layout, layouts
from jaxpp_flax.planning.quoting.step import QuotedStep, Quoter
from jaxpp_flax.schedules.residuals import KEEP

__all__ = ["Ranking", "rank"]


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The fastest layout of each mesh, the best mesh first.

    Attributes:
      steps: the steps that fit, the fastest first.
      plain: the fastest step without a pipeline; None if none fits.
      closest: if nothing fits, the step that takes the fewest bytes; otherwise None.
      tried: the number of all layouts.
      simulated: the number of layouts whose step was simulated; bounds exclude the others.
    """

    steps: tuple[QuotedStep, ...]
    plain: QuotedStep | None
    closest: QuotedStep | None
    tried: int
    simulated: int


def rank(quoter: Quoter, devices: int, memory: float, top: int, wanted: Mapping[str, int] | None = None) -> Ranking:
    """Return the fastest layouts of so many devices that hold at most `memory` bytes on each.

    Raises:
      ValueError: if no layout divides devices, batch, blocks and annotated parameters.
    """
    every = list(layouts(quoter.model, devices, wanted))
    if not every:
        raise ValueError(_nothing(quoter, devices, wanted))
    steps, simulated = _fastest(quoter, every, memory, top)
    plain = next((step for step in steps if step.layout.pipeline == 1), None)
    if plain is None:
        without, more = _fastest(quoter, [layout for layout in every if layout.pipeline == 1], memory, 1)
        plain, simulated = next(iter(without), None), simulated + more
    closest = None if steps else _leanest(quoter, every)
    return Ranking(steps=tuple(steps), plain=plain, closest=closest, tried=len(every), simulated=simulated)


def _fastest(quoter: Quoter, every: Sequence[Layout], memory: float, top: int) -> tuple[list[QuotedStep], int]:
    """Return the fastest steps that fit, one of each mesh, and how many were simulated."""
    known = ((quoter.quick(layout), i) for i, layout in enumerate(every) if quoter.mean(layout) <= memory)
    found: dict[tuple[int, ...], QuotedStep] = {}
    fitting, simulated = set[Layout](), 0
    for bound, i in sorted(known):
        layout = every[i]
        mesh = layout.pipeline, layout.data, layout.fsdp, layout.expert, layout.tensor
        seconds = sorted(step.seconds for step in found.values())
        if len(seconds) >= top and bound >= seconds[top - 1]:
            break
        less = KEEP, replace(layout.residuals, offload=0.0)
        if any(replace(layout, residuals=of) in fitting for of in less):
            continue  # where all fits, nothing is gained by other residuals
        if (mesh in found and found[mesh].seconds <= bound) or quoter.least(layout) > memory:
            continue
        step = quoter.quoted(layout)
        simulated += 1
        if step.memory <= memory:
            fitting.add(layout)
        if step.memory <= memory and (mesh not in found or step.seconds < found[mesh].seconds):
            found[mesh] = step
    return sorted(found.values(), key=lambda step: step.seconds)[:top], simulated


def _leanest(quoter: Quoter, every: Sequence[Layout]) -> QuotedStep:
    """Return the step whose fullest device holds the fewest bytes.

    The layout with the lowest bound comes next: it gets a closer bound, then its step. So no layout is walked whose
    bound is above the bytes of the step that is found.
    """
    queue: list[tuple[float, int, int, QuotedStep | None]]  # bytes, the kind (a step, a closer bound, a mean), index
    queue = [(quoter.mean(layout), 2, i, None) for i, layout in enumerate(every)]
    heapify(queue)
    while queue:
        bound, kind, i, step = heappop(queue)
        if step is not None:
            return step
        if kind == 2:
            heappush(queue, (max(bound, quoter.least(every[i])), 1, i, None))
        else:
            step = quoter.quoted(every[i])
            heappush(queue, (step.memory, 0, i, step))
    raise ValueError("there is no layout to choose from.")


def _nothing(quoter: Quoter, devices: int, wanted: Mapping[str, int] | None) -> str:
    model = quoter.model
    asked = f" with {dict(wanted)}" if wanted else ""
    return (
        f"no layout of {devices} devices{asked} divides a batch of {model.global_batch} examples and "
        f"{len(model.names) - 1} blocks. Give another number of devices, a batch with more divisors, or more marks; "
        "`fsdp`, `expert` and `tensor` need parameters that are annotated with these names and whose sizes they divide."
    )
