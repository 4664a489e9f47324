"""A timeline as SVG, with no library."""

from __future__ import annotations

from html import escape

from jaxpp_flax.messages import amount
from jaxpp_flax.schedules.tools.drawing.scene import (
    DARKER,
    NO_UNITS,
    Bar,
    Panels,
    Units,
    bars,
    caption,
    colour,
    several_stages,
    shortest,
    styles_of,
)

_ROW, _GAP, _LEFT, _TOP = 22, 4, 62, 34
_IDLE = "#eeeeee"
_WIDEST = 1600.0  # what a page can show; a bar without room for its number has it as a tip


def svg(panels: Panels, units: Units = NO_UNITS) -> str:
    """The panels as one SVG image, wide enough for the labels."""
    longest = max((timeline.makespan for _, timeline in panels), default=0.0) or 1.0
    needed = 13 * longest / min(shortest(timeline) for _, timeline in panels)
    width = min(max(760.0, needed), _WIDEST)
    scale = width / longest
    out: list[str] = []
    y = 8.0
    for title, timeline in panels:
        out.append(_text(_LEFT, y + 16, caption(title, timeline, units), 14, weight="bold"))
        y += _TOP
        tops = [y + rank * (_ROW + _GAP) for rank in range(len(timeline.events))]
        for rank, top in enumerate(tops):
            out.append(_text(4, top + 15, f"rank {rank}", 12))
            out.append(f'<rect x="{_LEFT}" y="{top:g}" width="{width:.1f}" height="{_ROW}" fill="{_IDLE}"/>')
        out += [_bar(bar, tops[bar.rank], scale) for bar in bars(timeline)]
        y += len(tops) * (_ROW + _GAP)
        step = _round_step(longest / 10)
        for i in range(int(longest / step + 1e-9) + 1):
            x = _LEFT + i * step * scale
            out.append(f'<line x1="{x:.1f}" y1="{y:g}" x2="{x:.1f}" y2="{y + 5:g}" stroke="#555555"/>')
            out.append(
                _text(
                    x, y + 17, f"{i * step:g}" if not units.time else amount(i * step, units.time), 11, anchor="middle"
                )
            )
        y += 34
    x = float(_LEFT)
    for style in styles_of(panels):
        out.append(f'<rect x="{x:g}" y="{y:g}" width="16" height="14" fill="{colour(style)}"/>')
        out.append(_text(x + 21, y + 12, style.name, 12))
        x += 46 + 7 * len(style.name)
    y += 22
    out.append(f'<rect x="{_LEFT}" y="{y:g}" width="16" height="14" fill="{_IDLE}"/>')
    text = "idle; a number is a microbatch"
    if units == NO_UNITS:
        text += "; time and memory are in the units of the costs"
    if several_stages(panels):
        text += f"; {DARKER}"
    out.append(_text(_LEFT + 21, y + 12, text, 12))
    wide, high = f"{_LEFT + width + 20:.0f}", f"{y + 26:.0f}"
    size = f'width="{wide}" height="{high}" viewBox="0 0 {wide} {high}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(out)}</svg>\n'
    )


def _bar(bar: Bar, top: float, scale: float) -> str:
    x, long, label = _LEFT + bar.start * scale, (bar.end - bar.start) * scale, str(bar.microbatch)
    tip = f"{bar.style.letter} of stage {bar.stage}, microbatch {bar.microbatch}: {bar.start:g} to {bar.end:g}"
    text = _text(x + long / 2, top + 15, label, 11, anchor="middle") if long >= 6.5 * len(label) else ""
    return (
        f'<g><title>{escape(tip)}</title><rect x="{x:.2f}" y="{top:g}" width="{max(long - 0.6, 0.3):.2f}" '
        f'height="{_ROW}" fill="{bar.colour}"/>{text}</g>'
    )


def _text(x: float, y: float, text: str, size: int, anchor: str = "start", weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" '
        f'font-weight="{weight}" fill="#111111">{escape(text)}</text>'
    )


def _round_step(least: float) -> float:
    """The next 1, 2 or 5 times a power of ten."""
    power = 10.0 ** float(f"{least:e}".split("e")[1])
    return next((m * power for m in (1, 2, 5) if m * power >= least * (1 - 1e-9)), 10 * power)
