"""A quote as text: the ranking as a table, one layout with its seconds and bytes, and the picture of its step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxpp_flax.messages import amount
from jaxpp_flax.planning.choice import describe
from jaxpp_flax.planning.quoting.devices import Device
from jaxpp_flax.planning.quoting.search import Ranking
from jaxpp_flax.planning.quoting.step import QuotedStep
from jaxpp_flax.schedules.residuals import StageResiduals

__all__ = ["explanation", "table"]

_SHORT = {"interleaved_1f1b": "interleave", "zero_bubble": "zb", "dualpipe_v": "dualpipe"}


def table(found: Ranking, device: Device) -> str:
    """Return the ranking in at most 80 columns (3 more with an axis of experts), and what follows from it."""
    experts = any(step.layout.expert > 1 for step in found.steps)
    head = f"    PP   DP FSDP {' EP' if experts else ''} TP  mb schedule   residuals s/step         80 %    GB bub% MFU"
    lines = [head, *(_row(number, step, experts=experts) for number, step in enumerate(found.steps, 1))]
    lines += _notes(found, device)
    lines.append(f"{found.tried:,} layouts, {found.simulated} simulated; bytes are without XLA's other workspace.")
    return "\n".join(lines)


def _row(number: int, step: QuotedStep, *, experts: bool) -> str:
    layout, (low, high) = step.layout, step.interval
    schedule = _SHORT.get(layout.schedule, layout.schedule) if layout.pipeline > 1 else "-"
    return (
        f"{number:>2} {layout.pipeline:>3} {layout.data:>4} {layout.fsdp:>4}{'*' if layout.gather == 'step' else ' '} "
        f"{f'{layout.expert:>2} ' if experts else ''}{layout.tensor:>2} {layout.microbatch:>3} "
        f"{schedule[:10]:<10} {_does(layout.residuals):<9} {step.seconds:>6.3g} {f'{low:.2g}-{high:.2g}':>12} "
        f"{step.memory / 1e9:>5.1f} {100 * step.bubble:>4.0f} {100 * step.mfu:>3.0f}"
    )


def _does(residuals: StageResiduals) -> str:
    if residuals.recompute and residuals.offload:
        return "both"
    return describe(residuals).removesuffix(" 100%")


def _notes(found: Ranking, device: Device) -> Iterator[str]:
    if not found.steps:
        return
    best = found.steps[0]
    if any(step.layout.gather == "step" for step in found.steps):
        yield "*: parameters are gathered once a step, not in every task."
    yield f"best: {best.layout}: {best.tokens / best.seconds:,.0f} {best.unit}/s{_price(best, device)}"
    plain = found.plain
    if plain is None:
        yield "Without a pipeline nothing fits."
    elif plain.layout == best.layout:
        yield "No pipeline is needed: this is the fastest."
    else:
        yield f"Without a pipeline: {plain.layout}: {plain.seconds / best.seconds - 1:+.0%}."
    if len(found.steps) > 1:
        second = found.steps[1]
        yield f"The second is {second.seconds / best.seconds - 1:.1%} slower: {_difference(best, second)}."
        alike = sum(step.seconds < best.interval[1] for step in found.steps)
        yield f"{alike} of these {len(found.steps)} lie within the interval of the best."
        yield "Measure the first three, `found.best_of(3)` or `--explain SIZES --save FILE` for each; keep the fastest."


def _price(step: QuotedStep, device: Device) -> str:
    return f", {step.cost(device):.3g} a million {step.unit}" if device.price else ""


def _difference(best: QuotedStep, other: QuotedStep) -> str:
    """Say what the other one spends more on, and what less."""
    names = dict.fromkeys((*best.parts, *other.parts))
    gaps = sorted(((other.parts.get(n, 0.0) - best.parts.get(n, 0.0), n) for n in names), key=lambda gap: -abs(gap[0]))
    return ", ".join(f"{name} {'+' if gap > 0 else '-'}{amount(abs(gap), 's')}" for gap, name in gaps[:3] if gap)


def explanation(step: QuotedStep, device: Device) -> str:
    """Return where each second and byte of a layout goes."""
    low, high = step.interval
    lines = [
        str(step.layout),
        f"{step.num_microbatches} microbatches on {step.layout.devices} x {device.name}",
        f"{amount(step.seconds, 's')} a step (80 %: {amount(low, 's')} to {amount(high, 's')}), "
        f"{step.tokens / step.seconds:,.0f} {step.unit}/s, MFU {step.mfu:.1%}{_price(step, device)}",
        "blocks of each stage: " + " ".join(map(str, step.sizes)),
        "",
        "seconds of the busiest rank",
        *_shares(step.parts, step.seconds, "s"),
        "",
        f"bytes of the fullest rank's devices: {amount(step.memory, 'B')} of {amount(device.memory, 'B')}",
        *_shares(step.nbytes, device.memory, "B"),
    ]
    if step.host_bytes:
        lines.append(f"  {'on the host':<24} {amount(step.host_bytes, 'B'):>10}")
    return "\n".join(lines)


def _shares(parts: dict[str, float], whole: float, unit: str) -> Sequence[str]:
    return [
        f"  {name:<24} {amount(value, unit):>10} {value / whole:>6.1%} {'#' * round(30 * value / whole)}"
        for name, value in sorted(parts.items(), key=lambda pair: -pair[1])
        if value > 1e-9 * whole  # else what rounding left
    ]
