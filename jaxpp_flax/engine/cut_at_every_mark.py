"""The default cut policy: every mark of a loop body ends a stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxpp_flax.engine.tracing.markers import Mark

__all__ = ["CutPolicy", "cut_at_every_mark"]

# Takes the marks in program order and the number of stages; returns the marks that cut: one index fewer than stages.
CutPolicy = Callable[[Sequence[Mark], int], Sequence[int]]


def cut_at_every_mark(marks: Sequence[Mark], num_stages: int) -> Sequence[int]:
    """Cut at every mark; a final mark after the last stage adds no cut.

    Raises:
      ValueError: if there are fewer or more marks than the stages need.
    """
    if len(marks) in (num_stages - 1, num_stages):
        return range(num_stages - 1)
    # Only the line: with the surrounding functions, a few marks fill the screen.
    listing = "; ".join(f"{m.name or 'unnamed'} at {m.where.partition(' (')[0]}" for m in marks[:5]) or "none"
    more = f" and {len(marks) - 5} more" if len(marks) > 5 else ""
    need = f"{num_stages - 1} mark{'' if num_stages == 2 else 's'} (or {num_stages} with a final one)"
    remedy = "Add marks" if len(marks) < num_stages - 1 else "Choose which of them cut (`assignment=`/`cut_policy=`)"
    raise ValueError(
        f"a pipeline of {num_stages} stages needs {need}, but the loop's body holds {len(marks)}: {listing}{more}. "
        f"{remedy}, or change the number of stages."
    )
