"""Peak live bytes above the arguments, for each schedule: what the program says, and what JAX really holds.

python benchmarks/memory.py
"""

from __future__ import annotations

from typing import Any

from workload import Contestant, batch, mesh, parameters, parser, prepare, report, train_step


def peak_of_live_arrays(compiled: Any, contestant: Contestant) -> int:
    """The most bytes of live arrays between two instructions of one step, above those before it."""
    import gc

    import jax

    runtime = compiled._runtime
    gc.collect()
    before = sum(a.nbytes for a in jax.live_arrays())
    peak = 0
    steps = runtime._steps

    def watched(step: Any) -> Any:
        def run(environment: list[Any]) -> None:
            nonlocal peak
            step(environment)
            peak = max(peak, sum(a.nbytes for a in jax.live_arrays() if not a.is_deleted()))

        return run

    runtime._steps = [watched(step) for step in steps]
    try:
        contestant.run()
    finally:
        runtime._steps = steps
    return peak - before


def main() -> None:
    flags = parser(__doc__ or "")
    flags.set_defaults(blocks=8, width=128, length=64, microbatches=32, batch=4)
    arguments = flags.parse_args()
    prepare(arguments, arguments.stages)

    from jaxpp_flax.api import mpmd_jit_with_loop
    from jaxpp_flax.schedules import by_name

    params, data = parameters(arguments), batch(arguments)
    rows: list[dict[str, object]] = []
    for name in ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"):
        ranks = arguments.stages
        cut = 2 * ranks if name == "interleaved_1f1b" else ranks
        function = mpmd_jit_with_loop(train_step(cut, by_name(name, cut, ranks)), mesh(ranks), donate_argnums=0)
        contestant = Contestant(function, params, data)
        contestant.run()
        compiled = function.compile(contestant.params, data)
        analysis = compiled.memory_analysis()
        rows.append(
            {
                "schedule": name,
                "predicted MB, all ranks": sum(a.peak_bytes for a in analysis) / 1e6,
                "predicted MB, fullest rank": max(a.peak_bytes for a in analysis) / 1e6,
                "live MB, all ranks": peak_of_live_arrays(compiled, contestant) / 1e6,
                "live microbatches": str({s: n for a in analysis for s, n in a.live_microbatches.items()}),
            }
        )
    report(f"peak bytes above the arguments, {arguments.microbatches} microbatches", rows, arguments.json)


if __name__ == "__main__":
    main()
