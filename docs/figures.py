"""The drawings of the pages.

python docs/figures.py            # write them
python docs/figures.py --check    # fail if a file differs from what would be written
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from jaxpp_flax import schedules
from jaxpp_flax.schedules.tools.drawing import svg
from jaxpp_flax.schedules.tools.drawing.scene import Panels

IMAGES = Path(__file__).parent / "images"


def step(
    name: str,
    num_microbatches: int,
    *,
    stages_per_rank: int = 1,
    transfer: schedules.Transfer | float | None = None,
) -> schedules.Timeline:
    """One simulated step of a named schedule on four ranks. All stages together take the same time for any number."""
    schedule = schedules.by_name(name, num_stages=4 * stages_per_rank, num_ranks=4)
    part = 1 / stages_per_rank
    costs = schedules.Costs(
        forward=part, backward_input=part, backward_weight=part, activation=part
    )
    return schedules.simulate(
        schedule, num_microbatches=num_microbatches, costs=costs, transfer=transfer
    )


def first() -> Panels:
    """One step of a small pipeline, for the first screen."""
    return [("One step under 1F1B: 4 stages, 6 microbatches", step("1f1b", 6))]


def bubble() -> Panels:
    """The same pipeline with few and with many microbatches."""
    return [(f"1F1B, {m} microbatches", step("1f1b", m)) for m in (2, 4, 12)]


def orders() -> Panels:
    """Schedules that hold fewer activations, or idle less."""
    return [
        ("GPipe", step("gpipe", 8)),
        ("1F1B", step("1f1b", 8)),
        (
            "interleaved 1F1B, two stages on each rank",
            step("interleaved_1f1b", 8, stages_per_rank=2),
        ),
        ("ZB-H1", step("zero_bubble", 8)),
    ]


def stages() -> Panels:
    """An uneven cut: every rank waits for the slowest one."""
    panels = []
    for title, times in (
        ("equal stages", [1, 1, 1, 1]),
        ("the same work, cut unevenly", [0.8, 0.8, 0.8, 1.6]),
    ):
        costs = schedules.Costs(
            forward=times, backward_input=times, backward_weight=times
        )
        panels.append(
            (
                title,
                schedules.simulate(
                    schedules.Std1F1B(4), num_microbatches=6, costs=costs
                ),
            )
        )
    return panels


def choosing_stages() -> Panels:
    """The same model and batch cut into more and more stages."""
    panels = []
    for stages in (2, 4, 8):
        part = 4 / stages
        costs = schedules.Costs(
            forward=part, backward_input=part, backward_weight=part, activation=part
        )
        timeline = schedules.simulate(
            schedules.Std1F1B(stages), num_microbatches=8, costs=costs
        )
        panels.append((f"{stages} stages, 8 microbatches", timeline))
    return panels


def choosing_microbatches() -> Panels:
    """The same batch on the same stages, divided into few and into many microbatches."""
    panels = []
    for number in (4, 16):
        part = 16 / number
        costs = schedules.Costs(
            forward=part, backward_input=part, backward_weight=part, activation=part
        )
        timeline = schedules.simulate(
            schedules.Std1F1B(4), num_microbatches=number, costs=costs
        )
        panels.append((f"the batch in {number} microbatches", timeline))
    return panels


def choosing_schedule() -> Panels:
    """The remedies for a large bubble with few microbatches."""
    return [
        ("1F1B", step("1f1b", 4)),
        (
            "interleaved 1F1B, two stages on each rank",
            step("interleaved_1f1b", 4, stages_per_rank=2),
        ),
        ("ZB-V, two stages on each rank", step("zbv", 4, stages_per_rank=2)),
    ]


def schedule_zero_bubble() -> Panels:
    """A backward in two halves: the weight gradients fill the gaps."""
    return [
        (title, step(name, 8))
        for title, name in (
            ("1F1B", "1f1b"),
            ("ZB-H1", "zero_bubble"),
            ("ZB-H2", "zero_bubble_h2"),
        )
    ]


def schedule_v() -> Panels:
    """Two stages on each rank, dealt out in turn and in a V."""
    named = (("interleaved 1F1B", "interleaved_1f1b"), ("ZB-V", "zbv"))
    return [(title, step(name, 8, stages_per_rank=2)) for title, name in named]


FIGURES: tuple[Callable[[], Panels], ...] = (
    first,
    bubble,
    orders,
    stages,
    choosing_stages,
    choosing_microbatches,
    choosing_schedule,
    schedule_zero_bubble,
    schedule_v,
)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if a file differs"
    )
    check = parser.parse_args(arguments).check
    stale = []
    for draw in FIGURES:
        path, text = IMAGES / f"{draw.__name__}.svg", svg(draw())
        if not check:
            path.write_text(text, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            stale.append(path.name)
    if stale:
        print(f"{', '.join(stale)}: run `python docs/figures.py`")
    return len(stale)


if __name__ == "__main__":
    sys.exit(main())
