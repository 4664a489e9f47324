"""Numbers on the device: `verify` block by block, in float32 ("highest") under three schedules, and in bfloat16.

A row says what differs first, and by how many units of rounding; else how far the farthest array is, and what
rounding explains of it.
"""

from __future__ import annotations

import time
from typing import Any

import workload
from trainers import batches, flags_of, trainer_of


def described(report: Any) -> dict[str, object]:
    """The figures of a report: the first difference, or the farthest array over what rounding explains."""
    row = report.first or max(report.rows, key=lambda row: row.distance / max(row.allowed, 1e-9))
    return {
        "agrees": report.agrees,
        "arrays": len(report.rows),
        "first that differs" if report.first else "farthest": f"{row.kind} {row.block} {row.leaf}",
        "units apart": row.distance,
        "explained": row.allowed,
        "not compared": report.uncompared,
    }


def main() -> None:
    flags = flags_of(__doc__ or "")
    flags.add_argument("--cases", nargs="+", default=["1f1b", "bfloat16", "zero_bubble", "interleaved_1f1b"])
    arguments = flags.parse_args()
    workload.prepare(arguments, arguments.stages)
    import jax

    from jaxpp_flax.verify import verify

    (batch,) = batches(arguments, 1)
    for case in arguments.cases:
        start = time.perf_counter()
        narrow = case == "bfloat16"
        jax.config.update("jax_default_matmul_precision", None if narrow else "highest")
        trainer = trainer_of(arguments, "1f1b" if narrow else case, **({"precision": case} if narrow else {}))
        trainer.train_step(batch)  # the blocks of the example begin as the identity
        row = {"verified": case if narrow else f"float32, {case}", **described(verify(trainer, batch))}
        workload.report(f"verify: {case}", [{**row, "seconds": time.perf_counter() - start}], None)


if __name__ == "__main__":
    main()
