"""Residuals moved to the host or recomputed: bytes predicted and live, equal results, and the time of a step.

python benchmarks/offload.py
"""

from __future__ import annotations

from typing import Any

from memory import by_device, live_peaks
from workload import Contestant, batch, mesh, parameters, parser, prepare, race, report, train_step


def largest_difference(one: Any, other: Any) -> float:
    """The largest difference of two trees of parameters, over the largest entry of its leaf; 0.0 for equal bits."""
    import jax
    import numpy as np

    pairs = zip(map(np.asarray, jax.tree.leaves(one)), map(np.asarray, jax.tree.leaves(other)), strict=True)
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)


def main() -> None:
    flags = parser(__doc__ or "")
    flags.set_defaults(blocks=8, width=128, length=64, microbatches=16, batch=4, repeats=5)
    flags.add_argument("--schedule", default="1f1b", help="a name of jaxpp_flax.schedules")
    arguments = flags.parse_args()
    prepare(arguments, arguments.stages)

    from jaxpp_flax import mpmd_jit_with_loop
    from jaxpp_flax.schedules import ResidualPlan, StageResiduals, by_name

    ranks, params, data = arguments.stages, parameters(arguments), batch(arguments)
    plans = {
        "keep": StageResiduals(),
        "offload": StageResiduals(offload=1.0),
        "offload half of the microbatches": StageResiduals(offload=0.5),
        "recompute": StageResiduals(recompute=True),
    }
    functions = {
        name: mpmd_jit_with_loop(
            train_step(ranks, by_name(arguments.schedule, ranks, ranks)),
            mesh(ranks),
            donate_argnums=0,
            residuals=ResidualPlan([stage] * ranks, offload_within=1),
        )
        for name, stage in plans.items()
    }
    contestants = {name: Contestant(function, params, data) for name, function in functions.items()}
    race(contestants, arguments.repeats)
    trained = {name: largest_difference(c.params, contestants["keep"].params) for name, c in contestants.items()}
    rows: list[dict[str, object]] = []
    for name, contestant in contestants.items():
        compiled = functions[name].compile(contestant.params, data)
        analysis, of = compiled.memory_analysis(), compiled.mpmd_mesh
        rows.append(
            {
                "residuals": name,
                "device MB predicted, fullest device": max(by_device(of, [a.peak_bytes for a in analysis])) / 1e6,
                "live": max(live_peaks(compiled, contestant)) / 1e6,
                "host MB predicted, fullest device": max(by_device(of, [a.host_peak_bytes for a in analysis])) / 1e6,
                "live ": max(live_peaks(compiled, contestant, "pinned_host")) / 1e6,
                "weights differ by": trained[name],
                "time over keep": contestant.median / contestants["keep"].median,
            }
        )
        contestants[name].params = params  # live bytes are those of one contestant
    report(f"residuals under {arguments.schedule}, {arguments.microbatches} microbatches", rows, arguments.json)


if __name__ == "__main__":
    main()
