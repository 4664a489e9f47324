"""Peak live bytes above the arguments, for each schedule: what the program says, and what JAX really holds.

python benchmarks/memory.py

Then, where stages recompute, what a task makes again: what a plan says, and the workspace that XLA takes for the task.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from workload import Contestant, batch, mesh, parameters, parser, prepare, report, train_step


def by_device(mesh: Any, of_ranks: Sequence[int]) -> list[int]:
    """The bytes of the ranks of each device: one device may hold several."""
    held: dict[Any, int] = {}
    for rank, nbytes in enumerate(of_ranks):
        device = mesh.rank_devices(rank)[0]
        held[device] = held.get(device, 0) + nbytes
    return list(held.values())


def live_peaks(compiled: Any, contestant: Contestant, kind: str = "device") -> list[int]:
    """For each device, the most bytes of a kind of memory that it holds between two instructions, above those before.

    Several ranks on one device need not reach their peaks together: it then holds less than the sum of their peaks.
    """
    import gc

    import jax

    runtime, mesh = compiled.runtime, compiled.mpmd_mesh
    devices = list(dict.fromkeys(mesh.rank_devices(rank)[0] for rank in range(mesh.mpmd_dim)))

    def held() -> list[int]:
        bytes_of = dict.fromkeys(devices, 0)
        for array in jax.live_arrays():
            if not array.is_deleted() and array.sharding.memory_kind in (None, kind):
                # Not `addressable_shards`: they would be arrays of their own, and counted again.
                nbytes = math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
                for device in array.sharding.addressable_devices:
                    bytes_of[device] = bytes_of.get(device, 0) + nbytes
        return [bytes_of[device] for device in devices]

    steps, seen = runtime._steps, [0] * len(devices)

    def watched(step: Any) -> Any:
        def run(environment: list[Any]) -> None:
            step(environment)
            seen[:] = map(max, seen, held())

        return run

    gc.collect()
    before: list[int] = []
    # The arguments are in place when the first instruction runs, as they are not when the call begins.
    runtime._steps = [lambda _: before.extend(held()), *map(watched, steps)]
    try:
        contestant.run()
    finally:
        runtime._steps = steps
    return [peak - start for peak, start in zip(seen, before, strict=True)]


def allocated(which: str) -> int | None:
    """The bytes that the allocators of all devices count, "bytes_in_use" or "peak_bytes_in_use"; None on CPU."""
    import jax

    counts = [device.memory_stats() for device in jax.local_devices()]
    return sum(count[which] for count in counts if count) if any(counts) else None


def allocated_by_a_step(contestant: Contestant) -> dict[str, object]:
    """What the allocator held at the peak of a step that is compiled, above what it held before.

    The allocator's peak is that of the whole process: where compiling took more, it is an upper bound.
    """
    held, peak = allocated("bytes_in_use"), allocated("peak_bytes_in_use")
    contestant.run()
    after = allocated("peak_bytes_in_use")
    if held is None or peak is None or after is None:
        return {"allocator MB": "", "of the step": ""}
    return {"allocator MB": (after - held) / 1e6, "of the step": after > peak}


def recomputing(params: Any, data: Any, stages: int) -> list[dict[str, object]]:
    """The estimated workspace of each task of a loop that recomputes, and XLA's own."""
    from jax.sharding import PartitionSpec

    from jaxpp_flax.engine.analyses.workspace import workspace
    from jaxpp_flax.engine.jit import mpmd_jit_with_loop
    from jaxpp_flax.schedules import ResidualPlan, StageResiduals, by_name

    rows: list[dict[str, object]] = []
    for name in ("gpipe", "1f1b"):
        residuals = ResidualPlan([StageResiduals(recompute=True)] * stages)
        step = train_step(stages, by_name(name, stages, stages))
        compiled = mpmd_jit_with_loop(step, mesh(stages), residuals=residuals).compile(params, data)
        for task, executable in zip(compiled.program.tasks, compiled.executables.tasks, strict=True):
            whole = [PartitionSpec()] * len(task.graph.inputs)
            inside = workspace(task.graph, whole, {})
            if inside and task.kind is not None:
                temporary = executable.memory_analysis().temp_size_in_bytes
                rows.append(
                    {
                        "schedule": name,
                        "task": task.name,
                        "planned MB": inside / 1e6,
                        "workspace MB": temporary / 1e6,
                        "workspace over planned": temporary / inside,
                    }
                )
    return rows


def main() -> None:
    flags = parser(__doc__ or "")
    flags.set_defaults(blocks=8, width=128, length=64, microbatches=32, batch=4)
    arguments = flags.parse_args()
    prepare(arguments, arguments.stages)

    from jaxpp_flax.api import mpmd_jit_with_loop
    from jaxpp_flax.schedules import by_name

    params, data = parameters(arguments), batch(arguments)
    rows: list[dict[str, object]] = []
    for name in ("1f1b", "zero_bubble", "interleaved_1f1b", "gpipe"):  # ascending: each raises the allocator's peak
        ranks = arguments.stages
        cut = 2 * ranks if name == "interleaved_1f1b" else ranks
        function = mpmd_jit_with_loop(train_step(cut, by_name(name, cut, ranks)), mesh(ranks), donate_argnums=0)
        contestant = Contestant(function, params, data)
        function.compile(contestant.params, data)
        allocator = allocated_by_a_step(contestant)
        compiled = function.compile(contestant.params, data)
        predicted = by_device(compiled.mpmd_mesh, [of.peak_bytes for of in compiled.memory_analysis()])
        live = live_peaks(compiled, contestant)
        rows.append(
            {
                "schedule": name,
                "predicted MB, all devices": sum(predicted) / 1e6,
                "live MB, all devices": sum(live) / 1e6,
                "live over predicted, worst device": max(b / a for a, b in zip(predicted, live, strict=True)),
                "live MB, fullest device": max(live) / 1e6,
                **allocator,
            }
        )
    report(f"peak bytes above the arguments, {arguments.microbatches} microbatches", rows, arguments.json)
    report("what recomputing tasks hold", recomputing(params, data, arguments.stages), None)


if __name__ == "__main__":
    main()
