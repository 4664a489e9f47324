"""What a memory limit costs: the simulated step of a 7B-sized model, with residuals kept, recomputed and offloaded.

    python benchmarks/residuals.py [--microbatches 32] [--host-bandwidth 50e9] [--flops 400e12] [--json FILE]

The model has 32 layers of width 4096 and sequences of 4096 tokens, one in each microbatch, in bfloat16. For each layer
and microbatch a forward takes 24 s h^2 + 4 s^2 h FLOPs and keeps 34 s h bytes for its backward (attention keeps no
scores), from "Reducing Activation Recomputation in Large Transformer Models", arXiv 2205.05198. Of these, 14 s h follow
from the rest by norms, GELU and dropout's masks: a policy of `jax.checkpoint` in the model need not save them, and the
backward makes them again. A backward takes twice the forward. The limit is a share of the residuals that the fullest
rank holds if all stay on the devices; parameters, gradients and optimizer come on top of it. Nothing is measured: it is
the model of `jaxpp_flax.planning`.

It exits with 1 if a promise does not hold: with 60 % of the residuals, every schedule, with the policy or without,
takes at most 1.05 times the step without either; without a limit all residuals stay on the devices.

Beside it, as their abstracts tell:
- "PipeOffload: Improving Scalability of Pipeline Parallelism with Memory Optimization", arXiv 2503.01328: in the
  majority of standard configurations, at least half, and potentially all, of the activations can be offloaded with
  negligible overhead.
- "Pipeline Parallelism with Controllable Memory", arXiv 2405.15362: schedules of another shape reduce the peak
  activation memory to 1/2 of 1F1B without sacrificing efficiency, and even to 1/3 with comparable throughput.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path

from jaxpp_flax.messages import amount
from jaxpp_flax.planning import Hardware, LimitError, Prediction, StageLoad, StepModel, choose_residuals
from jaxpp_flax.schedules import Interleaved1F1B, ResidualPlan, Schedule, Std1F1B

LAYERS, WIDTH, LENGTH = 32, 4096, 4096
FORWARD_FLOPS = 24 * LENGTH * WIDTH**2 + 4 * LENGTH**2 * WIDTH  # of a layer
RESIDUAL_BYTES = 34 * LENGTH * WIDTH
# Two outputs of norms (2 s h bytes each), the output of GELU (8 s h), and two masks of dropout (1 s h each).
UNSAVED_BYTES = 14 * LENGTH * WIDTH
UNSAVED_TRAFFIC = 26 * LENGTH * WIDTH  # these are written, and the inputs of norms and GELU are read
MEMORY_BANDWIDTH = 2e12  # bytes a second of a device
STREAM_BYTES = 2 * LENGTH * WIDTH
PARAMETERS = 12 * WIDTH**2
MOST = 1.05  # times the step without a limit, at 60 % of the residuals
SHARES = (1.0, 0.8, 0.6, 0.5, 0.4)


def cases() -> list[tuple[str, Schedule]]:
    return [
        ("1F1B, 4 ranks", Std1F1B(4)),
        ("1F1B, 8 ranks", Std1F1B(8)),
        ("1F1B, 16 ranks", Std1F1B(16)),
        ("interleaved, 4 ranks, 2 stages on each", Interleaved1F1B(8, 4)),
        ("interleaved, 8 ranks, 2 stages on each", Interleaved1F1B(16, 8)),
    ]


def model_of(schedule: Schedule, hardware: Hardware, microbatches: int, *, policy: bool) -> StepModel:
    layers = LAYERS / schedule.num_stages
    forward = layers * FORWARD_FLOPS / hardware.flops
    again = layers * UNSAVED_TRAFFIC / MEMORY_BANDWIDTH if policy else 0.0
    bytes_of = {"parameters": 2, "gradients": 4, "optimizer": 12}
    load = StageLoad(
        forward=forward,
        backward=2 * forward + again,
        residual_bytes=layers * (RESIDUAL_BYTES - (UNSAVED_BYTES if policy else 0)),
        input_bytes=STREAM_BYTES,
        sent_bytes=STREAM_BYTES,
        fixed_bytes={kind: layers * PARAMETERS * n for kind, n in bytes_of.items()},
    )
    return StepModel(
        schedule=schedule, num_microbatches=microbatches, stages=[load] * schedule.num_stages, hardware=hardware
    )


def rows_of(name: str, model: StepModel, keep: Prediction, *, policy: bool) -> list[dict[str, object]]:
    most = max(peak - fixed for peak, fixed in zip(keep.peak_bytes, model.rank_fixed, strict=True))
    rows: list[dict[str, object]] = []
    for share in SHARES:
        began = time.perf_counter()
        row: dict[str, object] = {"schedule": name, "policy": policy, "limit": share}
        try:
            found = choose_residuals(model, [fixed + share * most for fixed in model.rank_fixed])
        except LimitError:
            rows.append({**row, "step": None})
            continue
        total = sum(load.residual_bytes for load in model.stages) * model.num_microbatches
        held = max(p - fixed for p, fixed in zip(found.prediction.peak_bytes, model.rank_fixed, strict=True))
        rows.append(
            {
                **row,
                "step": found.prediction.seconds / keep.seconds,
                "seconds": found.prediction.seconds,
                "peak": held / most,
                "device bytes": max(found.prediction.peak_bytes),
                "host bytes": max(found.prediction.host_bytes),
                "moved": found.prediction.moved / total,
                "recomputed": _recomputed(model, found.residuals) * model.num_microbatches / total,
                "kept": found.residuals.is_kept,
                "search seconds": time.perf_counter() - began,
            }
        )
    return rows


def _recomputed(model: StepModel, residuals: ResidualPlan) -> float:
    pairs = zip(model.stages, residuals.stages, strict=True)
    return sum(load.residual_bytes - load.saved_bytes for load, entry in pairs if entry.recompute)


def show(row: dict[str, object]) -> str:
    if row["step"] is None:
        return f"{row['schedule']:40} {row['policy']!s:6} {row['limit']:6.0%}  nothing fits"
    return (
        f"{row['schedule']:40} {row['policy']!s:6} {row['limit']:6.0%} {row['peak']:6.0%} "
        f"{row['step']:8.4f} {row['moved']:6.0%} "
        f"{row['recomputed']:11.0%} {amount(row['device bytes'], 'B'):>9} {amount(row['host bytes'], 'B'):>9} "  # type: ignore[arg-type]
        f"{row['search seconds']:7.1f}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--flops", type=float, default=400e12, help="FLOPs that a device does in a second")
    parser.add_argument("--host-bandwidth", type=float, default=50e9, help="bytes a second, in each direction")
    parser.add_argument("--link-bandwidth", type=float, default=50e9, help="bytes a second from rank to rank")
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args()
    hardware = Hardware(flops=flags.flops, host_bandwidth=flags.host_bandwidth, link_bandwidth=flags.link_bandwidth)
    head = ("schedule", "policy", "limit", "peak", "step", "moved", "recomputed", "device", "host", "search")
    print("{:40} {:6} {:>6} {:>6} {:>8} {:>6} {:>11} {:>9} {:>9} {:>7}".format(*head))
    rows: list[dict[str, object]] = []
    failures: list[str] = []
    for name, schedule in cases():
        best = math.inf
        keep = choose_residuals(model_of(schedule, hardware, flags.microbatches, policy=False)).prediction
        for policy in (False, True):
            model = model_of(schedule, hardware, flags.microbatches, policy=policy)
            for row in rows_of(name, model, keep, policy=policy):
                rows.append(row)
                print(show(row), flush=True)
                if row["limit"] == 0.6 and row["step"] is not None:
                    best = min(best, row["step"])  # type: ignore[type-var]
                if row["limit"] == 1.0 and not row.get("kept"):
                    failures.append(f"{name}: without need, residuals do not stay on the devices")
        if best > MOST:
            failures.append(f"{name}: {best} times the step at 60 %")
    result = {"hardware": vars(hardware), "microbatches": flags.microbatches, "rows": rows, "failures": failures}
    print(json.dumps(result))
    if flags.json is not None:
        flags.json.write_text(json.dumps(result))
    for failure in failures:
        print("FAILED:", failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
