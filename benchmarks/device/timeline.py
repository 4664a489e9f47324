"""What a device does while a step runs, from JAX's trace: its idle time, and how much of its copies is hidden.

Each contestant takes one traced step after two others. A gap is time in which no kernel and no copy runs, between the
first and the last one of the step. A copy is hidden while a kernel runs beside it.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from workload import Contestant, batch, mesh, parameters, parser, prepare, report, train_step

Interval = tuple[float, float]  # start and end, in nanoseconds


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as intervals that do not overlap, in order.

    >>> union([(5, 7), (0, 2), (1, 3)])
    [(0, 3), (5, 7)]
    """
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def length(intervals: Sequence[Interval]) -> float:
    """Nanoseconds of intervals that do not overlap."""
    return sum(end - start for start, end in intervals)


def overlap(one: Sequence[Interval], other: Sequence[Interval]) -> float:
    """Nanoseconds that two lists of intervals have in common, each without overlaps.

    >>> overlap([(0, 4), (6, 9)], [(3, 7)])
    2
    """
    return length(one) + length(other) - length(union([*one, *other]))


def described(kernels: Sequence[Interval], copies: Sequence[Interval]) -> dict[str, object]:
    """The figures of one step from the intervals of its kernels and of its copies to and from the host."""
    computing, copying = union(kernels), union(copies)
    busy = union([*computing, *copying])
    gaps = [after[0] - before[1] for before, after in itertools.pairwise(busy)]
    whole = busy[-1][1] - busy[0][0]
    return {
        "device ms": whole / 1e6,
        "kernels": len(kernels),
        "idle": 1 - length(busy) / whole,
        "gaps above 10 µs": sum(gap > 10e3 for gap in gaps),
        "longest gap µs": max(gaps, default=0.0) / 1e3,
        "copies ms": length(copying) / 1e6,
        "copies hidden": overlap(copying, computing) / length(copying) if copying else "",
    }


def intervals_of(folder: str) -> tuple[list[Interval], list[Interval]]:
    """The kernels of the first device in a trace, and its copies to and from the host."""
    from jax.profiler import ProfileData

    (file,) = Path(folder).rglob("*.xplane.pb")
    kernels: list[Interval] = []
    copies: list[Interval] = []
    planes = sorted(ProfileData.from_file(str(file)).planes, key=lambda plane: plane.name)
    device = next((plane for plane in planes if plane.name.startswith("/device:")), None)
    for line in () if device is None else device.lines:
        if not line.name.startswith("Stream"):  # other lines say the same by modules and operations
            continue
        for event in line.events:
            name = event.name.lower()
            host = name.startswith("memcpy") and ("d2h" in name or "h2d" in name)
            (copies if host else kernels).append((event.start_ns, event.start_ns + event.duration_ns))
    return kernels, copies


def traced(contestant: Contestant) -> dict[str, object]:
    """The figures of one step; none where the trace has no device, as on CPU."""
    import jax

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = options.host_tracer_level = 0  # they would slow the dispatch that they watch
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            contestant.run()
        kernels, copies = intervals_of(folder)
    return described(kernels, copies) if kernels else {"device ms": "", "idle": "no device in the trace"}


def main() -> None:
    flags = parser(__doc__ or "")
    flags.set_defaults(blocks=8, width=256, length=256, microbatches=16)
    flags.add_argument("--contestants", nargs="+", default=["plain", "1f1b", "zero_bubble", "offload"])
    arguments = flags.parse_args()
    prepare(arguments, arguments.stages)
    import jax

    from jaxpp_flax import mpmd_jit_with_loop
    from jaxpp_flax.schedules import ResidualPlan, StageResiduals, by_name

    ranks, params, data = arguments.stages, parameters(arguments), batch(arguments)
    for name in arguments.contestants:
        step: Any
        if name == "plain":
            step = jax.jit(train_step(ranks, None), donate_argnums=0)
        else:
            moved = ResidualPlan([StageResiduals(offload=1.0)] * ranks, offload_within=1)
            schedule = by_name("1f1b" if name == "offload" else name, ranks, ranks)
            plan = moved if name == "offload" else None
            step = mpmd_jit_with_loop(train_step(ranks, schedule), mesh(ranks), donate_argnums=0, residuals=plan)
        contestant = Contestant(step, params, data)
        contestant.run()
        contestant.run()
        report(f"one step on the device: {name}", [{"contestant": name, **traced(contestant)}], None)


if __name__ == "__main__":
    main()
